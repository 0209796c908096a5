"""What the page of ended requests shows beside them: targets that each missed, and its charge in dollars."""

from __future__ import annotations

from gateway.console.formats import exact_dollars
from gateway.console.pages.page_parts import PageParts
from tenants.resources.records.ended import SettledRequest
from tenants.resources.shown import Json

PATH = "/console/requests"


def row_of(settled: SettledRequest, shown: Json) -> Json:
    missed = [
        (f"{metric}: {cause}", f"{PATH}/{settled.request_id}#miss-{metric}")
        for metric, cause in settled.misses
    ]
    return shown | {
        "missed": missed,
        "misses": ", ".join(text for text, _ in missed),
        "charged_usd": exact_dollars(settled.cost_nanousd),
    }


PARTS = PageParts(row=row_of, template="requests/ended.html")
