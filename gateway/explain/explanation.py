"""Explains a request's duration in sentences, from its timeline.

Each sentence accounts for one stretch of the time. Other tenants' work is a sum without names. Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.domain.timeline import (
    OUTCOMES,
    Event,
    TimelineKind,
    UnreadableTimeline,
    Whose,
    first,
    made_us,
    number,
    together,
    unpack,
    wait_span,
)
from tenants.ledger.rows import LedgerRow
from tenants.ledger.timelines import StoredTimeline

if TYPE_CHECKING:
    from tenants.admin.admin import Admin

SHORTEST_S = 0.0005
"""Shorter waits get no sentence."""
TOLD_BY_GATEWAY_S = 0.02
"""As `SHORTEST_S`, of the gateway's own time."""


@dataclass(frozen=True, slots=True)
class WaitBreakdown:
    """Seconds in each state, added up over concurrent sequences."""

    before_line_s: float
    """Before the queue, without its tenant's limits: reading, parsing, holding its budget."""
    limits_s: float
    """Before the queue, for its tenant's own limits."""
    queue_s: float
    engine_s: float
    """From its turn until the engine had a place for it."""
    prefill_s: float
    """From there to the first token, as the engine made it."""
    decode_s: float
    """From the first token to the last, as the engine made them, pauses and rests included."""
    gateway_s: float
    """Delivery of the engine's first and last tokens to the gateway, where they do not overlap."""
    paused_s: float
    """Another request had its place, or its memory."""
    rested_s: float
    """It waited for its tenant's rate while it decoded."""
    stalled_s: float
    """It waited for its reader."""
    moved_s: float = 0.0
    """Its engine was lost or drained, until another one had its next token."""

    def as_json(self) -> dict[str, float]:
        return {name: round(getattr(self, name), 6) for name in self.__slots__}


def waits_of(events: Sequence[Event]) -> WaitBreakdown:
    reserved, queued = first(events, TimelineKind.RESERVED), first(events, TimelineKind.QUEUED)
    dispatched, admitted = first(events, TimelineKind.DISPATCHED), first(events, TimelineKind.ADMITTED)
    tokens = [first(events, kind) for kind in (TimelineKind.FIRST_TOKEN, TimelineKind.LAST_TOKEN)]
    ended = first(events, TimelineKind.ENDED)
    end_us = ended.at_us if ended is not None else max((event.at_us for event in events), default=0)

    def between(start: Event | None, end: Event | None) -> float:
        """Open at its end: the request ended there."""
        if start is None:
            return 0.0
        return max(0, (end_us if end is None else made_us(end)) - made_us(start)) / 1e6

    began = admitted or dispatched
    first_token, last_token = tokens
    limited_us = number(reserved, "limited_us")
    return WaitBreakdown(
        before_line_s=_read_us(events) / 1e6
        + (0.0 if queued is None else max(0, queued.at_us - limited_us) / 1e6),
        limits_s=number(reserved, "limited_us") / 1e6 if reserved is not None else 0.0,
        queue_s=between(queued, dispatched),
        engine_s=between(dispatched, admitted) if admitted is not None else 0.0,
        prefill_s=between(began, first_token),
        decode_s=between(first_token, last_token) if last_token is not None else 0.0,
        gateway_s=together((made_us(each), each.at_us) for each in tokens if each is not None) / 1e6,
        paused_s=_paused_s(events, end_us),
        rested_s=_waited_s(events, TimelineKind.TOPPED_UP),
        stalled_s=_waited_s(events, TimelineKind.STALLED),
        moved_s=_waited_s(events, TimelineKind.RELOCATED),
    )


def explain(events: Sequence[Event]) -> list[str]:
    waits = waits_of(events)
    said = [
        _before_line(events, waits),
        _limits(waits),
        _queue(events, waits),
        _engine(events, waits),
        _prefill(events, waits),
    ]
    said += [
        _moved(events, waits),
        _pauses(events, waits),
        _rests(waits),
        _decode(events, waits),
        _end(events),
    ]
    return [sentence for sentence in said if sentence]


@dataclass(frozen=True, slots=True)
class TimelineStage:
    name: str
    start_s: float
    end_s: float

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "start_s": self.start_s, "end_s": self.end_s}


