"""One request as shown: stages, stated against actual figures, events, ledger rows. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.messages import TIER_RANKS
from gateway.console import formats
from tenants.instants import to_us
from tenants.ledger.rows import LedgerRow

Stage = tuple[str, float, float, str]
"""Name, start and end in seconds, colour class."""

MOST_STAGES = 24
STAGES = {
    "read": ("read", "fill-held"),
    "limits": ("own limits", "fill-2"),
    "store": ("held for stores", "fill-7"),
    "queue": ("in line", "fill-1"),
    "engine": ("at the engine", "fill-4"),
    "prefill": ("prompt", "fill-3"),
    "decode": ("answer", "fill-6"),
    "gateway": ("to the gateway", "fill-5"),
    "settle": ("settling", "fill-8"),
    "paused": ("paused", "fill-5"),
    "reader": ("slow reader", "fill-2"),
    "moved": ("another engine", "fill-2"),
    "budget": ("own rate", "fill-2"),
}
"""By API name."""
FIGURES = (
    ("wait", "Wait", "dispatched"),
    ("ttft", "Time to the first token", "first_token"),
    ("e2e", "Whole time", "ended"),
    ("output", "Output tokens", "settled"),
)
"""Timeline name, words, and the event that has the actual value."""
STATUS = {
    "limited": "Its tenant’s own limits hold it back.",
    "waiting": "It is waiting for its turn.",
    "running": "It is running.",
    "ended": "It has finished.",
}
_TIERS = {rank: tier for tier, rank in TIER_RANKS.items()}


@dataclass(frozen=True)
class Told:
    """An estimate made on arrival and the actual value. Seconds, or tokens."""

    words: str
    is_time: bool
    p50: float
    p90: float | None
    happened: float | None
    verdict: str


@dataclass(frozen=True)
class LedgerLine:
    kind: str
    at_us: int
    gateway_id: str
    tier: str
    model: str
    input_tokens: int
    output_tokens: int
    cost: str
    """All digits."""
    gpu_ms: int
    outcome: str
    detail: list[str]


def stages_shown(stages: Sequence[Mapping[str, Any]]) -> tuple[list[Stage], float]:
    """At most `MOST_STAGES`, from the first byte on, and the end of the last."""
    begin_s = min((stage["start_s"] for stage in stages), default=0.0)
    rows = [
        (words, stage["start_s"] - begin_s, stage["end_s"] - begin_s, fill)
        for stage in stages
        for words, fill in [STAGES.get(stage["name"], (stage["name"], "fill-1"))]
    ]
    return rows[:MOST_STAGES], max((end_s for _, _, end_s, _ in rows), default=0.0)


def target_lines(misses: Sequence[Mapping[str, Any]], end_s: float) -> list[tuple[str, float]]:
    """Missed targets that a waterfall can show: words, and seconds from the first byte on."""
    words = {"ttft": "target of the first token", "e2e": "target of the whole answer"}
    return [
        (f"{words[miss['metric']]}: {formats.seconds(miss['target_s'])}", miss["target_s"])
        for miss in misses
        if miss["metric"] in words and miss["target_s"] <= end_s
    ]


def why_words(end_s: float) -> str:
    """`Why it took 1.3 s`; without a timeline how long is not known."""
    return f"Why it took {formats.seconds(end_s)}" if end_s else "Why it took so long"


def told_and_happened(timeline: Sequence[Mapping[str, Any]]) -> list[Told]:
    """In the order of `FIGURES`; empty: nothing was stated."""
    events = {event["event"]: event for event in reversed(timeline)}
    quoted = events.get("quoted")
    if quoted is None:
        return []
    figures: list[Told] = []
    for name, words, when in FIGURES:
        unit, parts = ("tokens", 1) if name == "output" else ("us", 1_000_000)
        p50, p90 = quoted.get(f"{name}_p50_{unit}"), quoted.get(f"{name}_p90_{unit}")
        event = events.get(when, {})
        happened = event.get("charged_output_tokens" if name == "output" else "at_s")
        if p50 is not None:
            # Divided as the events' times are, so that what is equal stays equal.
            p50, p90 = p50 / parts, None if p90 is None else p90 / parts
            figures.append(Told(words, name != "output", p50, p90, happened, _verdict(p50, p90, happened)))
    return figures


def _verdict(p50: float, p90: float | None, happened: float | None) -> str:
    if happened is None:
        return "it did not get there"
    if happened <= p50:
        return "within the p50"
    if p90 is None:
        return "above the p50"
    return "within the p90" if happened <= p90 else "above the p90"


def is_binding(timeline: Sequence[Mapping[str, Any]]) -> bool:
    return any(event.get("is_binding") for event in timeline if event["event"] == "quoted")


def events_shown(timeline: Sequence[Mapping[str, Any]]) -> list[tuple[float, str, str]]:
    """Time, name and numbers."""
    return [
        (
            event["at_s"],
            event["event"].replace("_", " "),
            ", ".join(_number(name, value) for name, value in event.items() if name not in ("event", "at_s")),
        )
        for event in timeline
    ]


def _number(name: str, value: Any) -> str:
    if name in ("tier", "from_tier", "to_tier"):
        return f"{name.replace('_', ' ')} {_TIERS.get(value, value)}"
    if isinstance(value, bool):
        return f"{name.replace('_', ' ')}: {'yes' if value else 'no'}"
    if name.endswith("_us"):
        return f"{name.removesuffix('_us').replace('_', ' ')} {formats.seconds(value / 1e6)}"
    shown = f"{value:,}" if isinstance(value, int) else str(value)
    return f"{name.replace('_', ' ')} {shown}"


def ledger_lines(rows: Sequence[LedgerRow], *, with_detail: bool) -> list[LedgerLine]:
    """`with_detail`: including gateways, counters and other tenants."""
    return [
        LedgerLine(
            f"{row.kind.replace('_', '-')} {row.number}" if row.number else row.kind,
            to_us(row.at),
            row.gateway_id if with_detail else "",
            row.tier,
            row.model,
            row.amounts.input_tokens,
            row.amounts.output_tokens,
            formats.exact_dollars(row.amounts.cost_nanousd),
            row.amounts.gpu_ms,
            row.outcome,
            [f"{name}: {json.dumps(value)}" for name, value in row.detail.items()] if with_detail else [],
        )
        for row in rows
    ]


def ahead_words(lined_up: Mapping[str, int]) -> list[str]:
    parts = (
        ("own_tokens", "of its tenant’s other requests"),
        ("others_tokens", "of other tenants, within their fair share"),
        ("higher_tier_tokens", "of higher tiers"),
        ("running_tokens", "of these were running already"),
    )
    return [f"{lined_up[name]:,} tokens {words}" for name, words in parts if lined_up.get(name)]
