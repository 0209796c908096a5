"""The gateway: its parts, and the order in which they start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.forecast.calibration import Calibration
from engine.messages import ProbeReport
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.policy import make_policy
from gateway import errors
from gateway.alerts.evaluator import AlertEvaluator
from gateway.alerts.look import AlertFigures
from gateway.alerts.sender import WebhookSender
from gateway.background import every, watch_lag
from gateway.budget.holds import Holds
from gateway.budget.limit_alerts import LimitAlerts
from gateway.cluster import recovery
from gateway.cluster.active_brakes import ActiveBrakes
from gateway.cluster.active_directory import ActiveDirectory
from gateway.cluster.active_drains import ActiveDrains
from gateway.cluster.active_policy import FOLLOW_EVERY_S, ActivePolicy
from gateway.cluster.audit_checkpoints import AuditCheckpoints
from gateway.cluster.idempotency_keys import IdempotencyKeys
from gateway.cluster.identity import RivalWatch
from gateway.cluster.liveness import Liveness
from gateway.cluster.progress_writer import ProgressWriter
from gateway.cluster.usage_folder import UsageFolder
from gateway.deps import GatewayDeps, RecoveryReport
from gateway.dispatch.admission import Admission
from gateway.dispatch.dispatcher import Dispatcher
from gateway.domain.call import Call, ServedModel
from gateway.error_mapping import as_api_error
from gateway.errors import ApiError
from gateway.estimates.estimator import Estimator
from gateway.estimates.persistence import (
    as_text,
    load_calibrations,
    load_lengths,
    save_calibrations,
    save_lengths,
)
from gateway.estimates.replay_process import ReplayProcess
from gateway.explain.describer import Describer
from gateway.explain.minutes.engine_meter import EngineMeter
from gateway.explain.minutes.flow_meter import FlowMeter
from gateway.explain.minutes.writer import MinuteWriter
from gateway.explain.pool_load import KNOWN_AFTER_S
from gateway.explain.recorder import RequestRecorder, machine_of
from gateway.explain.shares import ShareMeter
from gateway.explain.slo_monitor import SloMonitor
from gateway.explain.timeline_writer import TimelineWriter
from gateway.flow.controller import FlowController
from gateway.flow.knobs import Knob
from gateway.flow.placement import Scorer
from gateway.flow.routing import PrefixRouter
from gateway.flow.shared.mirror import Mirror
from gateway.metrics.control import ControlCollector
from gateway.metrics.forecasts import CalibrationCollector, LengthCollector
from gateway.metrics.learned import MacroStateCollector
from gateway.metrics.load import LoadCollector
from gateway.metrics.passwords import HashingCollector
from gateway.metrics.registry import Metrics
from gateway.pools.catalogue import Catalogue, Chain
from gateway.pools.chain_walk import ChainWalk, OnPassed, nothing_passed
from gateway.pools.control_loop import EVERY_S as CONTROL_EVERY_S
from gateway.pools.control_loop import ControlLoop, setters_of
from gateway.pools.fleet import Fleet
from gateway.pools.learned_actions import own_numbers
from gateway.pools.live_counters import GatewayNow, counters_of
from gateway.pools.members import Members
from gateway.pools.pool import Lifecycles, ModelPool, PoolSpec, pools_of
from gateway.pools.request_actions import RequestActions
from gateway.pools.waiting import WaitingHere, waiting_here
from gateway.quotes.offered import offered
from gateway.quotes.quotes import Quotes, Wanted
from gateway.records.access_recorder import AccessRecorder
from gateway.records.calibration_recorder import CalibrationRecorder
from gateway.records.key_use_recorder import KeyUseRecorder
from gateway.records.move_recorder import MoveRecorder
from gateway.records.refusal_recorder import RefusalRecorder
from gateway.records.usage_check import UsageCheck
from gateway.requests.inputs.large_bodies import LargeBodies
from gateway.requests.lifecycle import Lifecycle, LifecycleLimits
from gateway.upstream.base import Upstream, takes_turns
from tenants.directory.gateways import GatewaySeen, IdentityTaken
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.ledger.digests import LedgerDigests
from tenants.pricing.redeemed_quotes import RedeemedQuotes
from tenants.quota.store import QuotaStoreUnavailable
from tenants.storage.task_stop import stop
from tenants.types import Tier

SAVE_LENGTHS_EVERY_S = 30.0
MAX_FREE_BUCKETS = 10_000
RECOVERY_RETRY_S = 2.0
PURGE_EVERY_S = 60.0
LAG_EVERY_S = 0.02
PACE_EVERY_S = 0.05
SHARES_EVERY_S = 1.0

log = logging.getLogger("fairgate.gateway")
T = TypeVar("T")


def _fairness_note(spec: PoolSpec) -> str:
    if not spec.is_foreign:
        return ""
    return "; token-fair" if spec.is_token_fair else "; fair at dispatch only"


class Gateway:
    """One gateway process's own state; `deps` is shared with others."""

    def __init__(self, deps: GatewayDeps) -> None:
        """Raises `UnknownPolicy`."""
        config = deps.config
        self.policy = ActivePolicy(deps, lambda: self.pools.values(), lambda: self.controls.values())
        self.brakes = ActiveBrakes(deps, lambda: self.pools.values(), lambda: self.controls)
        self.drains = ActiveDrains(deps, lambda: self.pools.values())
        self.directory = ActiveDirectory(deps, lambda: self.lifecycle, self._follow_others)
        self.deps = deps
        self.recovery: RecoveryReport | None = None
        """What the start found of an earlier life; None: not started."""
        self.metrics = Metrics()
        self.liveness = Liveness(deps.gateway_id, config.gateway_stale_s, deps.clock)
        self.limit_events = LimitAlerts(deps.database, self.metrics, deps.wall_clock)
        self.refusals = RefusalRecorder(deps.database, self.metrics, deps.wall_clock)
        self.accesses = AccessRecorder(deps.admin.transactions, self.metrics.registry, deps.wall_clock)
        deps.way_in.tell = self.accesses.log_in
        self.key_uses = KeyUseRecorder(deps.database, deps.wall_clock)
        self.usage_check = UsageCheck(deps.admin.usage.verify, deps.wall_clock)
        self.moves = MoveRecorder(deps.database, self.metrics.registry, deps.gateway_id, deps.wall_clock)
        self.calibration = CalibrationRecorder(deps.database, deps.wall_clock)
        self._replica_counts: list[Callable[[], None]] = []
        self.timelines = TimelineWriter(
            deps.database,
            self.metrics.registry,
            deps.wall_clock,
            retention_s=config.timeline_retention_s,
            max_rows=config.max_timelines,
        )
        self.usage = UsageFolder(deps.database, self.metrics.registry, deps.wall_clock)
        self.audit = AuditCheckpoints(
            deps.audit,
            self.metrics.registry,
            deps.wall_clock,
            rows=config.audit_checkpoint_rows,
            seconds=config.audit_checkpoint_s,
            verify_s=config.audit_verify_s,
            digests=LedgerDigests(deps.database, deps.wall_clock, config.audit_ledger_s),
        )
        self.slo = SloMonitor(
            deps.database, self.metrics.registry, deps.wall_clock, lambda: deps.directory.revision
        )
        self.minutes = MinuteWriter(deps.database, deps.gateway_id, self.metrics.registry, deps.wall_clock)
        self.holds = Holds(
            deps.ledger,
            deps.quota_store,
            deps.gateway_id,
            lease_ttl_s=config.lease_ttl_s,
            wall_clock=deps.wall_clock,
            all_limits=lambda: deps.directory.limits(deps.wall_clock()),
            require_presence=self.liveness.require,
            on_granted=self.limit_events.note,
        )
        lengths = deps.lengths if deps.lengths is not None else load_lengths(config.data_dir)
        self.lengths = lengths
        self.replays = ReplayProcess()
        self.pools = {name: self._make_pool(spec) for name, spec in pools_of(deps.pools).items()}
        self.catalogue = Catalogue(list(self.pools), deps.aliases)
        self.pool = next(iter(self.pools.values()))
        """The model of our own engine, or the first one."""
        self.flow, self.dispatcher, self.estimates = self.pool.flow, self.pool.dispatcher, self.pool.estimates
        self.lifecycle = Lifecycles(self.pools, self.pool.name)
        self.request_actions = RequestActions(self.lifecycle, deps.clock, self._counters, self._waiting)
        self.fleet = Fleet(
            deps.gateway_id, self.request_actions, deps.peer_requests, deps.registry, config.gateway_stale_s
        )
        self.idempotency = IdempotencyKeys(deps)
        self.large_bodies = LargeBodies(config.large_bodies_bytes)
        self._redeemed = RedeemedQuotes(deps.database)
        self.quotes = Quotes(
            deps.quote_secret,
            valid_s=config.quote_valid_s,
            wall_clock=deps.wall_clock,
            prices_at=deps.directory.prices_at,
            redeemed=self._redeemed,
        )
        for collector in (
            LoadCollector(
                lambda: [pool.flow for pool in self.pools.values()],
                lambda: [upstream for pool in self.pools.values() for upstream in pool.spec.upstreams],
                pending=lambda: self.holds.pending,
                overdue=lambda: self.holds.overdue,
                is_local=lambda: self.holds.is_local,
                share_lags=self._share_lags,
                drift=lambda: None if (last := self.usage_check.last) is None else len(last.problems),
            ),
            deps.database.latency,
            HashingCollector(deps.way_in.gate),
            CalibrationCollector(self._calibrations),
            LengthCollector(self.lengths, self._probes),
            MacroStateCollector(
                lambda: {name: control.learned.switch for name, control in self.controls.items()}
            ),
            ControlCollector(lambda: {name: control.figures() for name, control in self.controls.items()}),
        ):
            self.metrics.registry.register(collector)
        if deps.tracer is not None:
            self.metrics.registry.register(deps.tracer)
        if deps.quota_store.latency is not None:
            self.metrics.registry.register(deps.quota_store.latency)
        for name, calibration in load_calibrations(config.data_dir).items():
            if name in self.pools:
                self.pools[name].estimates.calibration = calibration
        deps.quota_store.spare.cover(self.pools)
        self.controls = {name: self._make_control(name, pool) for name, pool in self.pools.items()}
        self.shares = {name: ShareMeter() for name in self.pools}
        for pool in self.pools.values():
            pool.estimates.forecast_cache.promised = partial(self._promised, pool.name)
        self.webhooks = WebhookSender(
            deps.database,
            deps.admin.webhooks.secret,
            deps.gateway_id,
            self.metrics.registry,
            deps.wall_clock,
            timeout_s=config.webhook_timeout_s,
            allows_private=config.webhook_private,
        )
        self.alerts = AlertEvaluator(
            deps.database,
            AlertFigures(
                deps,
                self.fleet.now,
                holds_overdue=lambda: self.holds.overdue,
                audit_complaint=lambda: self.audit.complaint,
            ),
            deps.gateway_id,
            self.metrics.registry,
            deps.wall_clock,
            every_s=config.alert_every_s,
            base_url=config.console_url,
        )
        self.progress = ProgressWriter(
            deps.progress,
            deps.gateway_id,
            self.holds,
            lambda: [pool.spec for pool in self.pools.values()],
            deps.wall_clock,
        )
        self._free_buckets: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()
        """By tenant and kind of uncharged call: level, and its time."""
        self._tasks: list[asyncio.Task[None]] = []
        self.is_taken = asyncio.Event()
        """Set when another process serves under this gateway's id: this one must stop (`taken` says why)."""
        self.taken: IdentityTaken | None = None
        self._rival: RivalWatch | None = None
        self._dead: list[GatewaySeen] = []
        self._adopting: dict[str, asyncio.Task[None]] = {}
        self._engine_changed = asyncio.Event()
        self._saved_at_observation = 0

    def switch_estimates(self) -> bool:
        """Toggles estimates until the next start; returns whether they are on."""
        is_enabled = not self.estimates.is_enabled
        for pool in self.pools.values():
            pool.estimates.is_enabled = is_enabled
        return is_enabled

    def _make_pool(self, spec: PoolSpec) -> ModelPool:
        deps = self.deps
        config = deps.config
        sharing = deps.sharing if deps.sharing is not None and deps.sharing.shares(spec.upstreams) else None
        flow = (FlowController if sharing is None else Mirror)(
            make_policy(config.policy, config.policy_options).order,
            ServiceCounters(),
            config.queue_settings(),
            PrefixRouter() if len(spec.upstreams) > 1 or spec.upstreams.may_change else Scorer(),
        )
        shared = (
            sharing.open(spec.name, flow, config, deps.clock)
            if sharing is not None and isinstance(flow, Mirror)
            else None
        )
        dispatcher = Dispatcher(
            flow, spec.upstreams, deps.clock, engine_grace_s=config.engine_grace_s, state=shared
        )
        estimates = Estimator(
            flow=flow,
            upstreams=spec.upstreams,
            lengths=self.lengths,
            prices=deps.prices,
            model=spec.name,
            cache_s=config.estimate_cache_s,
            is_enabled=config.estimates,
            note=_fairness_note(spec),
            submit=self.replays.submit,
        )
        admission = Admission(
            lambda tenant_id, tier: self.slo.book.targets_s(tenant_id, tier),
            self.slo.refused,
            config.admission,
        )
        # Half a second more than other gateways take to report, so that a full second is complete.
        meter = FlowMeter(spec.name, lag_s=0.0 if shared is None else KNOWN_AFTER_S + 0.5)
        self.minutes.flows[spec.name], self.minutes.engines[spec.name] = meter, EngineMeter(spec.name)
        recorder = RequestRecorder(
            spec.name,
            self.timelines,
            self.slo,
            lambda request_id: self.lifecycle.find(request_id),
            # The step times of other servers are unknown.
            (lambda: None)
            if spec.is_foreign
            else machine_of(dispatcher, lambda: len(spec.upstreams), lambda: estimates.step_time),
            admission=admission,
            meter=meter,
            describer=Describer(
                deps.gateway_id,
                spec.name,
                spec.upstreams,
                config,
                lambda: self.policy.now,
                is_foreign=spec.is_foreign,
            ),
            wall_clock=deps.wall_clock,
            tracer=deps.tracer,
            calibration=self.calibration,
        )
        if shared is not None:
            load = recorder.share_load(deps.gateway_id, deps.instance.instance_id, deps.clock)
            shared.load.tell, shared.load.told = load.tell, load.told
            shared.load.hear, shared.load.heard = load.hear, load.forget_silent
        count_replicas = partial(self._count_replicas, spec, recorder)
        self._replica_counts.append(count_replicas)
        spec.upstreams.each(lambda upstream: upstream.watch(count_replicas))
        lifecycle = Lifecycle(
            observer=recorder,
            admission=admission,
            elsewhere=lambda call: self.lifecycle.of(call),
            standings=deps.directory,
            traces=None if deps.tracer is None else deps.tracer.rule,
            holds=self.holds,
            dispatcher=dispatcher,
            estimates=estimates,
            prices=deps.prices,
            metrics=self.metrics,
            clock=deps.clock,
            wall_clock=deps.wall_clock,
            limits=LifecycleLimits(
                reserve_quantile=config.reserve_quantile,
                outcome_wait_s=config.outcome_wait_s,
                settle_wait_s=config.settle_wait_s,
                hold_wait_s=config.hold_wait_s,
                accounts_wait_s=config.accounts_wait_s,
                slow_reader_s=config.slow_reader_s,
                moves=config.moves,
                max_buffered_events=config.max_buffered_events,
                max_buffered_bytes=config.max_buffered_bytes,
                max_fed_waiting=config.max_queued_per_tenant,
                feed_wait_s=config.queue_ttl_s,
                tell_after_s=config.tell_after_s,
                quote_credit_share=config.quote_credit_share,
                quote_credit_usd=config.quote_credit_usd,
            ),
        )
        pool = ModelPool(spec, flow, dispatcher, estimates, lifecycle)
        if not config.long_tokens:
            pool.fit_lanes()
            spec.upstreams.each(lambda upstream: upstream.watch(pool.fit_lanes))
        return pool

    def _make_control(self, name: str, pool: ModelPool) -> ControlLoop:
        config, lifecycle = self.deps.config, pool.lifecycle

        def own_rests() -> dict[Knob, float]:
            return {Knob.ADMISSION: config.admission, **own_numbers(self.policy.now)}

        return ControlLoop(
            config.control,
            name,
            pool.flow,
            pool.spec.upstreams,
            self.lengths,
            setters_of(
                pool.flow,
                lifecycle,
                lambda: [upstream for upstream in pool.spec.upstreams if upstream in self.deps.upstreams],
                has_engines=pool.spec.upstreams.may_change
                or any(upstream in self.deps.upstreams for upstream in pool.spec.upstreams),
                is_foreign=pool.spec.is_foreign,
                own_rests=own_rests,
                quota=partial(self.deps.quota_store.spare.set, name),
            ),
            rests={Knob.RESERVE_QUANTILE: config.reserve_quantile, **own_rests()},
            own_rests=own_rests,
            arrivals_per_s=pool.estimates.forecast_cache.arrivals_per_s,
            attainment=lambda: self.slo.pools[name].attainment.value,
            prefix_hits=lambda: lifecycle.prefix_hits.value,
            expected_late=lambda now_s: lifecycle.admission.expected_late.at(now_s),
            in_good_time=lambda now_s: lifecycle.admission.in_good_time.at(now_s),
            feed=None if self.deps.sharing is None else self.deps.sharing.control(pool.flow),
            on_moves=partial(self.moves.note, name),
            may_lend=lambda: self.deps.directory.has_ceilings,
        )

    def _count_replicas(self, spec: PoolSpec, recorder: RequestRecorder) -> None:
        recorder.serving(self.deps.clock(), sum(takes_turns(upstream) for upstream in spec.upstreams))

    # ------------------------------------------------------------ start and stop

    async def _follow_others(self) -> None:
        """Drains and targets, as of the directory's revision. Raises `DatabaseUnavailable`."""
        await self.drains.follow()
        await self.slo.refresh()

    async def start(self) -> None:
        """Recovers what an earlier process left, then opens; without the store nothing is admitted. Raises
        `DatabaseUnavailable`, and `Invalid` if another gateway of this database would count separately."""
        # What was created a moment ago (the owner's key, at the first start) works for the first request.
        await self.deps.directory.refresh()
        seen = await self._beat(takes_over=True)
        others = [row for row in seen if row.gateway_id != self.deps.gateway_id]
        await self.directory.follow()
        await self._prepare_counters(others)
        self.holds.start()
        self.progress.start()
        self.limit_events.start()
        for recorder in (self.refusals, self.key_uses, self.moves, self.calibration, self.accesses):
            recorder.start()
        self.accesses.of_server("server.start", self.deps.gateway_id)
        self.timelines.start()
        self.usage.start()
        self.audit.start()
        self.alerts.start()
        self.webhooks.start()
        await self.slo.refresh()
        self.slo.start()
        self._sample_shares()
        self.minutes.start()
        for count_replicas in self._replica_counts:
            count_replicas()
        # Before this gateway joins a shared queue: the brakes that it reports apply to all.
        await self.brakes.start()
        await self.drains.follow()
        for pool in self.pools.values():
            pool.dispatcher.start()
        await self.policy.start()
        if self.deps.peer_requests is not None:
            self.deps.peer_requests.start(self.request_actions.act)
        self.deps.upstreams.each(lambda upstream: upstream.watch(self._engine_changed.set))
        # What one has left open is settled without it.
        self.deps.upstreams.on_left(lambda upstream: self._engine_changed.set())
        work = {
            "lengths": every(SAVE_LENGTHS_EVERY_S, self._save_lengths, log, "the lengths were not saved"),
            "recovery": self._keep_recovered(),
            "lag": watch_lag(LAG_EVERY_S, self._note_lag),
            "pace": every(PACE_EVERY_S, self._watch_forecasts, log, "the forecasts were not renewed"),
            "control": every(
                CONTROL_EVERY_S, self._control_pools, log, "the control loop failed; it goes on"
            ),
            "shares": every(SHARES_EVERY_S, self._sample_shares, log, "the shares were not sampled"),
            "presence": every(
                self.deps.config.beat_s, self._live, log, "the heartbeat failed; it goes on", starts_now=True
            ),
            "directory": self.directory.run(),
            "policy": every(FOLLOW_EVERY_S, self.policy.follow, log, "the stored policy was not read"),
            "drains": every(FOLLOW_EVERY_S, self._leave_drained, log, "what runs at drained replicas stayed"),
            "brakes": every(FOLLOW_EVERY_S, self.brakes.follow, log, "the stored brakes were not read"),
            **({} if self.deps.members is None else {"members": self._follow_members(self.deps.members)}),
            "idempotency": every(PURGE_EVERY_S, self._purge, log, "the purge failed; it goes on"),
        }
        self._tasks = [asyncio.create_task(task, name=f"gateway {name}") for name, task in work.items()]

    async def _follow_members(self, members: Members) -> None:
        async def prepare(upstream: Upstream) -> None:
            for name, pool in self.pools.items():
                if upstream in pool.spec.upstreams:
                    self.drains.tell(name, upstream)
                    self.controls[name].repeat()
            self.brakes.tell(upstream)
            await self.policy.tell(upstream)

        members.prepare = prepare
        await members.run()

    async def stop(self) -> None:
        """Drains: running requests may end, waiting ones are refused, everything settles."""
        await self.lifecycle.close(self.deps.config.shutdown_grace_s)
        if self.deps.peer_requests is not None:
            await self.deps.peer_requests.close()
        for control in self.controls.values():
            await control.leave()
        for pool in self.pools.values():
            await pool.dispatcher.close()
        await self.holds.close(self.deps.config.settle_wait_s)
        await self.progress.close()
        await self.limit_events.close()
        self.accesses.of_server("server.stop", self.deps.gateway_id)
        for recorder in (self.refusals, self.key_uses, self.moves, self.calibration, self.accesses):
            await recorder.close()
        await self.timelines.close()
        await self.usage.close()
        await self.audit.close()
        await self.alerts.close()
        await self.webhooks.close()
        await self.slo.close()
        await self.replays.close()
        if self.deps.tracer is not None:
            await asyncio.to_thread(self.deps.tracer.close)
        self.deps.way_in.close()
        self._sample_shares()
        await self.minutes.close()
        await stop([*self._tasks, *self._adopting.values()])
        await self._save_lengths()
        with contextlib.suppress(DatabaseUnavailable):
            if not await self.deps.ledger.open_requests(self.deps.gateway_id, most=1):
                await self.deps.registry.forget(self.deps.gateway_id, instance=self.deps.instance)

    async def _prepare_counters(self, others: list[GatewaySeen]) -> None:
        """Rebuilds the counters and settles an earlier life's requests; both later if Redis is not ready."""
        deps = self.deps
        if deps.rebuild_counters:
            for row in others:
                if row.silent_s <= deps.config.gateway_stale_s:
                    raise Invalid(
                        "redis_url",
                        f"gateway {row.gateway_id} {row.address} serves this database, and each would count"
                        " limits for itself: stop it, or give both the same Redis",
                    )
        try:
            # First: while this one is not ready, what it writes keeps the record.
            self.progress.earlier = await deps.progress.read(deps.gateway_id)
            await self.holds.fill(is_new=deps.rebuild_counters)
            self.recovery = await recovery.recover(deps, self.progress.earlier)
            self._forget_earlier(self.recovery)
        except QuotaStoreUnavailable as error:
            log.warning("the quota store is not ready, nothing is admitted yet: %s", error)
            self.recovery = RecoveryReport()
            self._engine_changed.set()

    def _forget_earlier(self, report: RecoveryReport) -> None:
        if not report.left_open and report.open_reserves < recovery.PAGE:
            self.progress.earlier = None

    async def _beat(self, *, takes_over: bool = False) -> list[GatewaySeen]:
        """One heartbeat; returns every gateway that the database knows. Raises `IdentityTaken`."""
        deps, asked_s = self.deps, self.deps.clock()
        seen = await deps.registry.beat(
            deps.gateway_id, deps.address, deps.engine_names(), deps.instance, takes_over=takes_over
        )
        self._rival = None
        self._dead = self.liveness.beaten(asked_s, seen)
        return seen

    async def _live(self) -> None:
        if self.is_taken.is_set():
            return
        try:
            await self._beat()
        except IdentityTaken as error:
            await self._watch_rival(error)
            return
        except DatabaseUnavailable as error:
            log.warning("no heartbeat could be written: %s", error)
            return
        for dead in self._dead:
            if dead.gateway_id not in self._adopting:
                self._adopting[dead.gateway_id] = asyncio.create_task(
                    self._adopt(dead), name=f"adopt {dead.gateway_id}"
                )

    async def _watch_rival(self, error: IdentityTaken) -> None:
        """Another process has written this gateway's heartbeat. While it is watched this one writes none, so
        after a while it starts no waiting request."""
        self._rival = self._rival or RivalWatch(self.deps.config.beat_s)
        match self._rival.look(error.taken_by, self.deps.clock()):
            case "lives":
                log.error("%s", error)
                self.taken = error
                self.is_taken.set()
            case "still":
                await self._beat(takes_over=True)

    async def _adopt(self, dead: GatewaySeen) -> None:
        """Runs beside the heartbeat: engines may take time to answer."""
        try:
            await recovery.adopt(self.deps, dead, self.deps.config.gateway_stale_s, self.holds.live)
        except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
            log.warning("gateway %s is adopted later: %s", dead.gateway_id, type(error).__name__)
        except Exception:
            log.exception("gateway %s could not be adopted; it is tried again", dead.gateway_id)
        finally:
            del self._adopting[dead.gateway_id]

    def _leave_drained(self) -> None:
        for pool in self.pools.values():
            for upstream in pool.spec.upstreams:
                if upstream.is_drained:
                    pool.lifecycle.move_off(upstream)

    def _watch_forecasts(self) -> None:
        for pool in self.pools.values():
            try:
                pool.estimates.watch(self.deps.clock())
            except Exception:
                log.exception("the forecasts of %s were not renewed; they go on", pool.name)

    async def _control_pools(self) -> None:
        await asyncio.gather(*map(self._control_pool, self.controls.values()))

    async def _control_pool(self, control: ControlLoop) -> None:
        try:
            await control.turn(self.deps.clock())
        except Exception:
            log.exception("the control loop failed; it goes on")

    def _note_lag(self, lag_s: float) -> None:
        self.metrics.event_loop_lag.observe(lag_s)
        self.metrics.recent_lag.note(lag_s)

    def _counters(self) -> GatewayNow:
        deps, lag_s = self.deps, self.metrics.recent_lag.most_s
        now_s, flows = deps.clock(), self.minutes.flows
        return counters_of(deps.gateway_id, deps.address, now_s, self.pools, self.shares, flows, lag_s)

    def _waiting(self, tenant_ids: Collection[str] | None, tier: str) -> WaitingHere:
        return waiting_here(self.deps.gateway_id, self.pools, tenant_ids, tier, self.deps.clock())

    def _sample_shares(self) -> None:
        now_s, wall_s = self.deps.clock(), self.deps.wall_clock()
        for name, pool in self.pools.items():
            had = self.shares[name].sample(now_s, pool.flow.tenants.all())
            self.minutes.flows[name].sample(now_s, wall_s, had, pool.flow.queue.waiting_costs())
            self.minutes.engines[name].sample(now_s, wall_s, pool.spec.upstreams)

    async def _purge(self) -> None:
        with contextlib.suppress(DatabaseUnavailable):
            await self.idempotency.purge()
            await self._redeemed.purge(round(self.deps.wall_clock() * 1e6))

    async def _save_lengths(self) -> None:
        data_dir = self.deps.config.data_dir
        observed = sum(pool.estimates.observed for pool in self.pools.values())
        if data_dir is None or observed == self._saved_at_observation:
            return
        text = json.dumps(self.lengths.to_dict())
        try:
            await asyncio.to_thread(save_lengths, data_dir, text)
            await asyncio.to_thread(save_calibrations, data_dir, as_text(self._calibrations()))
            self._saved_at_observation = observed
        except OSError as error:
            log.warning("the length forecast could not be saved: %s", error.strerror)

    def _share_lags(self) -> dict[tuple[str, int], float]:
        return {
            (name, rank): tokens
            for name, meter in self.shares.items()
            for rank, tokens in meter.lags().items()
        }

    def _probes(self) -> dict[tuple[str, str], ProbeReport]:
        return {
            (name, upstream.replica_id): snapshot.length_probe
            for name, pool in self.pools.items()
            for upstream in pool.spec.upstreams
            if (snapshot := upstream.snapshot) is not None and snapshot.length_probe.state == "on"
        }

    async def _keep_recovered(self) -> None:
        """Settles outcomes that a reconnected engine still holds."""
        while True:
            await self._engine_changed.wait()
            self._engine_changed.clear()
            if self.deps.upstreams and not any(upstream.is_up for upstream in self.deps.upstreams):
                continue
            try:
                self._forget_earlier(await recovery.sweep(self.deps, self.holds.live, self.progress.earlier))
            except Exception as error:
                log.warning("recovery is tried again: %s", type(error).__name__)
                await asyncio.sleep(RECOVERY_RETRY_S)
                self._engine_changed.set()

    # ------------------------------------------------------------ for routes

    def served(self, name: str, request_id: str) -> ServedModel:
        """Raises `ApiError`: 404 for an unknown name, 503 before any replica has announced itself."""
        # Drawn from the id, so that a repeated call for one request gives the same answer.
        draw = zlib.crc32(request_id.encode()) / 2**32
        try:
            pool = self.catalogue.choose(name, draw, lambda target: self.pools[target].has_engine)
        except KeyError:
            raise errors.model_not_found(name=name) from None
        return self.pools[pool].served(name)

    def walk(
        self,
        name: str,
        chain: Chain,
        tiers: Sequence[Tier],
        parse: Callable[[ServedModel], Awaitable[T]],
        *,
        only: str | None = None,
        on_passed: OnPassed = nothing_passed,
    ) -> ChainWalk[T]:
        async def parsed(pool: str) -> T:
            return await parse(replace(self.pools[pool].served(pool), asked=name))

        return ChainWalk(
            name,
            chain,
            tiers,
            self.deps.prices(),
            parse=parsed,
            has_engine=lambda pool: self.pools[pool].has_engine,
            on_passed=on_passed,
            only=only,
        )

    def capabilities(self, name: str) -> list[str]:
        """Words of `Capability` that some server of the model has. Raises `KeyError`."""
        pools = [self.pools[pool] for pool, weight in self.catalogue.targets(name) if weight]
        return sorted(
            {
                word
                for pool in pools
                for upstream in pool.spec.upstreams
                for word in upstream.capabilities.words
            }
        )

    def largest_body(self, models: Collection[str] | None) -> int:
        """In bytes, over these model names (None: all)."""
        ordinary = self.deps.config.max_body_bytes
        names = self.catalogue.names() if models is None else set(models).intersection(self.catalogue.names())
        pools = {pool for name in names for pool, _ in self.catalogue.targets(name)}
        return max((self.pools[pool].body_limit(ordinary) for pool in pools), default=ordinary)

    def require_body(self, pool: str, body_bytes: int, image_bytes: int) -> None:
        """Raises `ApiError` (413) for a body that is too large for the pool, or has too much text."""
        ordinary = self.deps.config.max_body_bytes
        if body_bytes <= ordinary:
            return
        most = self.pools[pool].body_limit(ordinary)
        if body_bytes > most:
            raise errors.body_too_large(max_body_bytes=most)
        if body_bytes - image_bytes > ordinary:
            raise errors.text_too_large(max_text_bytes=ordinary)

    def context_tokens(self, name: str) -> int | None:
        """The context every model of a name accepts; a chain's longest. None: unknown. Raises `KeyError`."""
        context_sizes = [
            self.pools[pool].context_tokens for pool, weight in self.catalogue.targets(name) if weight
        ]
        known = [tokens for tokens in context_sizes if tokens is not None]
        if self.catalogue.chain(name) is not None:
            return max(known, default=None)
        return min(known) if len(known) == len(context_sizes) else None

    @property
    def has_engine(self) -> bool:
        return any(pool.has_engine for pool in self.pools.values())

    def require_engine(self, pool: str) -> None:
        """Raises `NoEngineAvailable` if no replica of the pool serves now."""
        if not self.pools[pool].has_engine:
            raise self.pools[pool].dispatcher.no_engine()

    async def ready(self, call: Call, token: str | None) -> Call:
        """The call for a pool that serves now. Raises `ApiError`, `NoEngineAvailable`, `NoneTook`."""
        if call.chained is None:
            self.require_engine(call.pool)
        elif not self.pools[call.pool].has_engine:
            call = await call.chained.onward(self.pools[call.pool].dispatcher.no_engine())
        return call if token is None else await self._bound(call, token)

    async def _bound(self, call: Call, token: str) -> Call:
        try:
            binding = await self.quotes.redeem(token, call)
        except DatabaseUnavailable as error:
            raise as_api_error(error, call.request_id) from error
        return replace(call, tier=Tier(binding.quote.tier), binding=binding)

    def quotes_instead(self, call: Call, tiers: Sequence[Tier]) -> dict[str, Any]:
        """Quotes of `tiers` for a refusal; redeemable if the key has the scope and room for more."""
        principal, pool = call.principal, self.pools[call.pool or self.pool.name]
        if not tiers or not pool.estimates.is_enabled:
            return {}
        quotes: Quotes | None = self.quotes
        try:
            if "quote" not in principal.scopes:
                quotes = None
            else:
                self.take_quote(principal.tenant_id)
        except ApiError:
            quotes = None
        wanted = Wanted(call.model, pool.name, call.prompts, False, call.choices, call.max_tokens)
        version, now_s = self.deps.prices().version, self.deps.clock()
        made = offered(pool.estimates, quotes, principal, wanted, tiers, version, now_s)
        expires_s = None if quotes is None else round(self.deps.wall_clock() + quotes.valid_s, 3)
        return {"quotes": made, "expires_at": expires_s}

    def _calibrations(self) -> dict[str, Calibration]:
        return {name: pool.estimates.calibration for name, pool in self.pools.items()}

    def _promised(self, pool: str, _now_s: float, tenant_id: str | None) -> list[QueueEntry]:
        return self.quotes.promised(pool, tenant_id)

    def take_quote(self, tenant_id: str) -> None:
        """Counts one quote against the tenant's rate. Raises `ApiError` (429)."""
        self.quotes.require_room(tenant_id)
        self._take("quotes", self.deps.config.quotes_per_s, tenant_id)

    def take_token_call(self, tenant_id: str) -> None:
        """Counts one tokenizer call against the tenant's rate. Raises `ApiError` (429)."""
        self._take("tokenizer answers", self.deps.config.token_calls_per_s, tenant_id)

    def _take(self, what: str, rate: float, tenant_id: str) -> None:
        burst = 2 * rate
        now_s = self.deps.clock()
        level, at_s = self._free_buckets.pop((what, tenant_id), (burst, now_s))
        level = min(burst, level + (now_s - at_s) * rate)
        allowed = level >= 1
        self._free_buckets[what, tenant_id] = (level - 1 if allowed else level, now_s)
        if len(self._free_buckets) > MAX_FREE_BUCKETS:
            self._free_buckets.popitem(last=False)
        if not allowed:
            raise errors.rate_limited(
                f"A tenant may ask for {rate:g} {what} per second.", "requests", (1 - level) / rate
            )