def stages_of(events: Sequence[Event]) -> list[TimelineStage]:
    """For a waterfall: consecutive stages, then those within them."""
    reserved, queued = first(events, TimelineKind.RESERVED), first(events, TimelineKind.QUEUED)
    dispatched, admitted = first(events, TimelineKind.DISPATCHED), first(events, TimelineKind.ADMITTED)
    first_token, last_token = first(events, TimelineKind.FIRST_TOKEN), first(events, TimelineKind.LAST_TOKEN)
    ended = first(events, TimelineKind.ENDED)
    bounds = [
        ("limits", None if queued is None else number(reserved, "limited_us")),
        ("store", None if queued is None else queued.at_us),
        ("queue", None if dispatched is None else dispatched.at_us),
        ("engine", None if admitted is None else admitted.at_us),
        ("prefill", None if first_token is None else made_us(first_token)),
        ("decode", None if last_token is None else made_us(last_token)),
        ("gateway", None if last_token is None else last_token.at_us),
        ("settle", None if ended is None else ended.at_us),
    ]
    found: list[TimelineStage] = []
    if read_us := _read_us(events):
        # Before its arrival, from which everything is counted.
        found.append(TimelineStage("read", -read_us / 1e6, 0.0))
    since_us = 0
    for name, until_us in bounds:
        if until_us is not None and until_us > since_us:
            found.append(TimelineStage(name, since_us / 1e6, until_us / 1e6))
            since_us = until_us
    end_us = since_us if ended is None else ended.at_us
    lost_us: dict[int, int] = {}
    for event in events:
        match event.kind:
            case TimelineKind.PAUSED | TimelineKind.SWAPPED | TimelineKind.PREEMPTED:
                lost_us.setdefault(number(event, "sequence"), event.at_us)
            case TimelineKind.RESUMED | TimelineKind.RESTORED:
                lost = lost_us.pop(number(event, "sequence"), None)
                if lost is not None:
                    found.append(TimelineStage("paused", lost / 1e6, event.at_us / 1e6))
            case TimelineKind.STALLED:
                waited_us = number(event, "waited_us")
                found.append(TimelineStage("reader", event.at_us / 1e6, (event.at_us + waited_us) / 1e6))
            case TimelineKind.RELOCATED:
                waited_us = number(event, "waited_us")
                found.append(TimelineStage("moved", event.at_us / 1e6, (event.at_us + waited_us) / 1e6))
            case TimelineKind.TOPPED_UP if waited_us := number(event, "waited_us"):
                found.append(
                    TimelineStage("budget", max(0, event.at_us - waited_us) / 1e6, event.at_us / 1e6)
                )
    found += [TimelineStage("paused", lost / 1e6, end_us / 1e6) for lost in lost_us.values()]
    return found


def explanation(events: Sequence[Event]) -> dict[str, Any]:
    return {
        "explanation": explain(events),
        "waits": waits_of(events).as_json(),
        "stages": [stage.as_json() for stage in stages_of(events)],
        "timeline": [event.as_json() for event in events],
    }


def _read_us(events: Sequence[Event]) -> int:
    return number(first(events, TimelineKind.RECEIVED), "read_us")


def _had(event: Event | None, what: str) -> str:
    lag_s = number(event, "lag_us") / 1e6
    return f", {_seconds(lag_s)} until the gateway had {what}" if lag_s >= TOLD_BY_GATEWAY_S else ""


def _before_line(events: Sequence[Event], waits: WaitBreakdown) -> str:
    if waits.before_line_s < TOLD_BY_GATEWAY_S:
        return ""
    read_s = _read_us(events) / 1e6
    parts = ((read_s, "to be read"), (waits.before_line_s - read_s, "until its budget was held and durable"))
    said = ", ".join(f"{_seconds(part_s)} {what}" for part_s, what in parts if part_s >= SHORTEST_S)
    return f"took {_seconds(waits.before_line_s)} from its first byte until it got in line: {said}"


def _limits(waits: WaitBreakdown) -> str:
    if waits.limits_s < SHORTEST_S:
        return ""
    return f"waited {_seconds(waits.limits_s)} for its tenant's own limits before it got in line"


def _queue(events: Sequence[Event], waits: WaitBreakdown) -> str:
    queued = first(events, TimelineKind.QUEUED)
    if queued is None:
        return ""
    own, others = number(queued, "own_tokens"), number(queued, "others_tokens")
    higher = number(queued, "higher_tier_tokens")
    total = own + others + higher
    if waits.queue_s < SHORTEST_S:
        return "had its turn at once"
    waited = f"waited {_seconds(waits.queue_s)} in line"
    if not total:
        return f"{waited}: no tokens were ahead when it lined up"
    parts = [
        f"{_tokens(part)} {whose}"
        for part, whose in (
            (own, "its tenant's own backlog"),
            (others, "the fair share of others"),
            (higher, "higher tiers"),
        )
        if part
    ]
    moves = sum(event.kind == TimelineKind.MOVED for event in events)
    moved = f", moved between tiers {_times(moves)}" if moves else ""
    running = number(queued, "running_tokens")
    dispatched = f" ({_tokens(running)} of them running)" if running else ""
    return f"{waited}: {_tokens(total)} tokens ahead{dispatched}, of which {', '.join(parts)}{moved}"


