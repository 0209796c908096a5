"""The gateway's estimator in front of a simulated pool: estimates on arrival, and their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import structs

from engine.entry import QueueEntry
from engine.forecast.length.length import LengthForecast
from engine.forecast.wait.picture import FUTURES, Picture
from engine.forecast.wait.surface import Surface
from engine.messages import TIER_RANKS, Ready, RunningSequence, Snapshot
from engine.scheduling.policy import DEFAULT_POLICY
from gateway.config import GatewayConfig
from gateway.domain.estimate import Estimate, Times
from gateway.estimates.estimator import Estimator
from gateway.estimates.forecast_cache import Size
from gateway.estimates.overdue import WatchedWait
from ops.simulate.machines.machines import Machine
from ops.simulate.pool import Member, PoolObserver, SimulatedPool
from ops.simulate.traffic.requests import SimulatedRequest
from tenants.pricing.pricing import Price, uniform_book
from tenants.types import Tier

MODEL = "virtual"
WATCH_EVERY_S = 0.05
TIERS = {rank: tier for tier, rank in TIER_RANKS.items()}


class WatchedEngine:
    """Implements the part of an upstream that the estimator reads: its size and last snapshot."""

    is_up = True
    is_drained = False
    model = None

    def __init__(self, pool: SimulatedPool, member: Member) -> None:
        engine, size = member.engine, member.size
        self.replica_id = member.replica_id
        self.ready: Ready | None = Ready(
            member.replica_id, engine.runner.info, pool.policy, engine.runner.block_tokens,
            engine.runner.num_blocks, size.max_sequences, size.max_batched_tokens, 1,
        )  # fmt: skip
        self.snapshot: Snapshot | None = None
        self._pool = pool
        self._core = engine.core

    def take_snapshot(self) -> None:
        """Adds what the core does not know: step times, and what the run under way has emitted by now."""
        snapshot = self._core.snapshot(self.replica_id)
        running, step_time = [self._by_now(one) for one in snapshot.running], self._pool.machine.step_time
        self.snapshot = structs.replace(
            snapshot, running=running, step_time=step_time, mean_step_time=step_time
        )

    def _by_now(self, sequence: RunningSequence) -> RunningSequence:
        if not sequence.emitted_tokens:
            return sequence
        emitted = self._pool.emitted_by_now(sequence.sequence_id)
        computed = sequence.computed_tokens + emitted - sequence.emitted_tokens
        return structs.replace(sequence, emitted_tokens=emitted, computed_tokens=computed)


@dataclass(frozen=True, slots=True)
class _LaterAnswer:
    """Implements `Answer` on virtual time."""

    surface: Surface
    done: Callable[[], bool]

    def result(self) -> Surface:
        return self.surface


@dataclass(frozen=True, slots=True)
class EstimateOutcome:
    estimate: Estimate
    times: Times
    emitted_tokens: int
    cost_nanousd: int
    binding: bool
    """The estimate is a quote, made some time before the request came."""
    kind: str
    tier: int


class CalibratedPool:
    """A pool whose requests are estimated on arrival; `on_end` gets each when it has ended."""

    def __init__(
        self,
        machine: Machine,
        *,
        max_tokens: int,
        on_end: Callable[[EstimateOutcome], None],
        policy: str = DEFAULT_POLICY,
        stopwatch: Callable[[], float] = lambda: 0.0,
        replays_in_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`stopwatch` times replays on the event loop: by default they take nothing, and are due as often as
        may be. `replays_in_s`: what one that begins now takes in the process that replays."""
        queue = GatewayConfig().queue_settings(machine.context_tokens)
        self.pool = SimulatedPool(
            policy,
            machine,
            predictions=self,
            prefix_caching=False,
            watch=PoolObserver(admits=self._arrive, on_ended=self._judge),
            declared_tokens=max_tokens,
            flow={
                "max_queued_per_tenant": 10_000,
                "ageing_s": queue.ageing_s,
                "lanes": queue.lanes,
            },
        )
        self._max_tokens = max_tokens
        self._on_end = on_end
        self._prices = uniform_book({MODEL: Price(100, 50, 300)})
        self._upstreams = [WatchedEngine(self.pool, member) for member in self.pool.members]
        upstreams: Any = self._upstreams
        self.estimates = Estimator(
            flow=self.pool.flow,
            upstreams=upstreams,
            lengths=LengthForecast(),
            prices=lambda: self._prices,
            model=MODEL,
            cache_s=WATCH_EVERY_S,
            submit=self._submit,
            stopwatch=stopwatch,
        )
        self._replays_in_s = replays_in_s
        self._watched_s = -1.0
        self._quoted: dict[int, tuple[Estimate, QueueEntry]] = {}
        """Open quotes, by the identity of their request."""
        self._open: dict[int, tuple[SimulatedRequest, Estimate, bool, float, WatchedWait | None]] = {}
        """By row: request, estimate, whether it is a quote, arrival time, and what the wait teaches."""
        self.estimates.forecast_cache.promised = lambda tenant_id: [
            entry for _, entry in self._quoted.values()
        ]

    def quote(self, requests: Sequence[SimulatedRequest]) -> None:
        """Each gets a quote now, which binds when it comes."""
        self._watch()
        for request in requests:
            tier = Tier(TIERS[request.tier])
            estimate = self.estimates.offers(
                MODEL, request.tenant, request.weight, [tier], self._size(request), self.pool.now_s
            )[tier]
            name = f"quote {len(self.pool.records)} {len(self._quoted)}"
            self._quoted[id(request)] = estimate, self._entry(request, name)

    def predict(self, request: SimulatedRequest) -> tuple[int, int]:
        quantile, tenant = self.estimates.lengths.quantile, request.tenant
        p50, p90 = (quantile(tenant, MODEL, share, max_tokens=self._max_tokens) for share in (0.5, 0.9))
        return p50, p90

    def _submit(self, picture: Picture) -> _LaterAnswer:
        answer = picture.surface(futures=FUTURES, seed=self.estimates.forecast_cache.replays)
        ready_s = self.pool.now_s + self._replays_in_s() * (1 + FUTURES)
        return _LaterAnswer(answer, lambda: self.pool.now_s >= ready_s)

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
        self.estimates.arrived(self._entry(request, name))
        told = quote or estimate
        waiting = self.estimates.waits(name, told, came_s)
        self._open[len(self.pool.records) - 1] = request, told, quote is not None, came_s, waiting

    def _estimate(self, request: SimulatedRequest) -> Estimate:
        tier = Tier(TIERS[request.tier])
        return self.estimates.estimate(
            MODEL,
            request.tenant,
            request.weight,
            tier,
            self._size(request),
            self.pool.now_s,
            self.predict(request),
        )

    def _judge(self, pool: SimulatedPool, row: int) -> None:
        self._watch()
        request, estimate, is_quote, came_s, waiting = self._open.pop(row)
        records, emitted = pool.records, request.output_tokens
        last_s = records.last_s[row]
        times = Times(came_s, records.dispatched_s[row], records.first_s[row], last_s, last_s)
        tier = Tier(TIERS[request.tier])
        cost_nanousd = self._prices.cost_nanousd(MODEL, tier, request.input_tokens, 0, emitted)
        self.estimates.judge(estimate, times, emitted, waiting)
        self.estimates.lengths.observe(request.tenant, MODEL, emitted)
        self._on_end(
            EstimateOutcome(estimate, times, emitted, cost_nanousd, is_quote, request.kind, request.tier)
        )

    def _watch(self) -> None:
        now_s = self.pool.now_s
        if now_s - self._watched_s >= WATCH_EVERY_S:
            self._watched_s = now_s
            for upstream in self._upstreams:
                upstream.take_snapshot()
            self.estimates.watch(now_s)

    def _size(self, request: SimulatedRequest) -> Size:
        return Size(request.input_tokens, 1, 1, self._max_tokens, is_exact=False)

    def _entry(self, request: SimulatedRequest, name: str) -> QueueEntry:
        now_s, (median, high) = self.pool.now_s, self.predict(request)
        return QueueEntry(
            name, request.tenant, now_s, request.input_tokens, median, request.tier, request.weight, high
        )
