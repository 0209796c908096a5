"""Exact tables as CSV text (RFC 4180), safe against formula injection in spreadsheets. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

import msgspec

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Prefixes text that a spreadsheet would take for a formula with an apostrophe. No `columns`: no head."""
    out = io.StringIO()
    writer = csv.writer(out)
    if columns:
        writer.writerow(map(_cell, columns))
    writer.writerows(map(_cell, row) for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        value = " ".join(value)
    if isinstance(value, Mapping | list | tuple):
        return msgspec.json.encode(value).decode()
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        return f"'{value}"
    return "" if value is None else value
