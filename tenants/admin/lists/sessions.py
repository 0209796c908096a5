"""Sessions: the calls of each run of an agent, added up from their charges in the ledger.

A session has no row of its own: it is read off its calls' timelines, and has the calls that these are kept
of. The work of one answer is bounded, whatever a tenant has named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, func, select

from tenants.admin.cursor import DEFAULT_PAGE, checked_limit
from tenants.admin.transaction import AdminActs
from tenants.directory import queries
from tenants.errors import NotFound
from tenants.instants import from_us
from tenants.storage.tables import ledger, timelines
from tenants.usage.fold import charges_query
from tenants.usage.sums import AMOUNTS, DAY_US, NOTHING, Charge, plus

MOST_LISTED = 1_000
"""Of a tenant: those that called last, each for a day after its last call."""
MOST_READ = 100_000
"""Calls of that day among which sessions are looked for, the newest."""
MOST_SUMMED = 20_000
"""Charges that one answer adds up, of the sessions that called last."""
SHOWN = ("calls", *AMOUNTS[2:7], "wait_us")
"""Tokens, costs and waits."""

Calls = list[tuple[str, int, Charge]]
"""Charges, each with its request's id and end, the newest first."""


class SessionReads(AdminActs):
    async def read(
        self, tenant: str, session: str | None = None, *, limit: int = DEFAULT_PAGE
    ) -> dict[str, Any]:
        """A tenant's live sessions, the one that called last first, as JSON; or one of them with its newest
        calls. Raises `Invalid`, `NotFound`."""
        most, since_us = checked_limit(limit), self._transactions.now_us() - DAY_US

        def look(connection: Connection) -> dict[str, Any]:
            tenant_id = queries.find_tenant(connection, tenant).tenant_id
            live = _live(connection, tenant_id, since_us, session)
            left, shown = MOST_SUMMED, []
            for found in live[:most]:
                calls = _calls(connection, tenant_id, found.session, left + 1) if left >= 0 else []
                left -= len(calls)
                shown.append(_as_json(found, calls if left >= 0 else None))
            if session is None:
                return {"object": "list", "data": shown, "has_more": len(live) > most}
            if not shown:
                raise NotFound("session", session[:80])
            return shown[0] | _details(calls, most, is_whole=left >= 0)

        return await self._transactions.read(look)


def _live(connection: Connection, tenant_id: str, since_us: int, session: str | None) -> Sequence[Any]:
    names, at_us = timelines.c.session, timelines.c.ended_us
    is_it = names.is_not(None) if session is None else names == session
    newest = select(names, at_us).where(timelines.c.tenant_id == tenant_id, is_it, at_us > since_us)
    read = newest.order_by(at_us.desc()).limit(MOST_READ if session is None else 1).subquery()
    last_us = func.max(read.c.ended_us).label("last_us")
    found: Select[Any] = select(read.c.session, last_us).group_by(read.c.session)
    return connection.execute(found.order_by(last_us.desc(), read.c.session).limit(MOST_LISTED)).all()


def _calls(connection: Connection, tenant_id: str, session: str, most: int) -> Calls:
    is_it = (timelines.c.tenant_id == tenant_id, timelines.c.session == session)
    query = charges_query(*is_it).add_columns(ledger.c.request_id, timelines.c.ended_us)
    query = query.join(timelines, timelines.c.request_id == ledger.c.request_id)
    rows = connection.execute(query.order_by(timelines.c.ended_us.desc()).limit(most))
    return [(request_id, ended_us, Charge(*values)) for *values, request_id, ended_us in rows]


def _as_json(session: Row[Any], calls: Calls | None) -> dict[str, Any]:
    """`calls` None: too many to add up."""
    return {
        "id": session.session,
        "object": "session",
        "first_call_at": from_us(calls[-1][1]).isoformat() if calls else None,
        "last_call_at": from_us(session.last_us).isoformat(),
        **(dict.fromkeys(SHOWN) if calls is None else _sums([charge for *_, charge in calls])),
    }


def _details(calls: Calls, most: int, *, is_whole: bool) -> dict[str, Any]:
    groups: dict[tuple[str, str], list[Charge]] = {}
    for *_, charge in calls:
        groups.setdefault((charge.model, charge.outcome), []).append(charge)
    return {
        "by": [
            {"model": model, "outcome": outcome} | _sums(group)
            for (model, outcome), group in sorted(groups.items())
        ]
        if is_whole
        else None,
        "newest": [
            {
                "id": request_id,
                "ended_at": from_us(ended_us).isoformat(),
                **{name: getattr(charge, name) for name in ("key_id", "model", "tier", "outcome")},
                **_sums([charge]),
            }
            for request_id, ended_us, charge in [each for each in calls if each[2].kind == "settle"][:most]
        ],
    }


def _sums(charges: Sequence[Charge]) -> dict[str, int]:
    total = NOTHING
    for charge in charges:
        total = plus(total, charge.amounts())
    return {
        name: amount for name, amount in zip(("calls", *AMOUNTS[1:]), total, strict=True) if name in SHOWN
    }
