"""A queue and its engines at one instant, and the wait surface that replays of it give.

Plain values that can be pickled, so that another process can do the replays (`worker.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from engine.entry import QueueEntry
from engine.forecast.length.probe import length_quantile
from engine.forecast.wait.arrivals import ArrivalPattern
from engine.forecast.wait.probing import MAX_LINES, Probing
from engine.forecast.wait.replay import LaneOf
from engine.forecast.wait.replayed_engine import EngineLoad, ReplayedEngine
from engine.forecast.wait.surface import NEWCOMER, Line, Surface
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.tiers import TieredQueue

FUTURES = 8
"""Sampled futures. Of nine waits, these and the one to come, that one is the longest once in nine times: the
longest of eight is a 90th percentile."""
FUTURE_EVENTS = 100
"""Of the engines, in a sampled future, until what still waits is extrapolated."""
QUANTILES = tuple((index + 0.5) / 9 for index in range(9))
"""Of a length that is known by its distribution alone."""


class AnswerLength(msgspec.Struct, frozen=True, gc=False):
    """What is known of the length of one sequence's answer, in tokens."""

    most: int
    median: float = 0.0
    high: float = 0.0
    """90th percentile."""
    quantiles: Sequence[int] = ()
    """At `QUANTILES`, given what is out; with none of these and no median it is `most` exactly."""

    def draw(self, generated: int, u: float) -> int:
        """The length at quantile `u`, given that `generated` tokens are out and more will come."""
        if self.quantiles:
            length = self.quantiles[int(u * len(self.quantiles))]
        elif self.median:
            length = length_quantile(self.median, self.high, generated, u)
        else:
            length = self.most
        return max(generated + 1, min(length, self.most))


@dataclass(frozen=True, slots=True)
class Picture:
    now_s: float
    queue: TieredQueue
    counters: ServiceCounters
    """Those that `queue` ranks by."""
    engines: Sequence[EngineLoad]
    lengths: Mapping[str, AnswerLength]
    """By the id of what waits or runs."""
    sequences: Mapping[str, int]
    """Entries that are more than one."""
    kv_tokens: Mapping[str, int]
    """What entries count in the dispatch window."""
    lane_of: LaneOf
    promised: Sequence[QueueEntry]
    """Outstanding quotes: they stand in line as if they had just arrived."""
    arrivals: ArrivalPattern
    lines: Sequence[Line]
    tiers: Sequence[int]
    knots: Sequence[int]
    """Sizes of a line's probes, in tokens of the order's `SizeKey`."""
    most_events: int

    def draw_length(self, entry: QueueEntry, generated: int, u: float) -> int:
        length = self.lengths.get(entry.entry_id)
        if length is None:
            return max(generated + 1, entry.predicted_output_tokens)
        return length.draw(generated, u)

    def surface(self, *, futures: int = 0, seed: int = 0) -> Surface:
        """What the expected future brings; with sampled `futures`, how long waits are in any of them. The
        picture stays as it is."""
        surface = replay_probes(self, self.most_events)
        for number in range(futures):
            surface.widen(replay_probes(self, FUTURE_EVENTS, Random(seed * FUTURES + number)))
        return surface


def replay_probes(picture: Picture, most_events: int, random: Random | None = None) -> Surface:
    """Replays the picture's queue once, with probes for its lines (the first `MAX_LINES`) and for newcomers
    of each tier. `random`: draws a future; None: the expected one. Beyond `most_events` what waits is
    extrapolated."""
    counters = picture.counters.clone()
    queue = picture.queue.clone(counters)
    now_s = picture.now_s
    replay = Probing(
        queue=queue,
        counters=counters,
        engines=[ReplayedEngine(load, now_s) for load in picture.engines],
        start_s=now_s,
        draw_length=picture.draw_length,
        sequences=picture.sequences,
        kv_tokens=picture.kv_tokens,
        future=picture.arrivals.future(now_s, random),
        random=random,
        lane_of=picture.lane_of,
        most_events=most_events,
    )
    for entry in picture.promised:
        queue.add(entry, lane=picture.lane_of(entry))
    replay.begin()
    sizes = (
        picture.knots if len(queue) or not replay.takes_at_once(max(picture.knots)) else picture.knots[-1:]
    )
    for line in [*picture.lines[:MAX_LINES], *(Line(NEWCOMER, tier) for tier in picture.tiers)]:
        for size in sizes:
            replay.add_probe(line, size)
    replay.run()
    return replay.conclude()
