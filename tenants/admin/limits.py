"""Admin acts on limits: set, override for a time, remove.

No act resets use: it is stored by what a limit counts (`Limit.identity`), not by its amount."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, update

from tenants.admin.audit import Actor
from tenants.admin.transaction import AdminActs, Change, IfMatch
from tenants.directory import queries
from tenants.directory.keys import new_id
from tenants.errors import Invalid, NotFound
from tenants.nouns.limit import IN_FORCE, LimitOverride, LimitSet, limit_as_json
from tenants.nouns.limit_checks import (
    MAX_LIMITS_PER_SUBJECT,
    MAX_LIMITS_PER_TENANT,
    limit_columns,
    override_columns,
    override_rate_milli,
)
from tenants.nouns.tenant import Tenant
from tenants.quota import alerts as limit_events
from tenants.quota.alerts import LimitEvent
from tenants.storage import tables
from tenants.types import PLATFORM, Limit, SubjectKind, end_user_id


@dataclass(frozen=True, slots=True)
class LimitView:
    """A limit as set and as in force, with its events."""

    limit: Limit
    now_s: float
    """Time of the view; seconds since 1970."""
    events: tuple[LimitEvent, ...]
    """Newest window first."""

    @property
    def is_overridden(self) -> bool:
        override = self.limit.override
        return override is not None and self.now_s * 1e6 < override.until_us

    def as_json(self) -> dict[str, Any]:
        in_force = limit_as_json(self.limit.at(self.now_s))
        return {
            **limit_as_json(self.limit),
            "overridden": self.is_overridden,
            "in_force": {name: in_force[name] for name in IN_FORCE},
            "events": [event.as_json() for event in self.events],
        }


class LimitActs(AdminActs):
    async def set(self, actor: Actor | str, wanted: LimitSet, *, if_match: IfMatch = None) -> Limit:
        """Sets a limit on its subject, in exactly one shape: `amount` with `window`, or with `rate_per_s` (a
        bucket's burst), or with meter `concurrency`. `thresholds` None: the default ones. Setting the limit
        of a (subject, meter, shape, tier, model, size of request) again replaces amount, rate, ceiling, mode
        and thresholds, and keeps use and override. A window's time zone cannot be changed (remove the limit
        first): another zone's windows have use of their own."""
        draft = limit_columns(wanted)

        def change(connection: Connection, now_us: int) -> Change[Limit]:
            owner = None if wanted.tenant is None else queries.find_tenant(connection, wanted.tenant)
            kind, subject_id = _subject(connection, owner, wanted)
            tenant_id = None if owner is None else owner.tenant_id
            table = tables.limits
            identity = {"kind": kind.value, "subject_id": subject_id} | {
                name: draft[name] for name in ("meter", "shape", "tier", "model", "above_tokens")
            }
            same = [table.c[column] == value for column, value in identity.items()]
            existing = next(iter(queries.limits_where(connection, *same)), None)
            if existing is None:
                _check_room(connection, tenant_id, kind, subject_id)
                limit_id = new_id("lim")
                made = {"id": limit_id, "tenant_id": tenant_id, "created_us": now_us} | identity | draft
                connection.execute(insert(table).values(made))
            else:
                limit_id = existing.limit_id
                if existing.window is not None and existing.time_zone != draft["time_zone"]:
                    raise Invalid(
                        "time_zone",
                        f"this limit's windows are those of {existing.time_zone}, and its usage is counted "
                        f"there; remove {limit_id} first to start anew in {draft['time_zone']}",
                    )
                connection.execute(update(table).where(table.c.id == limit_id).values(**draft))
            after = queries.find_limit(connection, limit_id)
            if after.override is not None:
                override_rate_milli(after, after.override.amount, after.override.rate_per_s)
            before = None if existing is None else limit_as_json(existing)
            return Change(after, limit_id, tenant_id, before, limit_as_json(after))

        return await self._transactions.act(actor, "limit.set", change, if_match)

    async def override(
        self,
        actor: Actor | str,
        limit_id: str,
        wanted: LimitOverride,
        tenant: str | None = None,
        *,
        if_match: IfMatch = None,
    ) -> Limit:
        """Puts another `amount` (burst, concurrency), for a token bucket also a rate, in force up to `until`
        or for `for_s` seconds, in place of an older override. With `tenant` only its limits are found."""

        def write(connection: Connection, before: Limit, now_us: int) -> None:
            columns = override_columns(before, wanted, now_us)
            _forget_override(connection, limit_id)
            connection.execute(insert(tables.limit_overrides).values(limit_id=limit_id, **columns))

        return await self._change(actor, "limit.override", limit_id, tenant, if_match, write)

    async def clear_override(
        self, actor: Actor | str, limit_id: str, tenant: str | None = None, *, if_match: IfMatch = None
    ) -> Limit:
        """Ends an override before its time. Raises `NotFound`."""

        def write(connection: Connection, before: Limit, now_us: int) -> None:
            if before.override is None:
                raise NotFound("override", limit_id)
            _forget_override(connection, limit_id)

        return await self._change(actor, "limit.clear_override", limit_id, tenant, if_match, write)

    async def remove(
        self, actor: Actor | str, limit_id: str, tenant: str | None = None, *, if_match: IfMatch = None
    ) -> Limit:
        """Removes a limit with its override and events. With `tenant` only one of that tenant is found."""

        def write(connection: Connection, before: Limit, now_us: int) -> None:
            _forget_override(connection, limit_id)
            connection.execute(delete(tables.limits).where(tables.limits.c.id == limit_id))
            limit_events.forget(connection, limit_id)

        return await self._change(actor, "limit.remove", limit_id, tenant, if_match, write)

    async def of_platform(self) -> list[LimitView]:
        """Those on all tenants together, which are few."""
        now_s, is_platform = self._transactions.clock(), tables.limits.c.kind == SubjectKind.PLATFORM.value
        return await self._transactions.read(
            lambda one: views_of(one, queries.limits_where(one, is_platform), now_s)
        )

    async def show(self, limit_id: str) -> LimitView:
        """With all its events. Raises `NotFound`."""

        def view(connection: Connection) -> LimitView:
            found = queries.find_limit(connection, limit_id)
            events = limit_events.events_of(connection, [limit_id]).get(limit_id, [])
            return LimitView(found, self._transactions.clock(), tuple(events))

        return await self._transactions.read(view)

    async def _change(
        self,
        actor: Actor | str,
        action: str,
        limit_id: str,
        tenant: str | None,
        if_match: IfMatch,
        write: Callable[[Connection, Limit, int], None],
    ) -> Limit:
        """Returns the limit as it is after `write`, or was where it is gone."""

        def change(connection: Connection, now_us: int) -> Change[Limit]:
            whose = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
            before = queries.find_limit(connection, limit_id, whose)
            write(connection, before, now_us)
            after = next(iter(queries.limits_where(connection, tables.limits.c.id == limit_id)), None)
            owner_id = None if before.kind is SubjectKind.PLATFORM else before.tenant_id
            shown = None if after is None else limit_as_json(after)
            return Change(after or before, limit_id, owner_id, limit_as_json(before), shown)

        return await self._transactions.act(actor, action, change, if_match)


