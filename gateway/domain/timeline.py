"""Timeline of a request: numbered events with their times. Pure.

An event is a kind, microseconds since the request's arrival, and some integers (`FIELDS`). A few are noted
while it runs; the rest is assembled at its end. Stored as a packed array of arrays, some 150 bytes. Of very
many events the first and last of each kind are kept, with the number left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter

import msgspec

from engine.messages import SequenceOutcome
from gateway.domain.estimate import Times
from tenants.outcomes import RequestOutcome

VERSION = 1
MAX_EVENTS = 64
MAX_NOTES = 64
"""While it runs."""
OUTCOMES = tuple(RequestOutcome)
"""By the number in `ENDED`; new ones are appended."""
_IN_ORDER = itemgetter(1, 0)
"""By time, then by kind."""


class TimelineKind(IntEnum):
    """Kinds of events. The numbers are stored and never change their meaning."""

    RECEIVED = 1
    QUOTED = 2
    RESERVED = 3
    QUEUED = 4
    MOVED = 5
    DISPATCHED = 6
    ADMITTED = 7
    PREFILLED = 8
    FIRST_TOKEN = 9
    PAUSED = 10
    RESUMED = 11
    SWAPPED = 12
    RESTORED = 13
    PREEMPTED = 14
    TOPPED_UP = 15
    STALLED = 16
    LAST_TOKEN = 17
    ENDED = 18
    SETTLED = 19
    LEFT_OUT = 20
    DECODED = 21
    TRACED = 22
    RELOCATED = 23


FIELDS: dict[TimelineKind, tuple[str, ...]] = {
    TimelineKind.RECEIVED: ("input_tokens", "sequences", "tier", "max_tokens", "read_us"),
    TimelineKind.QUOTED: (
        "wait_p50_us",
        "ttft_p50_us",
        "e2e_p50_us",
        "output_p50_tokens",
        "wait_p90_us",
        "ttft_p90_us",
        "e2e_p90_us",
        "output_p90_tokens",
        "is_binding",
    ),
    TimelineKind.RESERVED: ("limited_us", "held_input_tokens", "held_output_tokens", "may_be_cut"),
    TimelineKind.QUEUED: ("own_tokens", "others_tokens", "higher_tier_tokens", "running_tokens"),
    TimelineKind.MOVED: ("from_tier", "to_tier"),
    TimelineKind.DISPATCHED: ("tier", "by_reservation", "displaced_tokens"),
    TimelineKind.ADMITTED: ("sequence", "cached_tokens"),
    TimelineKind.PREFILLED: ("tokens", "sequence"),
    TimelineKind.FIRST_TOKEN: ("lag_us",),
    TimelineKind.PAUSED: ("whose", "displaced_tokens", "sequence"),
    TimelineKind.RESUMED: ("sequence",),
    TimelineKind.SWAPPED: ("whose", "sequence"),
    TimelineKind.RESTORED: ("sequence",),
    TimelineKind.PREEMPTED: ("whose", "sequence"),
    TimelineKind.TOPPED_UP: ("waited_us", "covered_output_tokens"),
    TimelineKind.STALLED: ("waited_us",),
    TimelineKind.RELOCATED: ("waited_us", "recomputed_tokens"),
    TimelineKind.LAST_TOKEN: ("output_tokens", "lag_us"),
    TimelineKind.ENDED: ("outcome",),
    TimelineKind.SETTLED: ("charged_input_tokens", "charged_output_tokens", "cost_nanousd"),
    TimelineKind.LEFT_OUT: ("kind", "count"),
    TimelineKind.TRACED: ("trace_id", "trace_id_low", "parent_span_id"),
    TimelineKind.DECODED: (
        "floor_tokens",
        "turn_tokens",
        "sat_out_own_steps",
        "sat_out_share_steps",
        "sat_out_tier_steps",
        "sequence",
    ),
}
"""Names of each kind's numbers; more may be appended. `tier`: a rank, 0 the highest; `outcome`: an index of
`OUTCOMES`; `whose`: a `Whose`; `lag_us`: how long the engine had it before the gateway; `TRACED`: the
caller's span, 0 if none."""


_PLACES: dict[int, dict[str, int]] = {
    kind: {name: place for place, name in enumerate(names)} for kind, names in FIELDS.items()
}


class Whose(IntEnum):
    UNKNOWN = 0
    """Another gateway's, or one that had ended."""
    OWN = 1
    OTHER = 2
    """Of another tenant in the same tier."""
    HIGHER_TIER = 3


