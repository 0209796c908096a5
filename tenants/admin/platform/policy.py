"""Admin acts on the stored scheduling policy.

One row of the settings for its name and one for each option, so that each fits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, Connection, delete, insert, select

from tenants.admin.audit import Actor
from tenants.admin.transaction import AdminActs, Change, IfMatch
from tenants.errors import Invalid
from tenants.storage import tables

POLICY_SETTING = "policy"
MAX_VALUE = 256
"""Characters of a setting's value."""


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A policy by name, with the options that are not the defaults."""

    name: str
    options: Mapping[str, str | int | float] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {"policy": self.name, "options": dict(self.options)}


class PolicyActs(AdminActs):
    async def store(
        self, actor: Actor | str, wanted: StoredPolicy, before: StoredPolicy, *, if_match: IfMatch = None
    ) -> None:
        """For all gateways of the database. `before`: the active one where none is stored."""
        rows = {POLICY_SETTING: wanted.name} | {
            f"{POLICY_SETTING}.{name}": json.dumps(value) for name, value in wanted.options.items()
        }
        for name, text in rows.items():
            if len(text) > MAX_VALUE:
                raise Invalid(
                    name,
                    f"has {len(text)} characters; the most is {MAX_VALUE}: give the file a shorter path, or"
                    " name it in the setting policy.table of each gateway",
                )

        def change(connection: Connection, now_us: int) -> Change[None]:
            current = read_policy(connection) or before
            _forget(connection)
            connection.execute(
                insert(tables.settings), [{"name": name, "value": text} for name, text in rows.items()]
            )
            return Change(None, POLICY_SETTING, None, current.as_json(), wanted.as_json())

        await self._transactions.act(actor, "policy.set", change, if_match)

    async def forget(
        self, actor: Actor | str, wanted: StoredPolicy, before: StoredPolicy, *, if_match: IfMatch = None
    ) -> None:
        """Each gateway's settings count again. `wanted`: what they set."""

        def change(connection: Connection, now_us: int) -> Change[None]:
            current = read_policy(connection) or before
            _forget(connection)
            return Change(None, POLICY_SETTING, None, current.as_json(), wanted.as_json())

        await self._transactions.act(actor, "policy.from_settings", change, if_match)

    async def stored(self) -> StoredPolicy | None:
        """The stored policy; None: the settings count."""
        return await self._transactions.read(read_policy)


def read_policy(connection: Connection) -> StoredPolicy | None:
    columns = tables.settings.c
    query = select(columns.name, columns.value).where(_is_policy())
    rows = {row.name: row.value for row in connection.execute(query)}
    name = rows.pop(POLICY_SETTING, None)
    if name is None:
        return None
    return StoredPolicy(name, {key.partition(".")[2]: json.loads(value) for key, value in rows.items()})


def _is_policy() -> ColumnElement[bool]:
    name = tables.settings.c.name
    return (name == POLICY_SETTING) | name.startswith(f"{POLICY_SETTING}.", autoescape=True)


def _forget(connection: Connection) -> None:
    connection.execute(delete(tables.settings).where(_is_policy()))
