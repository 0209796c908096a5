"""Compares the admin API's usage with the ledger, from outside.

The ledger is read by SQL of its own, grouped here: none of the gateway's sums is trusted.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

import httpx
from sqlalchemy import Connection, text

from tenants.storage.database import open_database

GROUPS = {
    "tenant": "tenant_id",
    "project": "project_id",
    "key": "key_id",
    "model": "model",
    "tier": "tier",
}
AMOUNTS = ("requests", "input_tokens", "output_tokens", "cost_nanousd", "credit_nanousd", "gpu_ms")
DAY_US = 86_400_000_000
LOOKS = 3
"""Requests may settle between the two reads: differences are read again."""
MAX_EXAMPLES = 5

Sums = dict[tuple[str, str], list[int]]
"""By day and value of the group, in the order of `AMOUNTS`."""


async def usage_differences(client: httpx.AsyncClient, database_url: str) -> list[str]:
    """Where `/admin/v1/usage` and the ledger differ, by each group and day. `client` may read as an admin.
    Raises `httpx.HTTPError`, `DatabaseUnavailable`."""
    differences: list[str] = []
    database = open_database(database_url)
    try:
        for _ in range(LOOKS):
            rows = await database.read(charges)
            if not rows:
                return []
            differences = []
            for group, column in GROUPS.items():
                told = await _told(client, group, column, rows)
                sums = _summed(rows, column)
                differences += [
                    f"usage by {group}, {key}: the API says {told.get(key)}, the ledger {sums.get(key)}"
                    for key in sorted({*told, *sums})
                    if told.get(key) != sums.get(key)
                ]
            if not differences:
                return []
    finally:
        await database.close()
    return differences[:MAX_EXAMPLES]


def charges(connection: Connection) -> list[dict[str, Any]]:
    query = "SELECT * FROM ledger WHERE kind IN ('settle', 'credit', 'adjust')"
    return [dict(row) for row in connection.execute(text(query)).mappings()]


def _summed(rows: list[dict[str, Any]], column: str) -> Sums:
    """The ledger's sums. (Rows of 0 only, as of a request in doubt, may make a group of 0.)"""
    sums: Sums = defaultdict(lambda: [0] * len(AMOUNTS))
    for row in rows:
        is_credit = row["kind"] == "credit"
        amounts = {**row, "credit_nanousd": -row["cost_nanousd"] if is_credit else 0}
        if is_credit:
            amounts["cost_nanousd"] = 0
        key = (_day(row["at_us"]), row[column])
        sums[key] = [one + amounts[name] for one, name in zip(sums[key], AMOUNTS, strict=True)]
    return dict(sums)


async def _told(client: httpx.AsyncClient, group: str, column: str, rows: list[dict[str, Any]]) -> Sums:
    instants = [row["at_us"] for row in rows]
    asked = {
        "window": "day",
        "group_by": group,
        "from": _day(min(instants)),
        "to": _day(max(instants) + DAY_US),
        "limit": "1000",
    }
    told: Sums = {}
    while True:
        response = await client.get("/admin/v1/usage", params=asked)
        response.raise_for_status()
        page = response.json()
        for row in page["data"]:
            told[row["start"][:10], row[column]] = [row[name] for name in AMOUNTS]
        if page["next_cursor"] is None:
            return told
        asked["cursor"] = page["next_cursor"]


def _day(at_us: int) -> str:
    return datetime.fromtimestamp(at_us // 1_000_000, UTC).date().isoformat()