class Event(msgspec.Struct, frozen=True, array_like=True):
    kind: int
    at_us: int
    """Since the request arrived."""
    numbers: tuple[int, ...] = ()

    def as_json(self) -> dict[str, object]:
        """A kind that a newer version wrote is shown by its number."""
        if self.kind not in FIELDS:
            return {"event": f"kind {self.kind}", "at_s": self.at_us / 1e6, "numbers": list(self.numbers)}
        shown: dict[str, object] = {"event": TimelineKind(self.kind).name.lower(), "at_s": self.at_us / 1e6}
        if self.kind == TimelineKind.TRACED and len(self.numbers) == 3:
            high, low, parent = self.numbers
            named = {"trace_id": f"{high:016x}{low:016x}", "parent_span_id": f"{parent:016x}"}
            return shown | (named if parent else {"trace_id": named["trace_id"]})
        for name, number in zip(FIELDS[TimelineKind(self.kind)], self.numbers, strict=False):
            shown[name] = _shown(name, number)
        return shown


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    version: int
    events: list[Event]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Packed).decode


class UnreadableTimeline(ValueError):
    """Stored bytes that are no timeline of a known version."""


Note = tuple[int, float, tuple[int, ...]]
"""Kind, the gateway's clock in seconds, numbers."""


@dataclass(slots=True)
class Timeline:
    """Notes taken while a request runs; `note` is its only cost on the request's path."""

    notes: list[Note]

    def __init__(self) -> None:
        self.notes = []

    def note(self, kind: TimelineKind, at_s: float, *numbers: int) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append((kind, at_s, numbers))

    def waited_s(self, *kinds: TimelineKind) -> float:
        """Total of the given kinds, whose first number is the microseconds of a wait."""
        if not self.notes:
            return 0.0
        return together(
            wait_span(kind, at_s, numbers[0] / 1e6) for kind, at_s, numbers in self.notes if kind in kinds
        )


def wait_span(kind: int, at: float, waited: float) -> tuple[float, float]:
    """Start and end of a wait: a top-up is noted at its wait's end, a stalled reader at its start."""
    return (at - waited, at) if kind == TimelineKind.TOPPED_UP else (at, at + waited)


