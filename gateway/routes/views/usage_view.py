"""Usage as operators and tenants read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from litestar.di import Provide
from litestar.params import FromQuery, QueryParameter

from gateway.routes.openapi_fields import between, groups, one_of
from tenants.admin.admin import Admin
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.usage import UsageAsked
from tenants.usage.query import LABEL, MAX_NAME, MOST_DAYS, MOST_LABELS, WINDOWS

TIMES = (
    "`from` and `to` (exclusive): instants with a time zone, or dates in `time_zone`; by default the last 30"
    " days, of window `hour` 24 hours, of `month` 12 months. Windows are of `time_zone` (an IANA name); at"
    f" most {MOST_DAYS['hour']} days by the hour, {MOST_DAYS['day']} by the day, {MOST_DAYS['month']}"
    " otherwise. `window` `total`: the whole time at once."
)
AMOUNTS_SHOWN = (
    "`requests` are those that count against limits, `ended_requests` all that ended; `wait_us` is the sum of"
    " `waits` waits, `ttft_us` of `first_tokens` times to the first token. `folded_to`: the newest instant in"
    " the stored sums; what is newer is added from the ledger, unless `includes_unfolded` is false."
)


def _filters(
    from_: Annotated[str | None, QueryParameter(name="from")] = None,
    to: FromQuery[str | None] = None,
    time_zone: FromQuery[str] = "UTC",
    project: FromQuery[str | None] = None,
    key: FromQuery[str | None] = None,
    model: FromQuery[str | None] = None,
    tier: FromQuery[str | None] = None,
    outcome: FromQuery[str | None] = None,
    label: FromQuery[list[str] | None] = None,
) -> UsageAsked:
    return UsageAsked(
        from_=from_,
        to=to,
        time_zone=time_zone,
        project=project,
        key=key,
        model=model,
        tier=tier,
        outcome=outcome,
        labels=tuple(label or ()),
    )


FILTERS = {"filters": Provide(_filters, sync_to_thread=False)}
"""Of a question, by the query: all but window, groups and tenant."""
_INSTANT_OR_DATE = {"anyOf": [{"format": "date-time"}, {"format": "date"}]}


def by(known: Iterable[str]) -> dict[str, Any]:
    """The parameters of a route of usage whose groups are `known`."""
    return {
        "from": _INSTANT_OR_DATE,
        "to": _INSTANT_OR_DATE,
        "limit": between(1, MAX_PAGE),
        "window": one_of(WINDOWS),
        "label": {
            "maxItems": MOST_LABELS,
            "items": {"type": "string", "pattern": f"^[^=]{{1,{MAX_NAME}}}=.{{1,{MAX_NAME}}}$"},
        },
        "group_by": groups([*known, f"{LABEL}[^,]+"], some=True),
    }


async def shown_usage(admin: Admin, asked: UsageAsked, cursor: str | None, limit: int) -> dict[str, Any]:
    """One page of an answer, with names added to ids. Raises `Invalid`, `NotFound`."""
    page = await admin.usage.read(asked, cursor=cursor, limit=limit)
    answer = page.as_json()
    return answer | {"data": await admin.with_names(answer["data"])}
