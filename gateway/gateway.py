"""The gateway: its parts, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from functools import partial

from gateway.alerts.evaluator import AlertEvaluator
from gateway.alerts.look import AlertFigures
from gateway.alerts.sender import WebhookSender
from gateway.background import GatewayService, Services, Step, every, watch_lag
from gateway.budget.holds import Holds
from gateway.budget.limit_alerts import LimitAlerts
from gateway.cluster.active_brakes import ActiveBrakes
from gateway.cluster.active_directory import ActiveDirectory
from gateway.cluster.active_drains import ActiveDrains
from gateway.cluster.active_policy import FOLLOW_EVERY_S, ActivePolicy
from gateway.cluster.audit_checkpoints import AuditCheckpoints
from gateway.cluster.backfills import run_backfills
from gateway.cluster.idempotency_keys import IdempotencyKeys
from gateway.cluster.liveness import Liveness
from gateway.cluster.presence import Presence
from gateway.cluster.progress_writer import ProgressWriter
from gateway.cluster.usage_folder import UsageFolder
from gateway.deps import GatewayDeps
from gateway.explain.slo_monitor import SloMonitor
from gateway.explain.timeline_writer import TimelineWriter
from gateway.metrics.passwords import HashingCollector
from gateway.metrics.registry import Metrics
from gateway.pool_builder import PoolBuilder, collectors_of
from gateway.pools.control_loop import EVERY_S as CONTROL_EVERY_S
from gateway.pools.control_loop import ControlLoop
from gateway.pools.fleet import Fleet
from gateway.pools.pool import Pools, pools_of
from gateway.pools.request_actions import RequestActions
from gateway.pools.served_models import ServedModels
from gateway.quotes.quotes import Quotes
from gateway.records.access_recorder import AccessRecorder
from gateway.records.key_use_recorder import KeyUseRecorder
from gateway.records.refusal_recorder import RefusalRecorder
from gateway.records.usage_check import UsageCheck
from gateway.requests.inputs.large_bodies import LargeBodies
from gateway.upstream.base import Upstream
from gateway.workers.metric_pages import MetricPages
from gateway.workers.workers import counts_of
from tenants.people.hashing_gate import AT_ONCE
from tenants.people.way_in import WayIn
from tenants.pricing.redeemed_quotes import RedeemedQuotes

SAVE_LEARNED_EVERY_S = 30.0
PURGE_EVERY_S = 60.0
LAG_EVERY_S = 0.02
PACE_EVERY_S = 0.05
SHARES_EVERY_S = 1.0

log = logging.getLogger("fairgate.gateway")


class Gateway:
    """One gateway process's own state; `deps` is shared with others."""

    def __init__(self, deps: GatewayDeps) -> None:
        """Raises `UnknownPolicy`."""
        config, database, admin = deps.config, deps.database, deps.admin
        gateway_id, clock, wall_clock = deps.gateway_id, deps.clock, deps.wall_clock
        self.deps = deps
        self.metrics = Metrics(deps.prometheus)
        self.refusals = RefusalRecorder(deps, self.metrics)
        self.accesses = AccessRecorder(deps, admin.transactions)
        self.key_uses = KeyUseRecorder(deps)
        workers = deps.workers
        self.way_in = WayIn(
            deps.people,
            clock,
            self.accesses.log_in,
            None if workers is None else workers.keeper,
            AT_ONCE if workers is None else workers.part(AT_ONCE),
        )
        self.usage_check = UsageCheck(admin.usage.verify, wall_clock)
        self.usage = UsageFolder(deps)
        self.timelines = TimelineWriter(deps)
        self.audit = AuditCheckpoints(deps, deps.audit)
        self.slo = SloMonitor(deps, lambda: deps.directory.revision)
        liveness = Liveness(gateway_id, config.gateway_stale_s, clock)
        self.limit_events = LimitAlerts(deps, self.metrics)
        self.holds = Holds(
            deps,
            deps.ledger,
            deps.quota_store,
            all_limits=lambda: deps.directory.limits(wall_clock()),
            require_presence=liveness.require,
            on_granted=self.limit_events.note,
        )
        self.progress = ProgressWriter(deps, self.holds)
        self.presence = Presence(deps, liveness, self.holds, self.progress)
        self._redeemed = RedeemedQuotes(database)
        self.quotes = Quotes(deps, deps.quote_secret, deps.directory.prices_at, self._redeemed)
        self.pools = pools = Pools()
        self.policy = ActivePolicy(deps, pools)
        self.brakes = ActiveBrakes(deps, pools)
        self.drains = ActiveDrains(deps, pools)
        self.directory = ActiveDirectory(deps, pools, self._follow_others)
        self.builder = PoolBuilder(
            deps,
            self.metrics,
            self.holds,
            self.slo,
            self.timelines,
            self.quotes,
            pools,
            lambda: self.policy.now,
        )
        pools |= {name: self.builder.build(spec) for name, spec in pools_of(deps.pools).items()}
        deps.quota_store.spare.cover(pools)
        asked = None if workers is None else workers.keeper.ask
        self.models = ServedModels(deps, pools, deps.aliases, self.quotes, deps.prices, asked)
        self.idempotency = IdempotencyKeys(deps)
        self.large_bodies = LargeBodies(config.large_bodies_bytes, counts_of(workers, "large bodies"))
        self.request_actions = RequestActions(deps, pools, self.metrics)
        self.fleet = Fleet(
            gateway_id, self.request_actions, deps.peer_requests, deps.registry, config.gateway_stale_s
        )
        self.webhooks = WebhookSender(deps, admin.webhooks.secret)
        self.alerts = AlertEvaluator(
            deps,
            AlertFigures(
                deps,
                self.fleet.now,
                holds_overdue=lambda: self.holds.overdue,
                audit_complaint=lambda: self.audit.complaint,
            ),
        )
        for collector in (
            *collectors_of(pools, self.builder.lengths, self.holds, self.usage_check),
            database.latency,
            HashingCollector(self.way_in.gate),
            deps.tracer,
            deps.quota_store.latency,
        ):
            if collector is not None:
                deps.prometheus.register(collector)
        self.services = Services(*self._services())

    async def start(self) -> None:
        """Recovers what an earlier process left, then opens; without the store nothing is admitted. Raises
        `DatabaseUnavailable`, and `Invalid` if another gateway of this database would count separately."""
        await self.services.start()

    async def stop(self) -> None:
        """Drains: running requests may end, waiting ones are refused, everything settles."""
        await self.services.stop()

    # ------------------------------------------------------------ start and stop

    def _services(self) -> Iterator[GatewayService]:
        deps, config, presence, builder = self.deps, self.deps.config, self.presence, self.builder
        if (workers := deps.workers) is not None:
            last = partial(self._keep_counts, workers.metrics)
            yield GatewayService("counts", stop=last, why="the last to stop: nothing is counted after it")
        yield GatewayService(
            "directory", deps.directory.refresh, why="what was created just now works at once"
        )
        yield GatewayService("row", presence.enter, presence.leave, why="left last: then nothing is open")
        yield GatewayService("revision", self.directory.follow)
        yield GatewayService("counters", presence.recover, why="before anything is held")
        yield _repeated(
            "presence",
            config.beat_s,
            presence.beat,
            "the heartbeat failed; it goes on",
            starts_now=True,
            why="others leave this gateway's requests alone until all is written",
        )
        yield GatewayService("learned", stop=self._save_learned)
        yield _repeated("lengths", SAVE_LEARNED_EVERY_S, self._save_learned, "the lengths were not saved")
        yield GatewayService("log-ins", stop=self.way_in.close)
        if deps.tracer is not None:
            yield GatewayService("traces", stop=partial(asyncio.to_thread, deps.tracer.close))
        yield GatewayService("replays", stop=builder.replays.close)
        yield builder.minutes.service
        yield GatewayService(
            "last minute", self._sample_shares, self._sample_shares, why="before it is written"
        )
        yield _repeated("shares", SHARES_EVERY_S, self._sample_shares, "the shares were not sampled")
        yield GatewayService("targets", self.slo.refresh)
        for writer in (self.slo, self.webhooks, self.alerts, self.audit, self.usage, self.timelines):
            yield writer.service
        for recorder in (self.accesses, builder.calibration, builder.moves, self.key_uses, self.refusals):
            yield recorder.service
        said = partial(self.accesses.of_server, gateway_id=deps.gateway_id)
        yield GatewayService("server", partial(said, "server.start"), partial(said, "server.stop"))
        yield self.limit_events.service
        yield GatewayService("progress", self.progress.start, self.progress.close)
        yield GatewayService("holds", self.holds.start, partial(self.holds.close, config.settle_wait_s))
        yield GatewayService("brakes", self.brakes.start, why="a shared queue takes them when it is joined")
        yield _repeated("brakes", FOLLOW_EVERY_S, self.brakes.follow, "the stored brakes were not read")
        yield GatewayService("drains", self.drains.follow)
        yield _repeated("drains", FOLLOW_EVERY_S, self._leave_drained, "what runs at drained replicas stayed")
        for pool in self.pools.values():
            yield GatewayService(f"queue of {pool.name}", pool.dispatcher.start, pool.dispatcher.close)
        for pool in self.pools.values():
            turn = partial(self._turn, pool.control)
            yield GatewayService(f"control of {pool.name}", stop=pool.control.leave)
            yield _repeated("control", CONTROL_EVERY_S, turn, "the control loop failed; it goes on")
        yield GatewayService("policy", self.policy.start)
        yield _repeated("policy", FOLLOW_EVERY_S, self.policy.follow, "the stored policy was not read")
        if (peers := deps.peer_requests) is not None:
            yield GatewayService("peers", partial(peers.start, self.request_actions.act), peers.close)
        if deps.members is not None:
            yield GatewayService("members", task=partial(deps.members.run, self._prepare))
        yield GatewayService("directory", task=self.directory.run)
        yield GatewayService("recovery", task=presence.keep_recovered)
        yield GatewayService("lag", task=partial(watch_lag, LAG_EVERY_S, self._note_lag))
        yield _repeated("pace", PACE_EVERY_S, self._watch_forecasts, "the forecasts were not renewed")
        yield _repeated("idempotency", PURGE_EVERY_S, self._purge, "the purge failed; it goes on")
        if deps.backfill is not None:
            yield GatewayService("backfills", task=partial(run_backfills, deps.backfill))
        grace_s = config.shutdown_grace_s
        yield GatewayService("requests", stop=partial(self.pools.close, grace_s), why="all else serves them")

    def _keep_counts(self, pages: MetricPages) -> None:
        pages.own(self.metrics.registry)

    async def _prepare(self, upstream: Upstream) -> None:
        """A replica that has joined."""
        for name, pool in self.pools.items():
            if upstream in pool.spec.upstreams:
                self.drains.tell(name, upstream)
                pool.control.repeat()
        self.brakes.tell(upstream)
        await self.policy.tell(upstream)

    async def _follow_others(self) -> None:
        """Aliases, drains and targets, as of the directory's revision. Raises `DatabaseUnavailable`."""
        self.models.follow(self.deps.directory.aliases)
        await self.drains.follow()
        await self.slo.refresh()

    async def _turn(self, control: ControlLoop) -> None:
        await control.turn(self.deps.clock())

    async def _purge(self) -> None:
        await self.idempotency.purge()
        await self._redeemed.purge(round(self.deps.wall_clock() * 1e6))

    async def _save_learned(self) -> None:
        pools = self.pools
        await self.builder.files.save(self.builder.lengths, pools.calibrations(), pools.observed)

    def _leave_drained(self) -> None:
        for pool in self.pools.values():
            pool.leave_drained()

    def _watch_forecasts(self) -> None:
        for pool in self.pools.values():
            pool.watch_forecasts(self.deps.clock())

    def _sample_shares(self) -> None:
        for pool in self.pools.values():
            pool.sample_shares(self.deps.clock(), self.deps.wall_clock())

    def _note_lag(self, lag_s: float) -> None:
        self.metrics.event_loop_lag.observe(lag_s)
        self.metrics.recent_lag.note(lag_s)


def _repeated(
    name: str, seconds: float, work: Step, failed: str, *, starts_now: bool = False, why: str = ""
) -> GatewayService:
    return GatewayService(
        name, task=partial(every, seconds, work, log, failed, starts_now=starts_now), why=why
    )
