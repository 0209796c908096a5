"""Compares finished requests with their SLO targets, and writes counts and causes of misses.

Misses are judged many together in a thread (`attribution.py`), sharing counterfactuals; then follows a rest
of `REST` times the duration, so that explaining an overload does not add to it. Counts and misses are written
every second; misses beyond the bounds are counted in a metric, not explained.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec
from prometheus_client import Counter

from gateway.background import BackgroundWriter, Site
from gateway.explain.attribution import Metric, MissVerdict, RequestFacts, judge
from gateway.explain.fluid_share import FluidMachine, Job
from gateway.explain.load_log import LoadLog
from gateway.explain.minutes.flow_meter import FlowMeter
from gateway.explain.pool_load import PoolLoadShare
from gateway.statistics import RecentShare
from tenants.errors import DatabaseUnavailable
from tenants.outcomes import Cause
from tenants.slo import store as slo_store
from tenants.slo.slo import Missed, SloBook, SloTally
from tenants.slo.store import CountKey
from tenants.slo.target import Slo
from tenants.types import Tier

PURGE_EVERY_S = 3600.0
REST = 20.0
"""Rest after a judgement, in multiples of its duration: at most a twentieth of one core."""
MAX_JUDGED = 512
MAX_PENDING = 4_096
MAX_WAITING = 20_000

log = logging.getLogger("fairgate.gateway.slo")


@dataclass(slots=True)
class _Pending:
    facts: RequestFacts
    tenant_id: str
    slo: Slo
    at_us: int


class Compared(msgspec.Struct, frozen=True):
    missed: int
    to_judge: int
    """The others exceeded the bound."""


@dataclass
class PoolLoad:
    machine: Callable[[], FluidMachine | None]
    """None: no step-time model, so no counterfactuals."""
    log: LoadLog = field(default_factory=LoadLog)
    meter: FlowMeter = field(default_factory=lambda: FlowMeter(""))
    """Service by minute."""
    shared: PoolLoadShare | None = None
    """Told to and heard of gateways that share the queue; None: it is not shared."""
    clock: Callable[[], float] = time.monotonic
    pending: list[_Pending] = field(default_factory=list)
    attainment: RecentShare = field(default_factory=RecentShare)
    on_verdict: Callable[[str, MissVerdict], None] = lambda request_id, verdict: None

    def known_until_s(self) -> float:
        """Up to when the load is known: events at gateways that share the queue arrive later."""
        return math.inf if self.shared is None else self.shared.known_until_s(self.clock())


class SloMonitor(BackgroundWriter):
    """Use from one event loop."""

    task_name = "gateway slo"
    log = log
    failed = "missed targets could not be judged; it goes on"
    unavailable = "targets are looked after later"
    purge_every_s = PURGE_EVERY_S

    def __init__(
        self,
        site: Site,
        revision: Callable[[], int],
        *,
        stopwatch: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`revision` grows with every admin act: targets are then read again."""
        super().__init__(site)
        self._revision = revision
        self._stopwatch = stopwatch
        self._read_at: int | None = None
        self._rest_until_s = -math.inf
        self._tallies: dict[CountKey, SloTally] = {}
        self._missed: list[Missed] = []
        self.book = SloBook()
        self.pools: dict[str, PoolLoad] = {}
        self._requests = Counter(
            "fairgate_slo_requests",
            "Requests that a target binds, by whether they met it.",
            ["metric", "tier", "met"],
            registry=site.prometheus,
        )
        self._allowed = Counter(
            "fairgate_slo_allowed_misses",
            "Misses that targets allow: each request adds the share of its target that may be missed.",
            ["metric", "tier"],
            registry=site.prometheus,
        )
        self._misses = Counter(
            "fairgate_slo_misses",
            "Missed targets, by cause; `unjudged`: too many at once to be explained; `refused`: not let in,"
            " since it would have been missed.",
            ["metric", "tier", "cause"],
            registry=site.prometheus,
        )

    # ------------------------------------------------------------ requests

    def ended(self, pool: str, facts: RequestFacts, tier: Tier) -> Compared:
        job = facts.job
        all_missed = to_judge = 0
        for slo in self.book.of(job.tenant_id, tier):
            missed = facts.misses(Metric(slo.metric), slo.target_s)
            if missed is None:
                continue
            self._count(slo, job.tenant_id, tier, missed=missed)
            self.pools[pool].attainment.note(not missed)
            if missed:
                all_missed += 1
                pending = self.pools[pool].pending
                if len(pending) < MAX_PENDING:
                    at_us = self._now_us()
                    pending.append(_Pending(facts, job.tenant_id, slo, at_us))
                    to_judge += 1
                else:
                    self._misses.labels(slo.metric, tier.value, "unjudged").inc()
        return Compared(all_missed, to_judge)

    def refused(self, tenant_id: str, tier: Tier, metric: str) -> None:
        """Counts a request refused for its target of `metric` as a miss, without judging it."""
        for slo in self.book.of(tenant_id, tier):
            if slo.metric == metric:
                self._count(slo, tenant_id, tier, missed=True)
                self._misses.labels(metric, tier.value, "refused").inc()

    def _count(self, slo: Slo, tenant_id: str, tier: Tier, *, missed: bool) -> None:
        metric = slo.metric
        key = CountKey(tenant_id, tier.value, metric)
        self._tallies[key] = self._tallies.get(key, SloTally()) + SloTally(1, int(missed))
        self._requests.labels(metric, tier.value, "no" if missed else "yes").inc()
        self._allowed.labels(metric, tier.value).inc((1_000 - slo.per_mille) / 1_000)

    # ------------------------------------------------------------ life cycle

    async def close(self) -> None:
        await super().close()
        self._rest_until_s = -math.inf
        await self.judge_pending(waits=False)
        with self._while_away():
            await self.flush()

    async def refresh(self) -> None:
        """Reads the targets again after an admin act. Raises `DatabaseUnavailable`."""
        revision = self._revision()
        if revision != self._read_at:
            slos = await slo_store.read_slos(self._database)
            self.book = SloBook(slos)
            self._read_at = revision
            for slo in slos:  # Prometheus sees no increase in a series that begins with one
                self._allowed.labels(slo.metric, slo.tier.value)
                for met in ("yes", "no"):
                    self._requests.labels(slo.metric, slo.tier.value, met)

    # ------------------------------------------------------------ judging and writing

    async def judge_pending(self, *, waits: bool = True) -> None:
        """Judges pending misses with known load (`waits` False: all), except during a rest."""
        for pool in self.pools.values():
            if not pool.pending or self._stopwatch() < self._rest_until_s:
                continue
            known_s = pool.known_until_s() if waits else math.inf
            ripe = list(takewhile(lambda miss: miss.facts.ended_s <= known_s, pool.pending))  # noqa: B023
            pending = ripe[:MAX_JUDGED]
            if not pending:
                continue
            pool.pending = pool.pending[len(pending) :]
            since_s = min(miss.facts.job.arrived_s for miss in pending)
            until_s = max(miss.facts.ended_s for miss in pending)
            jobs = pool.log.jobs(until_s, since_s)
            began_s = self._stopwatch()
            verdicts = await asyncio.to_thread(
                _judge, pending, jobs, pool.machine(), pool.log.serving_since()
            )
            self._rest_until_s = self._stopwatch() + REST * (self._stopwatch() - began_s)
            for miss, verdict in zip(pending, verdicts, strict=True):
                self._note(miss, verdict)
                pool.on_verdict(miss.facts.job.job_id, verdict)

    async def flush(self) -> None:
        tallies, self._tallies = self._tallies, {}
        missed, self._missed = self._missed, []
        try:
            await slo_store.add(self._database, tallies, missed, self._wall_clock())
        except DatabaseUnavailable:
            for key, tally in tallies.items():
                self._tallies[key] = self._tallies.get(key, SloTally()) + tally
            self._missed = missed + self._missed
            raise

    def _note(self, pending: _Pending, verdict: MissVerdict) -> None:
        slo = pending.slo
        self._misses.labels(slo.metric, slo.tier.value, verdict.cause.value).inc()
        if len(self._missed) >= MAX_WAITING:
            return
        actual_s = verdict.actual_s
        self._missed.append(
            Missed(
                request_id=pending.facts.job.job_id,
                tenant_id=pending.tenant_id,
                tier=slo.tier.value,
                metric=slo.metric,
                cause=verdict.cause.value,
                target_us=slo.target_us,
                actual_us=round(actual_s * 1e6) if math.isfinite(actual_s) else None,
                at_us=pending.at_us,
                evidence=dict(verdict.evidence),
            )
        )

    async def purge(self) -> None:
        await slo_store.purge(self._database, self._wall_clock())

    async def _work(self) -> None:
        await self.refresh()
        await self.judge_pending()
        await super()._work()


def _judge(
    pending: list[_Pending],
    jobs: list[Job],
    machine: FluidMachine | None,
    serving: list[tuple[float, int]],
) -> list[MissVerdict]:
    missed = [(miss.facts, Metric(miss.slo.metric), miss.slo.target_s) for miss in pending]
    try:
        return judge(missed, jobs, machine, serving)
    except Exception:
        log.exception("the causes of %d misses could not be found", len(missed))
        return [
            MissVerdict(metric, target_s, facts.actual_s(metric) or math.inf, Cause.UNKNOWN, _NO_EVIDENCE)
            for facts, metric, target_s in missed
        ]


_NO_EVIDENCE: Mapping[str, float | None] = {}