def _engine(events: Sequence[Event], waits: WaitBreakdown) -> str:
    said: list[str] = []
    dispatched = first(events, TimelineKind.DISPATCHED)
    if number(dispatched, "by_reservation"):
        said.append("went by its tenant's reservation")
    if displaced := number(dispatched, "displaced_tokens"):
        said.append(f"took a place from lower tiers, which held {_tokens(displaced)} tokens")
    if waits.engine_s >= SHORTEST_S:
        said.append(f"waited {_seconds(waits.engine_s)} at the engine for a place in its batch")
    return "; ".join(said)


def _prefill(events: Sequence[Event], waits: WaitBreakdown) -> str:
    chunks = [event for event in events if event.kind == TimelineKind.PREFILLED]
    first_token = first(events, TimelineKind.FIRST_TOKEN)
    if first_token is None or first(events, TimelineKind.DISPATCHED) is None:
        return ""
    tokens = sum(number(chunk, "tokens") for chunk in chunks)
    cached = sum(number(event, "cached_tokens") for event in events if event.kind == TimelineKind.ADMITTED)
    left_out = sum(number(event, "count") for event in events if _left_out(event, TimelineKind.PREFILLED))
    what = "the prompt was computed"
    if tokens and not left_out:
        what = f"{_tokens(tokens)} prompt tokens were computed"
    elif not chunks:
        what = "the first token came"
    pieces = f", in {len(chunks) + left_out} chunks" if len(chunks) + left_out > 1 else ""
    found = f", {_tokens(cached)} more were in the cache" if cached else ""
    had = _had(first_token, "the first token")
    at_engine = " at the engine" if had else ""
    return f"{what} in {_seconds(waits.prefill_s)}{at_engine}{pieces}{found}{had}"


def _pauses(events: Sequence[Event], waits: WaitBreakdown) -> str:
    lost = [
        event
        for event in events
        if event.kind in (TimelineKind.PAUSED, TimelineKind.SWAPPED, TimelineKind.PREEMPTED)
    ]
    if not lost:
        return ""
    whose = {Whose(number(event, "whose")) for event in lost}
    names = {
        Whose.HIGHER_TIER: "a higher tier",
        Whose.OTHER: "other tenants",
        Whose.OWN: "requests of its own tenant",
    }
    known = [name for kind, name in names.items() if kind in whose]
    recomputed = sum(event.kind == TimelineKind.PREEMPTED for event in lost)
    again = f"; computed again {_times(recomputed)}, at no charge" if recomputed else ""
    by = f" for {' and '.join(known)}" if known else ""
    return f"gave up its place{by} {_times(len(lost))}, {_seconds(waits.paused_s)} in all{again}"


def _moved(events: Sequence[Event], waits: WaitBreakdown) -> str:
    """The account names the replicas."""
    moves = [event for event in events if event.kind == TimelineKind.RELOCATED]
    if not moves:
        return ""
    again = sum(number(event, "recomputed_tokens") for event in moves)
    computed = f"; {_tokens(again)} tokens were computed again, at no charge" if again else ""
    return f"went on at another engine {_times(len(moves))}, after {_seconds(waits.moved_s)} in all{computed}"


def _rests(waits: WaitBreakdown) -> str:
    said: list[str] = []
    if waits.rested_s >= SHORTEST_S:
        said.append(f"waited up to {_seconds(waits.rested_s)} for more budget while it decoded")
    if waits.stalled_s >= SHORTEST_S:
        said.append(f"waited {_seconds(waits.stalled_s)} for its reader")
    return "; ".join(said)


def _decode(events: Sequence[Event], waits: WaitBreakdown) -> str:
    last_token = first(events, TimelineKind.LAST_TOKEN)
    tokens = number(last_token, "output_tokens")
    sequences = max(1, number(first(events, TimelineKind.RECEIVED), "sequences"))
    further = tokens // sequences - 1
    if further < 1 or waits.decode_s <= 0:
        return ""
    token_s = waits.decode_s / further
    said = f"{_tokens(tokens)} tokens came in {_seconds(waits.decode_s)}, one every {_seconds(token_s)}"
    return said + _had(last_token, "the last") + _turns(events)


def _turns(events: Sequence[Event]) -> str:
    """How its tokens came where some steps had none for every sequence."""
    decoded = [event for event in events if event.kind == TimelineKind.DECODED]

    def total(name: str) -> int:
        return sum(number(event, name) for event in decoded)

    causes = [
        (total("sat_out_own_steps"), "its tenant's other requests"),
        (total("sat_out_share_steps"), "the share of other tenants"),
        (total("sat_out_tier_steps"), "higher tiers"),
    ]
    sat_out = [f"{steps:,} for {cause}" for steps, cause in causes if steps]
    turn_tokens = total("turn_tokens")
    if not turn_tokens and not sat_out:
        return ""
    turns = f"; {turn_tokens:,} of them in turns by weight"
    return turns + (f", with steps sat out: {', '.join(sat_out)}" if sat_out else "")


