"""The canonical bytes of an audit row: what is hashed, and what the columns beside it are checked against.

Pure. JSON in ASCII, keys sorted, no spaces; missing fields are left out, so that rows of later versions may
have more. Readers hash the stored bytes and never encode them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tenants.errors import Invalid

IDS = ("request_id", "trace_id")
"""Of the request that made the row. Rows of older versions have none."""
FIELDS = ("at_us", "actor", "origin", "action", "target", "tenant_id", "before", "after", *IDS)
"""The columns that an entry holds, beside its `seq`."""


def encode(seq: int, fields: Mapping[str, Any]) -> bytes:
    """Raises `Invalid` for what JSON cannot hold."""
    row = {"seq": seq} | {name: fields[name] for name in FIELDS if fields[name] is not None}
    try:
        return json.dumps(row, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise Invalid("audit row", f"cannot be written as JSON: {error}") from None


def decode(entry: bytes) -> dict[str, Any]:
    """The fields of a row, `seq` included. Raises `Invalid`."""
    try:
        row = json.loads(entry)
    except (ValueError, RecursionError):
        raise Invalid("entry", "is not JSON") from None
    if not isinstance(row, dict) or type(row.get("seq")) is not int:
        raise Invalid("entry", "is not an object with a seq")
    return row


def first_difference(seq: int, fields: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """The first column that differs from the decoded entry. Exact: 2 is not 2.0, and 1 is not true."""
    for name, value in {"seq": seq, **fields}.items():
        if _text(value) != _text(row.get(name)):
            return name
    return None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
