"""What is a request told on arrival, and what then happens to it, on virtual time?

The virtual pool (`ops/simulate/step_pool.py`) with the gateway's own estimator in front: it sees engines only
through their snapshots, twenty a second, learns lengths from answers that ended, and corrects itself by them.
The true length of an answer is known to the virtual engine alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.core.core import StepResult
from engine.entry import QueueEntry
from engine.forecast.length.length import LengthForecast
from engine.messages import TIER_RANKS, Ready, Snapshot
from engine.virtual.replica import VirtualReplica
from gateway.domain.estimate import Estimate, Times
from gateway.estimates.estimator import Estimator
from gateway.estimates.forecast_cache import Size
from gateway.flow.types import QueueFull, Ticket
from ops.simulate.step_pool import PoolRequest, PoolServed, VirtualPool
from tenants.pricing.pricing import Price, uniform_book
from tenants.types import Tier

MODEL = "virtual"
WATCH_EVERY_S = 0.05
TIERS = {rank: tier for tier, rank in TIER_RANKS.items()}


class WatchedEngine:
    """An upstream of which only the size and the last snapshot are asked."""

    is_up = True
    model = None

    def __init__(self, replica_id: str, engine: VirtualReplica, ready: Ready) -> None:
        self.replica_id = replica_id
        self.ready: Ready | None = ready
        self.snapshot: Snapshot | None = None
        self._engine = engine

    def look(self) -> None:
        """A snapshot arrives."""
        self.snapshot = self._engine.core.snapshot(self.replica_id)


@dataclass(slots=True)
class Told:
    """One request: what it was told, and what became of it."""

    served: PoolServed
    estimate: Estimate
    binding: bool = False
    """It was told by a quote, some time before it came."""
    cost_nanousd: int = 0
    emitted_tokens: int = 0

    @property
    def times(self) -> Times:
        """As the gateway would have noted them."""
        served = self.served
        return Times(served.request.at_s, served.dispatched_s, served.first_s, served.ended_s, served.ended_s)


@dataclass
class CalibratedPool(VirtualPool):
    """`on_end` is told of every request that was told something, once it has ended."""

    max_tokens: int = 512
    on_end: Callable[[Told], None] = lambda told: None
    told: dict[str, Told] = field(default_factory=dict)
    quoted: dict[int, Estimate] = field(default_factory=dict)
    """By the identity of a request: the quote that it comes with."""

    def __post_init__(self) -> None:
        VirtualPool.__post_init__(self)
        machine = self.machine
        self.prices = uniform_book({MODEL: Price(100, 50, 300)})
        self.upstreams = []
        for replica_id, engine in self.engines.items():
            ready = Ready(
                replica_id, engine.runner.info, self.policy, machine.block_tokens, machine.num_blocks,
                machine.max_sequences, machine.max_batched_tokens, 1,
            )  # fmt: skip
            self.upstreams.append(WatchedEngine(replica_id, engine, ready))
        upstreams: Any = self.upstreams
        self.estimates = Estimator(
            flow=self.flow,
            upstreams=upstreams,
            lengths=LengthForecast(),
            prices=lambda: self.prices,
            model=MODEL,
            cache_s=WATCH_EVERY_S,
            # Virtual time: a replay takes none of it, and is due as often as it may be.
            stopwatch=lambda: 0.0,
        )
        self._watched_s = -1.0
        self._outstanding: dict[int, QueueEntry] = {}
        self.estimates.surfaces.promised = lambda now_s: list(self._outstanding.values())

    def watch(self) -> None:
        """What the gateway does twenty times a second, when that is due."""
        if self.now_s - self._watched_s >= WATCH_EVERY_S:
            self._watched_s = self.now_s
            for upstream in self.upstreams:
                upstream.look()
            self.estimates.watch(self.now_s)

    def size(self, request: PoolRequest) -> Size:
        """As the gateway sees it."""
        return Size(request.input_tokens, 1, 1, self.max_tokens, is_exact=False)

    def tell(self, request: PoolRequest) -> Estimate:
        """The estimate made on arrival."""
        tier = Tier(TIERS[request.tier])
        return self.estimates.estimate(
            MODEL, request.tenant, request.weight, tier, self.size(request), self.now_s
        )

    def quote(self, request: PoolRequest) -> None:
        """A quote, made now, for a request that comes later."""
        self.watch()
        tier = Tier(TIERS[request.tier])
        size = self.size(request)
        offers = self.estimates.offers(MODEL, request.tenant, request.weight, [tier], size, self.now_s)
        estimate = offers[tier]
        self.quoted[id(request)] = estimate
        self._outstanding[id(request)] = QueueEntry(
            f"quote {len(self.served)} {len(self._outstanding)}",
            request.tenant,
            self.now_s,
            request.input_tokens,
            estimate.output_tokens[0],
            request.tier,
            request.weight,
        )

    def arrive(self, request: PoolRequest) -> PoolServed:
        """A request arrives, and is told what to expect."""
        self.watch()
        quote = self.quoted.pop(id(request), None)
        self._outstanding.pop(id(request), None)
        estimate = self.tell(request)
        record = PoolServed(request)
        self.served.append(record)
        entry_id = str(len(self.served))
        median = self.estimates.lengths.quantile(request.tenant, MODEL, 0.5, max_tokens=self.max_tokens)
        entry = QueueEntry(
            entry_id, request.tenant, self.now_s, request.input_tokens, median, request.tier, request.weight
        )
        ticket = Ticket(entry, 1, request.input_tokens + median, max_tokens=self.max_tokens)
        self.estimates.arrived(entry)
        record.refused = isinstance(self.flow.enqueue(ticket, self.now_s), QueueFull)
        if not record.refused:
            self._records[entry_id] = record
            self.told[entry_id] = Told(record, quote or estimate, quote is not None)
        return record

    def _collect(self, result: StepResult) -> None:
        VirtualPool._collect(self, result)
        for delta in result.deltas.get("virtual", ()):
            if delta.outcome is None:
                continue
            told = self.told.pop(delta.sequence_id)
            request, emitted = told.served.request, delta.outcome.emitted_tokens
            told.emitted_tokens = emitted
            tier = Tier(TIERS[request.tier])
            told.cost_nanousd = self.prices.cost_nanousd(MODEL, tier, request.input_tokens, 0, emitted)
            self.estimates.judge(told.estimate, told.times, emitted)
            self.estimates.lengths.observe(request.tenant, MODEL, emitted)
            self.on_end(told)
