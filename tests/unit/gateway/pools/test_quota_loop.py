"""The control loop lends spare capacity to the quota store, and takes it back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from engine.entry import QueueEntry
from engine.forecast.length.length import LengthForecast
from engine.messages import EngineKnobs, ModelInfo, Ready, Snapshot
from engine.step_time.model import PRIOR
from gateway.dispatch.admission import Admission
from gateway.flow.control_rules import ControlMode
from gateway.flow.controller import Ticket
from gateway.flow.knobs import Knob
from gateway.flow.routing import PrefixRouter
from gateway.pools.control_loop import EVERY_S, ControlLoop, setters_of, spare_share
from tenants.quota.memory import MemoryQuotaStore
from tenants.types import Tier
from tests.support.builders import flow_controller
from tests.support.quota import Clock, limit

BUCKET = limit(amount=1_000, rate_per_s=10, ceiling_per_s=50, tier=Tier.BATCH)
MODEL = ModelInfo("tiny", "tiny", 1, 1_024, 300, [2], "float32", "cpu", "reference")
READY = Ready("a", MODEL, "hybrid", 16, 100, 4, 64, 1)
"""Four places."""


@dataclass
class IdleEngine:
    """Runs nothing."""

    snapshot: Snapshot | None
    ready: Ready | None = READY
    is_up: bool = True

    def set_knobs(self, knobs: EngineKnobs) -> None:
        """Not looked at here."""


@dataclass
class OwnKnobs:
    """What a gateway's own knobs are turned on."""

    admission: Admission
    reserve_quantile: float = 0.9


class Pool:
    """One model's queue, idle engine and loop, in front of a quota store."""

    def __init__(self, mode: ControlMode) -> None:
        self.clock = Clock()
        self.store = MemoryQuotaStore(self.clock)
        self.flow = flow_controller(lookahead=2, ageing_s=[1e9] * 3, scorer=PrefixRouter())
        self.engine = IdleEngine(Snapshot("a", 1, 1.0, [], [], 100, 0, 0, 100, PRIOR, {}, 0))
        engines: list[Any] = [self.engine]
        own: Any = OwnKnobs(Admission())
        setters = setters_of(
            self.flow,
            own,
            lambda: engines,
            has_engines=bool(engines),
            quota=lambda share: self.lend("tiny", share),
        )
        self.loop = ControlLoop(mode, "tiny", self.flow, engines, LengthForecast(), setters)

    def lend(self, model: str, share: float) -> None:
        self.store.spare.set(model, share)

    def look(self) -> float:
        """Some seconds later; what the bucket refills at then."""
        self.clock.advance(EVERY_S)
        self.loop.look(self.clock())
        return self.store.spare.rate_per_s(BUCKET)


def test_an_idle_engine_lends_and_a_waiting_request_takes_it_back() -> None:
    pool = Pool(ControlMode.ACTING)
    assert [pool.look() for _ in range(5)] == [20, 30, 40, 50, 50]
    batch = Ticket(QueueEntry("b", "t", 0.0, 10, 10, 2), 1, 20)
    assert pool.flow.enqueue(batch, 0.0) is None
    assert pool.look() == 50, "batch itself is whom it is lent to"
    higher = Ticket(QueueEntry("i", "t", 0.0, 10, 10, 0), 1, 20)
    assert pool.flow.enqueue(higher, 0.0) is None
    assert pool.look() == 10
    assert pool.loop.control.moves[-1].reason.startswith("a higher tier waits")


@pytest.mark.parametrize("mode", [ControlMode.ADVICE, ControlMode.OFF])
def test_without_acting_every_bucket_refills_at_its_rate(mode: ControlMode) -> None:
    pool = Pool(mode)
    assert [pool.look() for _ in range(5)] == [10] * 5
    advised = [move for move in pool.loop.control.moves if move.knob is Knob.QUOTA]
    assert [move.is_made for move in advised] == [False] * (4 if mode is ControlMode.ADVICE else 0)


def test_an_engine_that_says_nothing_has_nothing_to_spare() -> None:
    pool = Pool(ControlMode.ACTING)
    pool.engine.snapshot = None
    assert pool.look() == 10
    pool.engine.snapshot = Snapshot("a", 1, 1.0, [], [], 10, 0, 90, 100, PRIOR, {}, 0)
    assert pool.look() == 10, "memory is nearly full"
    pool.engine.is_up = False
    assert pool.look() == 10


def test_what_no_loop_looks_after_is_not_lent() -> None:
    pool = Pool(ControlMode.ACTING)
    assert [pool.look() for _ in range(4)] == [20, 30, 40, 50]
    engine_says, pool.engine.snapshot = pool.engine.snapshot, "damaged"  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        pool.look()
    assert pool.store.spare.rate_per_s(BUCKET) == 10
    pool.engine.snapshot = engine_says
    assert pool.look() == 50, "it goes on where it was"


def test_what_is_spare_is_the_less_of_places_and_memory() -> None:
    assert spare_share(1, 4, 0.5) == 0.5
    assert spare_share(3, 4, 0.5) == 0.25
    assert spare_share(9, 4, 0.0) == 0.0, "more is sent than there are places"
    assert spare_share(0, 0, 0.0) == 0.0, "no engine"
