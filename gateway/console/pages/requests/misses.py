"""What the page of missed targets shows beside them: each one's cause in words, and what to do."""

from __future__ import annotations

from gateway.console.pages.page_parts import PageParts
from gateway.console.pages.requests.misses_shown import METRICS, WHAT_TO_DO, WHY, cause_words
from tenants.instants import from_us
from tenants.resources.shown import Json
from tenants.slo.slo import Missed


def row_of(missed: Missed, shown: Json) -> Json:
    return shown | {
        "ended_at": from_us(missed.at_us).isoformat(),
        "metric_words": METRICS.get(missed.metric, missed.metric),
        "why": cause_words(WHY, missed.cause),
        "todo": cause_words(WHAT_TO_DO, missed.cause),
    }


PARTS = PageParts(row=row_of, template="requests/misses.html")
