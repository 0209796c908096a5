"""What the page of ended requests shows beside them: targets that each missed, and its charge in dollars."""

from __future__ import annotations

import time

from gateway.console.formats import exact_dollars
from gateway.console.pages.page_parts import PageParts
from tenants.admin.lists.scans import MOST_SCANNED
from tenants.resources.records.ended import SettledRequest
from tenants.resources.shown import Json

PATH = "/console/requests"
WRITTEN_WITHIN_US = 5_000_000
"""Timelines are written every second: until then a row lacks its steps."""


def row_of(settled: SettledRequest, shown: Json) -> Json:
    missed = [
        (f"{metric}: {cause}", f"{PATH}/{settled.request_id}#miss-{metric}")
        for metric, cause in settled.misses
    ]
    is_fresh = settled.packed is None and time.time() * 1e6 - settled.ended_us < WRITTEN_WITHIN_US
    return shown | {
        "ended_s": shown["duration_s"] if shown["ended_s"] is None else shown["ended_s"],
        "is_fresh": is_fresh,
        "missed": missed,
        "misses": ", ".join(text for text, _ in missed),
        "charged_usd": exact_dollars(settled.cost_nanousd),
    }


PARTS = PageParts(row=row_of, template="requests/ended.html", words={"scanned": MOST_SCANNED})
