"""Traffic in the ledger for tests of usage, and what the ledger itself says of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from sqlalchemy import Connection, select

from tenants.ledger.batch_insert import COLUMNS, insert_rows
from tenants.storage.database import Database
from tenants.storage.tables import usage_labels, usage_sums
from tenants.usage.fold import FoldRound, charges_beyond, fold
from tenants.usage.query import UsageQuery, edges
from tenants.usage.read import GroupKey, UsageFound, grouped, usage

MONDAY_US = 1_767_571_200_000_000
"""2026-01-05, midnight UTC."""
TIERS = ("interactive", "standard", "batch")
OUTCOMES = ("completed", "completed", "completed", "cancelled")

Row = tuple[Any, ...]


def row(request_id: str, kind: str = "settle", **changes: Any) -> Row:
    """A ledger row as `insert_rows` takes it."""
    values: dict[str, Any] = {
        "request_id": request_id,
        "kind": kind,
        "number": 0,
        "tenant_id": "ten_a",
        "project_id": "prj_a",
        "key_id": "key_a",
        "gateway_id": "gw_1",
        "tier": "standard",
        "model": "small",
        "input_tokens": 10,
        "output_tokens": 20,
        "cost_nanousd": 3_000,
        "requests": 1,
        "gpu_ms": 7,
        "counted_input": None,
        "counted_output": None,
        "counted_cost": None,
        "price_version": 0,
        "outcome": "" if kind == "reserve" else "completed",
        "at_us": MONDAY_US,
        "detail": "{}",
        "counter_set": None,
        "labels": None,
    } | changes
    return tuple(values[name] for name in COLUMNS)


def traffic(
    requests: int,
    *,
    tenants: int = 3,
    keys: int = 4,
    models: int = 2,
    days: float = 3.0,
    seed: int = 1,
    labels: bool = True,
    name: str = "req",
) -> list[Row]:
    """Reserve and settle rows of many requests, with some credits, adjustments and labels."""
    random = Random(seed)
    rows: list[Row] = []
    for number in range(requests):
        tenant, key = random.randrange(tenants), random.randrange(keys)
        at_us = MONDAY_US + int(random.random() * days * 86_400_000_000)
        team = {"team": random.choice("ab"), "app": "x"} if labels and random.random() < 0.3 else None
        if team is not None and random.random() < 0.5:
            team = dict(reversed(team.items()))
        common: dict[str, Any] = {
            "tenant_id": f"ten_{tenant}",
            "project_id": f"prj_{tenant}_{key % 2}",
            "key_id": f"key_{tenant}_{key}",
            "model": f"model-{random.randrange(models)}",
            "tier": TIERS[tenant % 3],
            "at_us": at_us,
            "labels": None if team is None else json.dumps(team),
        }
        request_id = f"{name}_{number}"
        used, produced = random.randrange(1, 500), random.randrange(200)
        detail = {
            "cached_tokens": random.randrange(used),
            "wait_s": round(random.random(), 6),
            "ttft_s": random.choice([None, round(random.random(), 6)]),
        }
        rows.append(row(request_id, "reserve", **common))
        amounts = {
            "input_tokens": used,
            "output_tokens": produced,
            "cost_nanousd": used * 100 + produced * 300,
        }
        outcome = random.choice(OUTCOMES)
        rows.append(row(request_id, outcome=outcome, detail=json.dumps(detail), **(common | amounts)))
        if number % 20 == 0:
            none = {"input_tokens": 0, "output_tokens": 0, "requests": 0, "gpu_ms": 0, "cost_nanousd": -500}
            rows.append(row(request_id, "credit", outcome="quote", **(common | none)))
        if number % 50 == 0:
            none = {"input_tokens": 0, "output_tokens": 0, "cost_nanousd": 0, "requests": -1, "gpu_ms": -3}
            rows.append(row(request_id, "adjust", outcome="in_doubt", **(common | none)))
    return rows


async def write(database: Database, rows: Sequence[Row]) -> None:
    """Into the ledger, in a few transactions."""
    for start in range(0, len(rows), 4_096):
        some = rows[start : start + 4_096]
        await database.write(lambda connection, some=some: insert_rows(connection, some))


async def fold_all(database: Database, most: int = 500) -> int:
    """Folds until nothing is left; returns how many charges were folded."""
    folded = 0
    while True:
        done: FoldRound = await database.write(lambda connection: fold(connection, most))
        folded += done.charges
        if not done.has_more:
            return folded


def stored(connection: Connection) -> dict[str, list[Row]]:
    """Both tables of sums, whole."""
    return {
        table.name: sorted(tuple(each) for each in connection.execute(select(table)))
        for table in (usage_sums, usage_labels)
    }


async def answered(database: Database, query: UsageQuery, most: int = 100_000) -> UsageFound:
    """The answer in one page."""
    return await database.read(lambda connection: usage(connection, query, None, most))


async def by_ledger(database: Database, query: UsageQuery) -> dict[GroupKey, tuple[int, ...]]:
    """The same from the ledger, whole."""
    charges = await database.read(lambda connection: charges_beyond(connection, 0, most=10**9))
    return grouped(charges, query, edges(query))


def as_mapping(found: UsageFound) -> dict[GroupKey, tuple[int, ...]]:
    """Amounts by window and groups."""
    return {each.key: each.amounts for each in found.rows}


def span_of(rows: Iterable[Row]) -> tuple[int, int]:
    """Whole UTC days that hold all rows."""
    at = COLUMNS.index("at_us")
    instants = [each[at] for each in rows]
    day_us = 86_400_000_000
    return min(instants) // day_us * day_us, max(instants) // day_us * day_us + day_us
