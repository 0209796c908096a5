"""Admin acts on limits: set, override for a time, remove.

No act resets use: it is stored by what a limit counts (`Limit.identity`), not by its amount."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, update

from tenants.admin import validation
from tenants.admin.audit import Actor
from tenants.admin.commands import LimitOverride, LimitSet
from tenants.admin.cursor import (
    DEFAULT_PAGE,
    Number,
    Page,
    Text,
    beyond,
    checked_limit,
    decode_cursor,
    page_of,
)
from tenants.admin.transaction import AdminActs, Change, IfMatch
from tenants.directory import queries
from tenants.directory.keys import new_id
from tenants.directory.records import Tenant, limit_as_json, to_us
from tenants.errors import Invalid, NotFound
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
        in_force = self.limit.at(self.now_s)
        return {
            **limit_as_json(self.limit),
            "overridden": self.is_overridden,
            "in_force": {
                "amount": in_force.amount,
                "rate_per_s": in_force.rate_per_s,
                "ceiling_per_s": in_force.ceiling_per_s,
            },
            "events": [event.as_json() for event in self.events],
        }


class LimitActs(AdminActs):
    async def set(self, actor: Actor | str, wanted: LimitSet, *, if_match: IfMatch = None) -> Limit:
        """Sets a limit on its subject, in exactly one shape: `amount` with `window`, or with `rate_per_s` (a
        bucket's burst), or with meter `concurrency`. `thresholds` None: the default ones. Setting the limit
        of a (subject, meter, shape, tier, model, size of request) again replaces amount, rate, ceiling, mode
        and thresholds, and keeps use and override. A window's time zone cannot be changed (remove the limit
        first): another zone's windows have use of their own."""
        validation.subject(wanted)
        draft = validation.limit_columns(wanted)

        def change(connection: Connection, now_us: int) -> Change[Limit]:
            owner = None if wanted.tenant is None else queries.find_tenant(connection, wanted.tenant)
            kind, subject_id = _subject(connection, owner, wanted)
            tenant_id = None if owner is None else owner.tenant_id
            table = tables.limits
            identity = {
                "kind": kind.value,
                "subject_id": subject_id,
                "meter": draft["meter"],
                "shape": draft["shape"],
                "tier": draft["tier"],
                "model": draft["model"],
                "above_tokens": draft["above_tokens"],
            }
            same = [table.c[column] == value for column, value in identity.items()]
            existing = next(iter(queries.limits_where(connection, *same)), None)
            if existing is None:
                _check_room(connection, tenant_id, kind, subject_id)
                limit_id = new_id("lim")
                connection.execute(
                    insert(table).values(
                        id=limit_id,
                        tenant_id=tenant_id,
                        kind=kind.value,
                        subject_id=subject_id,
                        created_us=now_us,
                        **draft,
                    )
                )
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
                override = after.override
                validation.override_rate_milli(after, override.amount, override.rate_per_s)
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
        until = None if wanted.until is None else validation.instant("until", wanted.until)
        validation.reason(wanted.reason)

        def change(connection: Connection, now_us: int) -> Change[Limit]:
            before = self._find_limit(connection, limit_id, tenant)
            until_us = None if until is None else to_us(until)
            columns = {
                "amount": wanted.amount,
                "until_us": validation.override_until_us(now_us, until_us, wanted.for_s),
                "rate_milli": validation.override_rate_milli(before, wanted.amount, wanted.rate_per_s),
                "reason": wanted.reason,
                "created_us": now_us,
            }
            table = tables.limit_overrides
            connection.execute(delete(table).where(table.c.limit_id == limit_id))
            connection.execute(insert(table).values(limit_id=limit_id, **columns))
            after = queries.find_limit(connection, limit_id)
            return Change(after, limit_id, _owner_id(after), limit_as_json(before), limit_as_json(after))

        return await self._transactions.act(actor, "limit.override", change, if_match)

    async def clear_override(
        self, actor: Actor | str, limit_id: str, tenant: str | None = None, *, if_match: IfMatch = None
    ) -> Limit:
        """Ends an override before its time. Raises `NotFound`."""

        def change(connection: Connection, now_us: int) -> Change[Limit]:
            before = self._find_limit(connection, limit_id, tenant)
            if before.override is None:
                raise NotFound("override", limit_id)
            table = tables.limit_overrides
            connection.execute(delete(table).where(table.c.limit_id == limit_id))
            after = queries.find_limit(connection, limit_id)
            return Change(after, limit_id, _owner_id(after), limit_as_json(before), limit_as_json(after))

        return await self._transactions.act(actor, "limit.clear_override", change, if_match)

    async def remove(
        self, actor: Actor | str, limit_id: str, tenant: str | None = None, *, if_match: IfMatch = None
    ) -> Limit:
        """Removes a limit with its override and events. With `tenant` only one of that tenant is found."""

        def change(connection: Connection, now_us: int) -> Change[Limit]:
            before = self._find_limit(connection, limit_id, tenant)
            table = tables.limit_overrides
            connection.execute(delete(table).where(table.c.limit_id == limit_id))
            connection.execute(delete(tables.limits).where(tables.limits.c.id == limit_id))
            limit_events.forget(connection, limit_id)
            return Change(before, limit_id, _owner_id(before), before=limit_as_json(before))

        return await self._transactions.act(actor, "limit.remove", change, if_match)

    async def all(self, tenant: str | None = None) -> list[Limit]:
        return await self._transactions.read(lambda connection: _limits(connection, tenant))

    async def view_all(self, tenant: str | None = None) -> list[LimitView]:
        """As `all`, with what is in force and the events of each limit's newest window."""
        return await self._transactions.read(lambda one: self._views(one, _limits(one, tenant)))

    async def show(self, limit_id: str) -> LimitView:
        """Raises `NotFound`."""

        def view(connection: Connection) -> LimitView:
            found = queries.find_limit(connection, limit_id)
            return self._view(found, limit_events.events_of(connection, [limit_id]).get(limit_id, []))

        return await self._transactions.read(view)

    async def page(
        self, tenant: str | None = None, *, cursor: str | None = None, limit: int = DEFAULT_PAGE
    ) -> Page[LimitView]:
        """In order of creation, as in force, with each one's newest events. Raises `Invalid`, `NotFound`."""
        most, filters = checked_limit(limit), {"tenant": tenant}
        table = tables.limits
        last = None if cursor is None else decode_cursor("limits", filters, cursor, tuple[Number, Text])

        def look(connection: Connection) -> list[LimitView]:
            wanted = [] if last is None else [beyond((table.c.created_us, table.c.id), last)]
            if tenant is not None:
                wanted.append(table.c.tenant_id == queries.find_tenant(connection, tenant).tenant_id)
            return self._views(connection, queries.limits_where(connection, *wanted, most=most + 1))

        views = await self._transactions.read(look)
        return page_of(
            views, most, "limits", filters, lambda view: (view.limit.created_us, view.limit.limit_id)
        )

    def _views(self, connection: Connection, found: Sequence[Limit]) -> list[LimitView]:
        events = limit_events.events_of(connection, [limit.limit_id for limit in found])
        return [self._view(limit, newest_window(events.get(limit.limit_id, []))) for limit in found]

    def _view(self, limit: Limit, events: list[LimitEvent]) -> LimitView:
        return LimitView(limit, self._transactions.clock(), tuple(events))

    def _find_limit(self, connection: Connection, limit_id: str, tenant: str | None) -> Limit:
        tenant_id = None if tenant is None else queries.find_tenant(connection, tenant).tenant_id
        return queries.find_limit(connection, limit_id, tenant_id)


def newest_window(events: Sequence[LimitEvent]) -> list[LimitEvent]:
    newest = max((event.key.window_start_s for event in events), default=0)
    return [event for event in events if event.key.window_start_s == newest]


def _limits(connection: Connection, tenant: str | None) -> list[Limit]:
    if tenant is None:
        return queries.limits_where(connection)
    return queries.limits_of(connection, [queries.find_tenant(connection, tenant).tenant_id])


def _owner_id(limit: Limit) -> str | None:
    """The tenant whose directory entry an act on the limit changes; None: all of them."""
    return None if limit.kind is SubjectKind.PLATFORM else limit.tenant_id


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
    most = validation.MAX_LIMITS_PER_TENANT
    if tenant_id is not None and queries.count(connection, table, table.c.tenant_id == tenant_id) >= most:
        raise Invalid("limit", f"a tenant has at most {most} limits")
    same = (table.c.kind == kind.value, table.c.subject_id == subject_id)
    if queries.count(connection, table, *same) >= validation.MAX_LIMITS_PER_SUBJECT:
        raise Invalid(
            "limit",
            f"one {kind.value.replace('_', ' ')} has at most {validation.MAX_LIMITS_PER_SUBJECT} limits;"
            " remove one",
        )
