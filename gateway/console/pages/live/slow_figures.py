"""Figures of the overview from the database: spend, targets, refusals.

The same as `GET /admin/v1/usage`, `/slo/report` and `/refusals/counts`, read every few seconds while the
overview is watched, once for all readers.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

from gateway.console.pages.live.figures import SlowFigures
from tenants.admin.admin import Admin
from tenants.admin.cursor import MAX_PAGE
from tenants.admin.lists.counts import RefusalCountQuery
from tenants.admin.lists.usage import UsageAsked
from tenants.errors import DatabaseUnavailable

SLOW_EVERY_S = 10.0
REFUSALS = RefusalCountQuery(window="hour", group_by="code")
"""Of the last day, in whole hours."""


async def read_slow_figures(admin: Admin, earlier: SlowFigures, now_s: float) -> SlowFigures:
    """The figures at `now_s` (Unix seconds); the earlier ones if the database does not answer."""
    today = datetime.fromtimestamp(now_s, UTC).date().isoformat()
    try:
        usage = await admin.read_usage(UsageAsked(from_=today), limit=1)
        reports = await admin.slo_report()
        refused = await admin.count_refusals(REFUSALS, limit=MAX_PAGE)
    except DatabaseUnavailable:
        return earlier
    refusals: Counter[str] = Counter()
    for row in refused.rows:
        refusals[row["code"]] += row["count"]
    judged = sum(report.period.total for report in reports)
    missed = sum(report.period.missed for report in reports)
    return SlowFigures(
        sum(row["cost_nanousd"] for row in usage.as_json()["data"]),
        1 - missed / judged if judged else None,
        missed,
        judged,
        dict(sorted(refusals.items())),
        round(now_s * 1e6),
    )