def _end(events: Sequence[Event]) -> str:
    ended = first(events, TimelineKind.ENDED)
    if ended is None:
        return ""
    outcome = OUTCOMES[number(ended, "outcome")].value if ended.numbers[0] < len(OUTCOMES) else "unknown"
    return "" if outcome == "completed" else f"ended after {_seconds(ended.at_us / 1e6)}: {outcome}"


def _paused_s(events: Sequence[Event], end_us: int) -> float:
    """From each loss of a place to the return of the same sequence."""
    lost_us: dict[int, int] = {}
    spans_us: list[tuple[int, int]] = []
    for event in events:
        match event.kind:
            case TimelineKind.PAUSED | TimelineKind.SWAPPED | TimelineKind.PREEMPTED:
                lost_us.setdefault(number(event, "sequence"), event.at_us)
            case TimelineKind.RESUMED | TimelineKind.RESTORED:
                since_us = lost_us.pop(number(event, "sequence"), None)
                if since_us is not None:
                    spans_us.append((since_us, event.at_us))
    return together([*spans_us, *((since_us, end_us) for since_us in lost_us.values())]) / 1e6


def _waited_s(events: Sequence[Event], kind: TimelineKind) -> float:
    return (
        together(
            wait_span(kind, event.at_us, number(event, "waited_us")) for event in events if event.kind == kind
        )
        / 1e6
    )


def _left_out(event: Event, kind: TimelineKind) -> bool:
    return event.kind == TimelineKind.LEFT_OUT and number(event, "kind") == kind


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count:,} times"


def _seconds(value: float) -> str:
    """`2.0 s`, `0.31 s`, `12 ms`, `0.8 ms`."""
    if value >= 10:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.1f} s"
    if value >= 0.1:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"


def _tokens(value: int) -> str:
    """`1.2 M`, `340 k`, `812`."""
    if value >= 1_000_000:
        return f"{value / 1e6:.1f} M"
    if value >= 100_000:
        return f"{value / 1e3:.0f} k"
    return f"{value / 1e3:.1f} k" if value >= 10_000 else f"{value:,}"


# Stored explanations of finished requests, for routes and for the CLI.

NOTHING_KEPT: dict[str, Any] = {"explanation": [], "waits": None, "stages": [], "timeline": None}
"""Its timeline is past retention, or its gateway died."""

log = logging.getLogger("fairgate.gateway.explaining")


async def explained(
    find: Callable[[str], Awaitable[StoredTimeline | None]], admin: Admin, request_id: str
) -> dict[str, Any]:
    """The timeline with its explanation, and the targets that were missed. Raises `DatabaseUnavailable`."""
    stored = await find(request_id)
    shown = NOTHING_KEPT
    if stored is not None:
        try:
            shown = explanation(unpack(stored.packed))
        except UnreadableTimeline as error:
            log.warning("the timeline of request %s cannot be read: %s", request_id, error)
    missed = await admin.slos.misses_of(request_id)
    return shown | {
        "session": None if stored is None else stored.session,
        "misses": [
            {
                name: value
                for name, value in miss.as_json().items()
                if name in ("metric", "target_s", "actual_s", "cause", "evidence")
            }
            for miss in missed
        ],
    }


def steps_of(packed: bytes | None) -> dict[str, float | None]:
    """Dispatch, first token and end in seconds since the arrival, for lists; None: unknown."""
    try:
        events = [] if packed is None else unpack(packed)
    except UnreadableTimeline:
        events = []
    steps = (
        ("dispatched_s", TimelineKind.DISPATCHED),
        ("first_token_s", TimelineKind.FIRST_TOKEN),
        ("ended_s", TimelineKind.ENDED),
    )
    found = {name: first(events, kind) for name, kind in steps}
    return {name: None if event is None else event.at_us / 1e6 for name, event in found.items()}


async def sat_out_for(admin: Admin, settled: LedgerRow) -> list[dict[str, Any]]:
    """For operators: the tenants that had the turns which a request's sequences sat out, most steps first.
    Raises `DatabaseUnavailable`."""
    steps: dict[str, int] = settled.detail.get("sat_out_for") or {}
    if not steps:
        return []
    names = {tenant.tenant_id: tenant.name for tenant in await admin.tenants.all()}
    return [
        {"tenant_id": tenant_id, "tenant": names.get(tenant_id, ""), "steps": count}
        for tenant_id, count in sorted(steps.items(), key=lambda item: (-item[1], item[0]))
    ]
