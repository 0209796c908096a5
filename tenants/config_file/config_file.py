"""Export, plan and apply of the configuration file, on a database."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection

from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.admin.transaction import IfMatch, require_match
from tenants.config_file.base import ConfigInvalid
from tenants.config_file.document import Configuration
from tenants.config_file.export import exported, left_out
from tenants.config_file.plan import PlanTerms, make_plan
from tenants.config_file.state import ConfigState, read_state
from tenants.config_file.steps import ConfigPlan, ConfigStep, PolicyMove, standing_at, stored
from tenants.directory import queries
from tenants.errors import AlreadyExists, NotFound, PreconditionFailed
from tenants.nouns.key import KeyChange, KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.nouns.project import ProjectCreate
from tenants.nouns.tenant import TenantChange, TenantCreate
from tenants.resources.resource import ActCall, ResourceAct
from tenants.storage.database import Database


@dataclass(frozen=True, slots=True)
class ConfigExport:
    revision: int
    wanted: Configuration
    left_out: tuple[str, ...]
    """What a file cannot name."""

    def as_json(self) -> dict[str, Any]:
        return {
            "object": "config",
            "revision": self.revision,
            "config": msgspec.to_builtins(self.wanted),
            "left_out": list(self.left_out),
        }


@dataclass(frozen=True, slots=True)
class MadeKey:
    """A key that was created, with its secret, which cannot be read again."""

    tenant: str
    name: str
    key_id: str
    secret: str

    def as_json(self) -> dict[str, Any]:
        return {"tenant": self.tenant, "name": self.name, "id": self.key_id, "key": self.secret}


class ConfigFile:
    """The configuration file of one database. Every step is an act of `Admin`."""

    def __init__(
        self,
        database: Database,
        admin: Admin,
        terms: PlanTerms,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._admin = admin
        self._terms = terms
        self._acts = {act.name: act for resource in terms.resources for act in resource.acts}
        self._clock = clock

    async def export(self) -> ConfigExport:
        def look(connection: Connection) -> ConfigExport:
            state = self._state(connection)
            return ConfigExport(
                state.revision, exported(state, self._terms.resources), tuple(left_out(state))
            )

        return await self._database.read(look)

    async def plan(self, wanted: Configuration, *, if_match: IfMatch = None) -> ConfigPlan:
        """What `apply` would do now. Raises `ConfigInvalid`, `PreconditionFailed` at another revision."""

        def look(connection: Connection) -> ConfigPlan:
            state = self._state(connection)
            require_match(if_match, stored(state.revision))
            return make_plan(state, wanted, self._terms)

        return await self._database.read(look)

    async def apply(
        self, actor: Actor | str, plan: ConfigPlan, *, is_rehearsal: bool = False
    ) -> list[MadeKey]:
        """Does a plan in one transaction, with an audit row a step; returns the new keys. Rolls a rehearsal
        back. Raises `PreconditionFailed` at another revision, `ConfigInvalid` for what an act refuses."""

        async def acts(inside: Admin) -> list[MadeKey]:
            made: dict[tuple[str, str], MadeKey] = {}
            for step in plan.steps:
                with standing_at(step.place):
                    try:
                        await _perform(inside, actor, step, made, self._acts)
                    except (AlreadyExists, NotFound) as error:
                        raise ConfigInvalid(step.place, str(error)) from None
            return list(made.values())

        if not plan.steps:
            await self._require(plan.revision)
            return []
        return await self._admin.in_one_transaction(
            acts, at_revision=plan.revision, is_rehearsal=is_rehearsal
        )

    async def _require(self, revision: int) -> None:
        now = await self._database.read(queries.revision)
        if now != revision:
            raise PreconditionFailed(stored(now))

    def _state(self, connection: Connection) -> ConfigState:
        return read_state(connection, round(self._clock() * 1e6), self._terms.resources)


async def _perform(
    admin: Admin,
    actor: Actor | str,
    step: ConfigStep,
    made: dict[tuple[str, str], MadeKey],
    acts: Mapping[str, ResourceAct],
) -> None:
    """Does one step; a new key goes to `made`."""
    tenant, reference = step.tenant, step.reference
    match step.act, step.command:
        case "tenant.create", TenantCreate() as wanted:
            await admin.tenants.create(actor, wanted)
        case "tenant.update", TenantChange() as wanted:
            await admin.tenants.update(actor, tenant, wanted)
        case "tenant.suspend", None:
            await admin.tenants.suspend(actor, tenant)
        case "tenant.resume", None:
            await admin.tenants.resume(actor, tenant)
        case "project.create", ProjectCreate() as wanted:
            await admin.projects.create(actor, wanted)
        case "project.suspend", None:
            await admin.projects.suspend(actor, reference, tenant)
        case "project.resume", None:
            await admin.projects.resume(actor, reference, tenant)
        case "key.create", KeyCreate() as wanted:
            key, secret = await admin.keys.create(actor, wanted)
            made[tenant, key.name] = MadeKey(tenant, key.name, key.key_id, secret)
        case "key.update", KeyChange() as wanted:
            await admin.keys.update(actor, reference, wanted, tenant)
        case "key.revoke", None:
            await admin.keys.revoke(actor, reference, tenant)
        case "limit.set", LimitSet() as wanted:
            key_made = made.get((tenant, wanted.key or ""))
            if key_made is not None:  # the plan has its name, as it had no id yet
                wanted = msgspec.structs.replace(wanted, key=key_made.key_id)
            await admin.limits.set(actor, wanted)
        case "limit.remove", None:
            await admin.limits.remove(actor, reference, tenant or None)
        case "policy.set", PolicyMove(before=before, after=after):
            await admin.policy.store(actor, after, before)
        case "policy.from_settings", PolicyMove(before=before, after=after):
            await admin.policy.forget(actor, after, before)
        case _:
            act = acts[step.act]
            call = ActCall(Actor(actor) if isinstance(actor, str) else actor, reference, step.command)
            await act.run(admin, call)
