"""Admin acts on alerts: acknowledge one, and silence its problem until an instant.

A silence lies with the alerts in the database, so whichever gateway evaluates them honours it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from sqlalchemy import Connection, insert

from tenants.admin.audit import Actor
from tenants.admin.transaction import AdminActs, Change
from tenants.directory import queries
from tenants.errors import Invalid, NotFound
from tenants.fields import Field
from tenants.nouns import checks
from tenants.outbox import incidents as store
from tenants.outbox.transitions import Incident
from tenants.storage.tables import alert_silences, incidents

MAX_SILENCE_S = 30 * 86_400
MAX_SILENCES = 1_000


class AlertSilence(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/alerts/{alert}/silence`."""

    for_s: Annotated[
        float,
        Field(
            "How long: 2h or 3d, at most 30d.",
            "For",
            "--for",
            is_duration=True,
            schema={"exclusiveMinimum": 0, "maximum": MAX_SILENCE_S},
        ),
    ]
    reason: Annotated[str, Field("Why; shown with the alert and in the audit.", schema=checks.REASON)]


class AlertActs(AdminActs):
    async def acknowledge(self, actor: Actor | str, incident_id: str) -> Incident:
        """Marks all firing alerts of its problem with who looks after them. Raises `NotFound`, `Invalid`."""

        def write(connection: Connection, alert: Incident, now_us: int) -> None:
            if alert.resolved_us is not None:
                raise Invalid("alert", "it is resolved already")
            store.acknowledge(connection, alert.problem, _name(actor), now_us)

        return await self._change(actor, "alert.acknowledge", incident_id, write)

    async def silence(self, actor: Actor | str, incident_id: str, wanted: AlertSilence) -> Incident:
        """No webhook hears of its problem until then. Replaces an earlier silence. Raises `NotFound`,
        `Invalid`."""
        checks.seconds("for_s", wanted.for_s, MAX_SILENCE_S, least=1)
        row = {"by": _name(actor), "reason": checks.reason(wanted.reason)}

        def write(connection: Connection, alert: Incident, now_us: int) -> None:
            store.end_silence(connection, alert.problem)
            if len(store.silences(connection)) >= MAX_SILENCES:
                raise Invalid("alert", f"{MAX_SILENCES} are silenced, which is the most")
            until_us = now_us + round(wanted.for_s * 1e6)
            connection.execute(insert(alert_silences).values(problem=alert.problem, until_us=until_us, **row))

        return await self._change(actor, "alert.silence", incident_id, write)

    async def unsilence(self, actor: Actor | str, incident_id: str) -> Incident:
        """Raises `NotFound`."""

        def write(connection: Connection, alert: Incident, now_us: int) -> None:
            if alert.silence is None:
                raise NotFound("silence", incident_id[:80])
            store.end_silence(connection, alert.problem)

        return await self._change(actor, "alert.unsilence", incident_id, write)

    async def _change(
        self,
        actor: Actor | str,
        act: str,
        incident_id: str,
        write: Callable[[Connection, Incident, int], None],
    ) -> Incident:
        def change(connection: Connection, now_us: int) -> Change[Incident]:
            before = find_alert(connection, incident_id)
            write(connection, before, now_us)
            after = find_alert(connection, incident_id)
            tenant_id = before.tenant_id or None
            return Change(after, before.incident_id, tenant_id, before.as_json(), after.as_json())

        return await self._transactions.act(actor, act, change)


def find_alert(connection: Connection, incident_id: str) -> Incident:
    """Raises `NotFound`."""
    found = store.latest(connection, incidents.c.id == queries.plain(incident_id), most=1)
    if not found:
        raise NotFound("alert", incident_id[:80])
    return found[0]


def _name(actor: Actor | str) -> str:
    return actor if isinstance(actor, str) else actor.name