def together(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of the spans lasted: a request's sequences wait at the same time."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


def assemble(
    timeline: Timeline,
    times: Times,
    outcomes: Sequence[SequenceOutcome],
    outcome: RequestOutcome,
    *,
    output_tokens: int,
    charged: tuple[int, int, int],
    whose: Callable[[Sequence[str]], Whose] = lambda _: Whose.UNKNOWN,
) -> list[Event]:
    """In order. `outcomes` count from the dispatch; `charged`: input, output tokens, nano-dollars."""
    arrived_s = times.arrived_s
    notes = timeline.notes.copy()
    if times.dispatched_s is not None:
        for index, part in enumerate(outcomes):
            notes += _at_the_engine(part, index, _read_s(part, times), whose)
    first_lag_us, last_lag_us = (round(lag_s * 1e6) for lag_s in lags_s(timeline, times, outcomes))
    if times.first_token_s is not None:
        notes.append((TimelineKind.FIRST_TOKEN, times.first_token_s, (first_lag_us,)))
    if times.last_token_s is not None:
        notes.append((TimelineKind.LAST_TOKEN, times.last_token_s, (output_tokens, last_lag_us)))
    notes.sort(key=_IN_ORDER)
    ended_s = arrived_s if times.ended_s is None else times.ended_s
    # The engine's clock is not the gateway's: what it reports must not come after the end.
    events = [
        Event(kind, int((min(at_s, ended_s) - arrived_s) * 1e6 + 0.5), numbers)
        for kind, at_s, numbers in notes
    ]
    ended_us = _us(ended_s, arrived_s)
    events.append(Event(TimelineKind.ENDED, ended_us, (OUTCOMES.index(outcome),)))
    events.append(Event(TimelineKind.SETTLED, ended_us, charged))
    return bounded(events) if len(events) > MAX_EVENTS else events


def lags_s(timeline: Timeline, times: Times, outcomes: Sequence[SequenceOutcome]) -> tuple[float, float]:
    """By how much the engine had first and last token earlier, without waits for the reader; 0: unknown."""
    first_s, last_s = times.first_token_s, times.last_token_s
    told = [each for each in outcomes if each.chunks and each.first_token_s is not None]
    if first_s is None or last_s is None or not told:
        return 0.0, 0.0
    made_first_s = min(_read_s(each, times) + (each.first_token_s or 0.0) for each in told)
    made_last_s = max(_read_s(each, times) + each.finished_s for each in told)
    stalls = [note for note in timeline.notes if note[0] == TimelineKind.STALLED]
    free_s = max([made_last_s, *(at_s + numbers[0] / 1e6 for _, at_s, numbers in stalls)])
    return max(0.0, first_s - made_first_s), max(0.0, last_s - free_s)


def _read_s(outcome: SequenceOutcome, times: Times) -> float:
    """When the engine read it, on the gateway's clock: after the step it came in, before its first token."""
    sent_s, first_s = times.dispatched_s or times.arrived_s, times.first_token_s
    if first_s is None or outcome.first_token_s is None:
        return sent_s + outcome.unread_s
    return sent_s + max(0.0, min(outcome.unread_s, first_s - sent_s - outcome.first_token_s))


def _at_the_engine(
    outcome: SequenceOutcome, index: int, began_s: float, whose: Callable[[Sequence[str]], Whose]
) -> list[Note]:
    notes: list[Note] = []
    has_started = False
    for decision in outcome.decisions:
        at_s = began_s + decision.at_s
        match decision.kind:
            case "admit" if not has_started:
                has_started = True
                notes.append((TimelineKind.ADMITTED, at_s, (index, outcome.cached_tokens)))
            case "admit" | "resume":
                notes.append((TimelineKind.RESUMED, at_s, (index,)))
            case "pause" | "suspend":
                notes.append(
                    (TimelineKind.PAUSED, at_s, (whose(decision.others), decision.displaced_tokens, index))
                )
            case "swap":
                notes.append((TimelineKind.SWAPPED, at_s, (whose(decision.others), index)))
            case "restore":
                notes.append((TimelineKind.RESTORED, at_s, (index,)))
            case "preempt":
                notes.append((TimelineKind.PREEMPTED, at_s, (whose(decision.others), index)))
    for after_s, tokens in outcome.chunks:
        notes.append((TimelineKind.PREFILLED, began_s + after_s, (tokens, index)))
    had = outcome.decode
    if had.floor_tokens or had.turn_tokens:
        numbers = (had.floor_tokens, had.turn_tokens, had.sat_out_own, had.sat_out_share, had.sat_out_tier)
        notes.append((TimelineKind.DECODED, began_s + outcome.finished_s, (*numbers, index)))
    return notes


def bounded(events: Sequence[Event], most: int = MAX_EVENTS) -> list[Event]:
    """At most `most` events: middle ones of frequent kinds give way to one event with their count."""
    kept = list(events)
    while len(kept) > most:
        counts: dict[int, int] = {}
        for event in kept:
            counts[event.kind] = counts.get(event.kind, 0) + 1
        commonest = max(
            (kind for kind in counts if kind != TimelineKind.LEFT_OUT), key=lambda kind: (counts[kind], kind)
        )
        places = [index for index, event in enumerate(kept) if event.kind == commonest]
        # One more than the surplus, for the event with the count; the first and the last of a kind stay.
        surplus = min(len(kept) - most + 1, len(places) - 2)
        if surplus < 2:
            return kept[: most - 1] + kept[-1:]
        middle = (len(places) - surplus) // 2
        dropped = set(places[middle : middle + surplus])
        mark = Event(TimelineKind.LEFT_OUT, kept[places[middle]].at_us, (commonest, surplus))
        kept = [
            mark if index == places[middle] else event
            for index, event in enumerate(kept)
            if index == places[middle] or index not in dropped
        ]
    return kept


def pack(events: Sequence[Event]) -> bytes:
    return _encode(_Packed(VERSION, list(events)))


def unpack(packed: bytes) -> list[Event]:
    """Raises `UnreadableTimeline`."""
    try:
        decoded = _decode(packed)
    except msgspec.DecodeError as error:
        raise UnreadableTimeline(str(error)) from None
    if decoded.version > VERSION:
        raise UnreadableTimeline(f"version {decoded.version} of timelines is newer than this program")
    return decoded.events


def trace_numbers(trace_id: str, span_id: str) -> tuple[int, int, int]:
    """The ids as 64-bit numbers of `TRACED`: the trace id's upper and lower half, the span id."""
    return int(trace_id[:16], 16), int(trace_id[16:], 16), int(span_id, 16)


def first(events: Iterable[Event], kind: TimelineKind) -> Event | None:
    return next((event for event in events if event.kind == kind), None)


def made_us(event: Event) -> int:
    """When it happened: of a token when the engine made it, where that is known."""
    has_lag = event.kind in (TimelineKind.FIRST_TOKEN, TimelineKind.LAST_TOKEN)
    return event.at_us - number(event, "lag_us") if has_lag else event.at_us


def number(event: Event | None, name: str) -> int:
    """One of an event's numbers by its name in `FIELDS`; 0 if absent."""
    if event is None:
        return 0
    place = _PLACES[event.kind][name]
    return event.numbers[place] if place < len(event.numbers) else 0


def _shown(name: str, value: int) -> object:
    match name:
        case "whose":
            return Whose(value).name.lower() if value in tuple(Whose) else value
        case "outcome":
            return OUTCOMES[value].value if value < len(OUTCOMES) else value
        case "kind":
            return TimelineKind(value).name.lower() if value in tuple(TimelineKind) else value
        case "by_reservation" | "may_be_cut" | "is_binding":
            return bool(value)
    return value


def _us(at_s: float, arrived_s: float) -> int:
    return max(0, round((at_s - arrived_s) * 1e6))
