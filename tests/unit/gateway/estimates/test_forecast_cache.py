"""While another process replays, requests read the last surface; its answer is of the moment it was asked."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.entry import QueueEntry
from engine.forecast.wait.picture import Picture
from engine.forecast.wait.surface import Surface
from gateway.domain.estimate import Estimate
from gateway.flow.controller import Ticket
from tenants.types import Tier
from tests.unit.gateway.estimates.test_estimator import MODEL, SIZE, Bench


@dataclass
class Answer:
    process: Process
    picture: Picture
    at_s: float

    def done(self) -> bool:
        return self.process.now_s >= self.at_s

    def result(self) -> Surface:
        if self.process.fails:
            raise RuntimeError("it died")
        return self.picture.surface(futures=4)


@dataclass
class Process:
    """Replays on a virtual clock, and takes its time."""

    now_s: float = 0.0
    takes_s: float = 0.1
    fails: bool = False
    pictures: list[Picture] = field(default_factory=list)

    def submit(self, picture: Picture) -> Answer:
        self.pictures.append(picture)
        return Answer(self, picture, self.now_s + self.takes_s)


class Run:
    """A full engine, before which requests of `me` wait; each second brings some of a higher tier."""

    def __init__(self, replay_took_s: float) -> None:
        self.process = Process()
        self.bench = Bench(replay_took_s, submit=self.process.submit)
        self.bench.enqueue(10)
        self.bench.dispatch()
        for number in range(24):
            at_s = number // 8 - 3.0
            self.bench.estimates.arrived(QueueEntry(f"u{number}", "urgent", at_s, 100, 80, 0))
        self.come(20)

    def come(self, count: int) -> None:
        for _ in range(count):
            self.bench.number += 1
            entry = QueueEntry(f"m{self.bench.number}", "me", self.process.now_s, 100, 80)
            self.bench.estimates.arrived(entry)
            ticket = Ticket(entry, 1, 180, max_tokens=300)
            assert self.bench.flow.enqueue(ticket, self.process.now_s) is None

    def told(self, at_s: float) -> Estimate:
        """After a tick of the clock."""
        self.process.now_s = at_s
        self.bench.estimates.watch(at_s)
        return self.bench.estimates.estimate(MODEL, "me", 1.0, Tier.STANDARD, SIZE, at_s)

    @property
    def surface_at_s(self) -> float:
        surface = self.bench.estimates.forecast_cache._surface
        assert surface is not None
        return surface.at_s


def test_what_came_since_the_picture_counts_once_before_the_answer_and_after_it() -> None:
    run = Run(replay_took_s=0.1)  # no time for another one on the event loop
    first = run.told(0.0)
    assert run.told(0.02) == run.told(0.06) == first
    run.come(20)
    meanwhile = run.told(0.1)
    assert (len(run.process.pictures), run.surface_at_s) == (1, 0.0), "the answer is out"
    adopted = run.told(0.17)
    run.told(0.3)
    assert (len(run.process.pictures), run.surface_at_s) == (1, 0.06), "it is asked once a second"
    twice = Run(replay_took_s=0.1)
    twice.come(20)
    for told in (meanwhile, adopted):
        assert told.wait_s[0] == pytest.approx(twice.told(0.0).wait_s[0], rel=0.15)
        assert told.tokens_ahead["own"] == pytest.approx(twice.told(0.0).tokens_ahead["own"], rel=0.1)


def test_an_answer_older_than_the_surface_tells_how_long_waits_may_be_and_nothing_else() -> None:
    run, without = Run(replay_took_s=0.0), Run(replay_took_s=0.0)
    without.bench.estimates.forecast_cache._submit = None
    for at_s in (0.0, 0.02, 0.06, 0.12):
        assert run.told(at_s) == without.told(at_s)
    [picture] = run.process.pictures
    assert (picture.now_s, run.surface_at_s) == (0.06, 0.12)
    adopted, alone = run.told(0.165), without.told(0.165)
    assert run.surface_at_s == 0.12
    assert adopted.wait_s[0] == alone.wait_s[0]
    assert adopted.wait_s[1] > alone.wait_s[1]
    adopted, alone = run.told(0.2), without.told(0.2)
    assert run.surface_at_s == 0.2
    assert adopted.wait_s[1] > alone.wait_s[1], "nor is it forgotten at the next replay"


def test_an_answer_that_fails_leaves_the_last_surface_and_another_is_asked_for() -> None:
    run = Run(replay_took_s=0.2)
    run.process.fails, run.process.takes_s = True, 2.0
    first = run.told(0.0)
    assert [run.told(0.1 * tick) for tick in range(1, 21)] == [first] * 20
    assert len(run.process.pictures) == 1, "one at a time"
    assert run.told(2.3) == first
    assert (len(run.process.pictures), run.surface_at_s) == (2, 0.0)
    run.process.fails = False
    run.told(4.4)
    assert run.surface_at_s == 2.3
