"""Rows of tables as cards of narrow screens: the first cell, one more fact, and the rest on tap. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup

Column = str | Sequence[str]
"""A heading, or a heading with the classes of its cells: `number`, `second`."""
LEAST_COLUMNS = 4
"""Of fewer, a card shows all."""
_ROW = re.compile(r"<tr\b.*?</tr>", re.DOTALL)
_BUTTON = '<button class="row-button" type="button" aria-expanded="false" aria-label="More"></button>'


def second_fact(columns: Sequence[Column]) -> int:
    """Place of the column that stands beside the first: the marked one, else the first of numbers."""
    classes = ["" if isinstance(column, str) else column[1] for column in columns]
    for wanted in ("second", "number"):
        for place, given in enumerate(classes):
            if place and wanted in given.split():
                return place
    return 1


def cards(rows: str, columns: Sequence[Column]) -> Markup:
    """The rows with a button that opens the card, and a mark on the second fact."""
    if len(columns) < LEAST_COLUMNS:
        return Markup(rows)
    second = second_fact(columns)

    def card(row: re.Match[str]) -> str:
        head, *cells = re.split(r"(?=<td\b)", row[0])
        if len(cells) > second:
            cells[0] = cells[0].replace("</td>", f"{_BUTTON}</td>")
            cells[second] = re.sub(r"^<td[^>]*", r"\g<0> data-second", cells[second])
        return head + "".join(cells)

    return Markup(_ROW.sub(card, rows))
