"""Runs what has to hold inside a real vLLM over HTTP, and prints it."""

from __future__ import annotations

import asyncio
import datetime
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.bench.common.errors import CannotBench
from ops.bench.engine.run import machine_name
from ops.bench.versus.figures import TOO_BUSY
from ops.bench.versus.plugin_parts import (
    FEW_BLOCKS,
    SHARES,
    Progress,
    VllmBench,
    cache_salt,
    hard_limit,
    shares,
    speed,
)
from ops.bench.versus.stack import StackFailed
from ops.bench.versus.vllm_server import vllm_version
from ops.reporting import Report
from ops.sandbox.server import ServerFailed

PARTS = ("shares", "limits", "caches", "speed")
LIMITS: tuple[dict[str, Any], ...] = (
    {"kv_blocks": None},
    {"kv_blocks": FEW_BLOCKS},
    {"kv_blocks": None, "kills": "gateway"},
    {"kv_blocks": None, "kills": "vllm"},
    {"kv_blocks": FEW_BLOCKS, "kills": "gateway"},
)


@dataclass(frozen=True, slots=True)
class VllmBenchOptions:
    """What to run."""

    home: Path
    parts: tuple[str, ...] = PARTS
    rounds: int = 3


def run(options: VllmBenchOptions, progress: Progress = lambda line: None) -> dict[str, Any]:
    """All parts. Raises `CannotBench`, `PeerMissing`."""
    if unknown := [part for part in options.parts if part not in PARTS]:
        raise CannotBench(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    try:
        with tempfile.TemporaryDirectory(prefix="fairgate-vllm-", ignore_cleanup_errors=True) as name:
            report = asyncio.run(_parts(VllmBench(options.home, Path(name), progress), options))
    except (StackFailed, ServerFailed, OSError, TimeoutError) as error:
        raise CannotBench(str(error) or type(error).__name__) from None
    judged = [row for rows in report.values() for row in rows]
    busy = [row["case"] for row in report.get("shares", ()) if row["client_cpu_share"] > TOO_BUSY]
    return report | {
        "machine": {"cpu": machine_name(), "cores": os.cpu_count()},
        "vllm": vllm_version(options.home),
        "date": datetime.date.today().isoformat(),
        "invalid": [f"{case}: a client used more than {TOO_BUSY:.0%} of a core" for case in busy],
        "ok": None if busy else all(row.get("ok") is not False for row in judged),
    }


async def _parts(bench: VllmBench, options: VllmBenchOptions) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    if "shares" in options.parts:
        found["shares"] = []
        for case in SHARES:
            bench.progress(case.name)
            row = await shares(bench, case)
            bench.progress(f"  {row['ratio']:.3f}, furthest off {row['furthest_off']:.2%}")
            found["shares"].append(row)
    if "limits" in options.parts:
        found["limits"] = []
        for limit in LIMITS:
            bench.progress(f"a hard limit: {limit}")
            row = await hard_limit(bench, **limit)
            bench.progress(f"  {row['delivered_tokens']} delivered, {row['charged_tokens']} charged")
            found["limits"].append(row)
    if "caches" in options.parts:
        bench.progress("prefix caches")
        found["caches"] = [await cache_salt(bench)]
    if "speed" in options.parts:
        found["speed"] = await speed(bench, options.rounds)
    return found


def show(report: Mapping[str, Any]) -> None:
    """The tables for people."""
    columns = {
        "shares": (
            ("case", "through the gateway"), ("ratio", "ratio", ".3f"), ("fluid_ratio", "fluid share", ".3f"),
            ("furthest_off", "furthest off, any 1,000 steps", ".2%"),
            ("longest_first_token_s", "longest first token, s", ".2f"), ("tokens_per_s", "tokens/s"),
            ("ok", "ok"),
        ),
        "limits": (
            ("case", "50 at once"), ("limit", "limit"), ("delivered_tokens", "delivered"),
            ("charged_tokens", "charged"), ("overshoot_tokens", "overshoot"),
            ("not_charged_tokens", "not charged"), ("ok", "ok"),
        ),
        "caches": (("prompt_tokens", "prompt"), ("cached_tokens", "found in the cache"), ("ok", "ok")),
        "speed": (
            ("case", "tokens/s without a gateway"), ("stock_tokens_per_s", "stock", ",.0f"),
            ("plugin_tokens_per_s", "plug-in", ",.0f"), ("ratios", "ratio of each round"),
        ),
    }  # fmt: skip
    for part, shown in columns.items():
        if rows := report.get(part):
            cells = [
                {key: _text(value) for key, value in row.items()} if part == "speed" else dict(row)
                for row in rows
            ]
            Report(f"{part}, {report['vllm']}, {report['date']}", shown, cells).show()
    for line in report["invalid"]:
        print(f"  INVALID {line}")


def _text(value: Any) -> Any:
    return ", ".join(f"{each:.2f}" for each in value) if isinstance(value, list) else value
