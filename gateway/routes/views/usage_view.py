"""Usage as operators and tenants read it."""

from __future__ import annotations

from typing import Any

from tenants.admin.admin import Admin
from tenants.admin.lists.usage import UsageAsked
from tenants.usage.query import MOST_DAYS

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


async def shown_usage(admin: Admin, asked: UsageAsked, cursor: str | None, limit: int) -> dict[str, Any]:
    """One page of an answer, with names added to ids. Raises `Invalid`, `NotFound`."""
    page = await admin.read_usage(asked, cursor=cursor, limit=limit)
    answer = page.as_json()
    return answer | {"data": await admin.with_names(answer["data"])}
