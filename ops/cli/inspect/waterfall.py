"""One request on the terminal: its stretches of time as a waterfall, and what became of it in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ops.reporting import table

BAR_CELLS = 48
COLOURS = {
    "read": "white",
    "limits": "magenta",
    "store": "white",
    "queue": "yellow",
    "engine": "dark_orange",
    "prefill": "cyan",
    "decode": "green",
    "gateway": "red",
    "settle": "white",
    "paused": "red",
    "reader": "magenta",
    "budget": "magenta",
}


def headline(shown: Mapping[str, Any]) -> str:
    whose = " / ".join(str(part) for part in (shown.get("tenant"), shown.get("key_name")) if part)
    words = [
        shown["id"],
        *([whose] if whose else []),
        shown["tier"],
        shown["model"],
        shown.get("outcome") or shown["status"],
    ]
    tokens = f"{shown['input_tokens']:,} tokens in, {shown['output_tokens']:,} out"
    return f"{'  '.join(str(word) for word in words)}  {tokens}"


def waterfall(stages: Sequence[Mapping[str, Any]]) -> None:
    """Prints a bar for each stretch, all on one scale of time."""
    if not stages:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # What came before its arrival is drawn, too.
    begin_s = min(0.0, *(stage["start_s"] for stage in stages))
    end_s = max(stage["end_s"] for stage in stages) - begin_s
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("", "left"), ("from", "right"), ("took", "right"), ("", "left")):
        grid.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for stage in stages:
        before, cells = bar(stage["start_s"] - begin_s, stage["end_s"] - begin_s, end_s)
        drawn = Text(" " * before + "█" * cells, style=COLOURS.get(stage["name"], "white"))
        grid.add_row(
            stage["name"], seconds(stage["start_s"]), seconds(stage["end_s"] - stage["start_s"]), drawn
        )
    Console(highlight=False).print(grid)


def bar(start_s: float, end_s: float, total_s: float) -> tuple[int, int]:
    """Empty cells before the bar, and its own: at least one, and never beyond the end."""
    if total_s <= 0:
        return 0, 1
    before = min(BAR_CELLS - 1, int(start_s / total_s * BAR_CELLS))
    return before, max(1, min(BAR_CELLS, round(end_s / total_s * BAR_CELLS)) - before)


def list_events(timeline: Sequence[Mapping[str, Any]]) -> None:
    rows = [
        (
            seconds(event["at_s"]),
            event["event"],
            ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "at_s")),
        )
        for event in timeline
    ]
    table("timeline", ("at", "event", "numbers"), rows)


def evidence_in_words(evidence: Mapping[str, float | None]) -> str:
    """What a verdict was found by: `fair_s 1.9, alone_s 0.04`."""
    said = [f"{name} {value:g}" for name, value in evidence.items() if value]
    return ", ".join(said) or "no counterfactuals"


def decoded_in_words(timeline: Sequence[Mapping[str, Any]]) -> str:
    """How its tokens came: one each step (the floor) or in turns, and the steps that it sat out."""
    decoded = [event for event in timeline if event["event"] == "decoded"]
    if not decoded:
        return ""

    def total(name: str) -> int:
        return sum(event.get(name, 0) for event in decoded)

    return (
        f"its tokens: {total('floor_tokens'):,} one each step, {total('turn_tokens'):,} in turns by weight;"
        f" steps sat out: {total('sat_out_own_steps'):,} for its tenant's other requests,"
        f" {total('sat_out_share_steps'):,} for the share of other tenants,"
        f" {total('sat_out_tier_steps'):,} for higher tiers"
    )


def others_in_words(sat_out_for: Sequence[Mapping[str, Any]]) -> str:
    """`acme 40, a tenant that is gone (ten_2) 3`."""
    return ", ".join(
        f"{other['tenant'] or 'a tenant that is gone (' + other['tenant_id'] + ')'} {other['steps']:,}"
        for other in sat_out_for
    )


def seconds(value: float) -> str:
    """`1.250 s`, `12.5 ms`."""
    return f"{value:.3f} s" if value >= 1 else f"{value * 1000:.1f} ms"
