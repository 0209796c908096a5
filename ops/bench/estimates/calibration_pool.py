"""The gateway's estimator in front of a simulated pool: estimates on arrival, and their outcomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.entry import QueueEntry
from engine.forecast.length.length import LengthForecast
from engine.messages import TIER_RANKS, Ready, Snapshot
from gateway.domain.estimate import Estimate, Times
from gateway.estimates.estimator import Estimator
from gateway.estimates.forecast_cache import Size
from ops.simulate.machines.machines import Machine
from ops.simulate.pool import Member, PoolObserver, SimulatedPool
from ops.simulate.traffic.requests import SimulatedRequest
from tenants.pricing.pricing import Price, uniform_book
from tenants.types import Tier

MODEL = "virtual"
WATCH_EVERY_S = 0.05
TIERS = {rank: tier for tier, rank in TIER_RANKS.items()}


class WatchedEngine:
    """Implements what the estimator reads of an upstream: its size and last snapshot."""

    is_up = True
    is_drained = False
    model = None

    def __init__(self, member: Member, policy: str) -> None:
        engine, size = member.engine, member.size
        self.replica_id = member.replica_id
        self.ready: Ready | None = Ready(
            member.replica_id, engine.runner.info, policy, engine.runner.block_tokens,
            engine.runner.num_blocks, size.max_sequences, size.max_batched_tokens, 1,
        )  # fmt: skip
        self.snapshot: Snapshot | None = None
        self._core = engine.core

    def take_snapshot(self) -> None:
        self.snapshot = self._core.snapshot(self.replica_id)


@dataclass(frozen=True, slots=True)
class EstimateOutcome:
    estimate: Estimate
    times: Times
    emitted_tokens: int
    cost_nanousd: int
    binding: bool
    """The estimate is a quote, made some time before the request came."""
    kind: str


class CalibratedPool:
    """A pool whose requests are estimated on arrival; `on_end` gets each when it has ended."""

    def __init__(
        self, machine: Machine, *, max_tokens: int, on_end: Callable[[EstimateOutcome], None]
    ) -> None:
        self.pool = SimulatedPool(
            "vtc",
            machine,
            predictions=self,
            prefix_caching=False,
            watch=PoolObserver(admits=self._arrive, on_ended=self._judge),
            stepwise=True,
            declared_tokens=max_tokens,
            flow={"max_queued_per_tenant": 10_000},
        )
        self._max_tokens = max_tokens
        self._on_end = on_end
        self._prices = uniform_book({MODEL: Price(100, 50, 300)})
        self._upstreams = [WatchedEngine(member, "vtc") for member in self.pool.members]
        upstreams: Any = self._upstreams
        self.estimates = Estimator(
            flow=self.pool.flow,
            upstreams=upstreams,
            lengths=LengthForecast(),
            prices=lambda: self._prices,
            model=MODEL,
            cache_s=WATCH_EVERY_S,
            # Virtual time: a replay takes none of it, and is due as often as it may be.
            stopwatch=lambda: 0.0,
        )
        self._watched_s = -1.0
        self._quoted: dict[int, tuple[Estimate, QueueEntry]] = {}
        """Open quotes, by the identity of their request."""
        self._open: dict[int, tuple[SimulatedRequest, Estimate, bool, float]] = {}
        """By row: the request, its estimate, whether that is a quote, and when it came."""
        self.estimates.forecast_cache.promised = lambda now_s, tenant_id: [
            entry for _, entry in self._quoted.values()
        ]

    def quote(self, request: SimulatedRequest) -> None:
        self._watch()
        now_s, tier = self.pool.now_s, Tier(TIERS[request.tier])
        offers = self.estimates.offers(
            MODEL, request.tenant, request.weight, [tier], self._size(request), now_s
        )
        estimate = offers[tier]
        name = f"quote {len(self.pool.records)} {len(self._quoted)}"
        self._quoted[id(request)] = estimate, self._entry(request, name, estimate.output_tokens[0])

    def predict(self, request: SimulatedRequest) -> tuple[int, int]:
        """See `Predictions`; the 90th percentile is not known."""
        return self.estimates.lengths.quantile(request.tenant, MODEL, 0.5, max_tokens=self._max_tokens), 0

    def ended(self, request: SimulatedRequest) -> None:
        """Learned in `_judge`."""

    def _arrive(self, pool: SimulatedPool, request: SimulatedRequest) -> bool:
        self._watch()
        quote, _ = self._quoted.pop(id(request), (None, None))
        self._enter(request, str(len(pool.records) - 1), self._estimate(request), quote, pool.now_s)
        return True

    def _enter(
        self, request: SimulatedRequest, name: str, estimate: Estimate, quote: Estimate | None, came_s: float
    ) -> None:
        self.estimates.arrived(self._entry(request, name, self.predict(request)[0]))
        self._open[len(self.pool.records) - 1] = request, quote or estimate, quote is not None, came_s

    def _estimate(self, request: SimulatedRequest) -> Estimate:
        tier = Tier(TIERS[request.tier])
        return self.estimates.estimate(
            MODEL, request.tenant, request.weight, tier, self._size(request), self.pool.now_s
        )

    def _judge(self, pool: SimulatedPool, row: int) -> None:
        request, estimate, is_quote, came_s = self._open.pop(row)
        records, emitted = pool.records, request.output_tokens
        last_s = records.last_s[row]
        times = Times(came_s, records.dispatched_s[row], records.first_s[row], last_s, last_s)
        tier = Tier(TIERS[request.tier])
        cost_nanousd = self._prices.cost_nanousd(MODEL, tier, request.input_tokens, 0, emitted)
        self.estimates.judge(estimate, times, emitted)
        self.estimates.lengths.observe(request.tenant, MODEL, emitted)
        self._on_end(EstimateOutcome(estimate, times, emitted, cost_nanousd, is_quote, request.kind))

    def _watch(self) -> None:
        """What the gateway does twenty times a second, when that is due."""
        now_s = self.pool.now_s
        if now_s - self._watched_s >= WATCH_EVERY_S:
            self._watched_s = now_s
            for upstream in self._upstreams:
                upstream.take_snapshot()
            self.estimates.watch(now_s)

    def _size(self, request: SimulatedRequest) -> Size:
        return Size(request.input_tokens, 1, 1, self._max_tokens, is_exact=False)

    def _entry(self, request: SimulatedRequest, name: str, median: int) -> QueueEntry:
        now_s = self.pool.now_s
        high = self.estimates.lengths.quantile(request.tenant, MODEL, 0.9, max_tokens=self._max_tokens)
        return QueueEntry(
            name, request.tenant, now_s, request.input_tokens, median, request.tier, request.weight, high
        )