def views_of(connection: Connection, limits: Sequence[Limit], now_s: float) -> list[LimitView]:
    """With the events of each one's newest window."""
    events = limit_events.events_of(connection, [limit.limit_id for limit in limits])
    return [LimitView(limit, now_s, tuple(newest_window(events.get(limit.limit_id, [])))) for limit in limits]


def newest_window(events: Sequence[LimitEvent]) -> list[LimitEvent]:
    newest = max((event.key.window_start_s for event in events), default=0)
    return [event for event in events if event.key.window_start_s == newest]


def _forget_override(connection: Connection, limit_id: str) -> None:
    table = tables.limit_overrides
    connection.execute(delete(table).where(table.c.limit_id == limit_id))


def _subject(connection: Connection, owner: Tenant | None, wanted: LimitSet) -> tuple[SubjectKind, str]:
    if owner is None:
        return SubjectKind.PLATFORM, PLATFORM
    if wanted.project is not None:
        return SubjectKind.PROJECT, queries.find_project(connection, wanted.project, owner).project_id
    if wanted.key is not None:
        return SubjectKind.KEY, queries.find_key(connection, wanted.key, owner.tenant_id).key_id
    if wanted.end_user is not None:
        return SubjectKind.END_USER, end_user_id(owner.tenant_id, wanted.end_user)
    return SubjectKind.END_USER if wanted.each_end_user else SubjectKind.TENANT, owner.tenant_id


def _check_room(connection: Connection, tenant_id: str | None, kind: SubjectKind, subject_id: str) -> None:
    table = tables.limits
    most = MAX_LIMITS_PER_TENANT
    if tenant_id is not None and queries.count(connection, table, table.c.tenant_id == tenant_id) >= most:
        raise Invalid("limit", f"a tenant has at most {most} limits")
    same = (table.c.kind == kind.value, table.c.subject_id == subject_id)
    if queries.count(connection, table, *same) >= MAX_LIMITS_PER_SUBJECT:
        raise Invalid(
            "limit",
            f"one {kind.value.replace('_', ' ')} has at most {MAX_LIMITS_PER_SUBJECT} limits; remove one",
        )
