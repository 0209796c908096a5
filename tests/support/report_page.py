"""What a report's page (`--html`) shows, read from its file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class ShownReport:
    """A page's figures."""

    exact: Any
    """All of them, as `--json` gives them."""
    tables: list[list[list[str]]]
    drawn: list[str]
    """The words in its charts."""

    def column(self, table: int, name: str) -> list[str]:
        """The cells below a head."""
        head, *rows = self.tables[table]
        return [row[head.index(name)] for row in rows]


def shown_report(path: Path) -> ShownReport:
    """Fails where the page has a script or would fetch something."""
    text = path.read_text(encoding="utf-8")
    for word in ("<script", "src=", "href=", "url(", "@import"):
        assert word not in text, word
    page = ElementTree.fromstring(text.removeprefix("<!doctype html>"))
    exact = page.find(".//pre[@id='exact']")
    assert exact is not None
    tables = [
        [["".join(cell.itertext()) for cell in row] for row in each.iter("tr")] for each in page.iter("table")
    ]
    return ShownReport(
        json.loads(exact.text or ""), tables, [each.text or "" for each in page.iter(f"{SVG}text")]
    )
