"""Builds a pool from its spec and the settings, and the Prometheus collectors of all pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prometheus_client.registry import Collector

from engine.forecast.length.length import LengthForecast
from engine.messages import ProbeReport
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.policy import make_policy
from gateway.budget.holds import Holds
from gateway.deps import GatewayDeps
from gateway.dispatch.admission import Admission
from gateway.dispatch.dispatcher import Dispatcher
from gateway.estimates.estimator import Estimator
from gateway.estimates.persistence import LearnedFiles
from gateway.estimates.replay_process import ReplayProcess
from gateway.explain.describer import Describer
from gateway.explain.load_log import LoadLog
from gateway.explain.minutes.engine_meter import EngineMeter
from gateway.explain.minutes.flow_meter import FlowMeter
from gateway.explain.minutes.writer import MinuteWriter
from gateway.explain.pool_load import KNOWN_AFTER_S, PoolLoadShare
from gateway.explain.recorder import RequestRecorder, machine_of
from gateway.explain.slo_monitor import PoolLoad, SloMonitor
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
from gateway.metrics.registry import Metrics
from gateway.pools.control_loop import ControlLoop, Signals, setters_of
from gateway.pools.learned_actions import own_numbers
from gateway.pools.pool import ModelPool, PoolMeters, Pools, PoolSpec
from gateway.quotes.quotes import Quotes
from gateway.records.calibration_recorder import CalibrationRecorder
from gateway.records.move_recorder import MoveRecorder
from gateway.records.usage_check import UsageCheck
from gateway.requests.lifecycle import Lifecycle
from gateway.upstream.base import takes_turns
from tenants.admin.platform.policy import StoredPolicy


class PoolBuilder:
    """Pools share what is built here once: forecasts, their process, and what is written of all."""

    def __init__(
        self,
        deps: GatewayDeps,
        metrics: Metrics,
        holds: Holds,
        slo: SloMonitor,
        timelines: TimelineWriter,
        quotes: Quotes,
        pools: Pools,
        policy: Callable[[], StoredPolicy],
    ) -> None:
        """`pools`: all of them; `policy`: the active one."""
        self.files = LearnedFiles(deps.config.data_dir)
        self.lengths = self.files.lengths() if deps.lengths is None else deps.lengths
        self.replays = ReplayProcess()
        self.moves = MoveRecorder(deps)
        self.calibration = CalibrationRecorder(deps)
        self.minutes = MinuteWriter(deps)
        self._deps = deps
        self._metrics = metrics
        self._holds = holds
        self._slo = slo
        self._timelines = timelines
        self._quotes = quotes
        self._pools = pools
        self._policy = policy
        self._calibrations = self.files.calibrations()

    def build(self, spec: PoolSpec) -> ModelPool:
        """Raises `UnknownPolicy`."""
        deps, config = self._deps, self._deps.config
        sharing = deps.sharing if deps.sharing is not None and deps.sharing.shares(spec.upstreams) else None
        flow = self._flow(spec, is_shared=sharing is not None)
        # Half a second more than other gateways take to report, so that a full second is complete.
        meter = FlowMeter(spec.name, lag_s=0.0 if sharing is None else KNOWN_AFTER_S + 0.5)
        meters = PoolMeters(meter, EngineMeter(spec.name))
        self.minutes.flows[spec.name], self.minutes.engines[spec.name] = meter, meters.engines
        load_log, reports, shared = LoadLog(), None, None
        if sharing is not None and isinstance(flow, Mirror):
            reports = PoolLoadShare(deps.gateway_id, deps.instance.instance_id, load_log, meter)
            shared = sharing.open(deps, spec.name, flow, reports)
        dispatcher = Dispatcher(
            flow, spec.upstreams, deps.clock, engine_grace_s=config.engine_grace_s, state=shared
        )
        estimates = self._estimates(spec, flow)
        # The step times of other servers are unknown.
        machine = machine_of(dispatcher, spec.upstreams.__len__, lambda: estimates.step_time)
        load = PoolLoad((lambda: None) if spec.is_foreign else machine, load_log, meter, reports, deps.clock)
        admission = Admission(
            lambda tenant_id, tier: self._slo.book.targets_s(tenant_id, tier),
            self._slo.refused,
            config.admission,
        )
        recorder = RequestRecorder(
            deps,
            spec.name,
            self._timelines,
            self._slo,
            load,
            self._pools.find,
            admission,
            Describer(deps, spec.name, spec.upstreams, self._policy, is_foreign=spec.is_foreign),
            self.calibration,
            deps.tracer,
        )
        lifecycle = Lifecycle(
            deps,
            self._holds,
            dispatcher,
            estimates,
            self._metrics,
            observer=recorder,
            admission=admission,
            elsewhere=self._pools.lifecycle_of,
            standings=deps.directory,
        )
        control = self._control(spec, flow, estimates, lifecycle, load)
        pool = ModelPool(spec, flow, dispatcher, estimates, lifecycle, control, meters)

        def count_replicas() -> None:
            recorder.serving(deps.clock(), sum(map(takes_turns, spec.upstreams)))

        count_replicas()
        spec.upstreams.each(lambda upstream: upstream.watch(count_replicas))
        if not config.long_tokens:
            pool.fit_lanes()
            spec.upstreams.each(lambda upstream: upstream.watch(pool.fit_lanes))
        return pool

    def _flow(self, spec: PoolSpec, *, is_shared: bool) -> FlowController:
        config = self._deps.config
        return (Mirror if is_shared else FlowController)(
            make_policy(config.policy, config.policy_options).order,
            ServiceCounters(),
            config.queue_settings(),
            PrefixRouter() if len(spec.upstreams) > 1 or spec.upstreams.may_change else Scorer(),
        )

    def _estimates(self, spec: PoolSpec, flow: FlowController) -> Estimator:
        fairness = "token-fair" if spec.is_token_fair else "fair at dispatch only"
        estimates = Estimator(
            flow=flow,
            upstreams=spec.upstreams,
            lengths=self.lengths,
            prices=self._deps.prices,
            model=spec.name,
            cache_s=self._deps.config.estimate_cache_s,
            note=f"; {fairness}" if spec.is_foreign else "",
            submit=self.replays.submit,
            promised=partial(self._quotes.promised, spec.name),
        )
        estimates.is_enabled = self._deps.config.estimates
        estimates.calibration = self._calibrations.get(spec.name, estimates.calibration)
        return estimates

    def _control(
        self, spec: PoolSpec, flow: FlowController, estimates: Estimator, lifecycle: Lifecycle, load: PoolLoad
    ) -> ControlLoop:
        deps, config, admission = self._deps, self._deps.config, lifecycle.admission

        def rests() -> dict[Knob, float]:
            return {
                Knob.RESERVE_QUANTILE: config.reserve_quantile,
                Knob.ADMISSION: config.admission,
                **own_numbers(self._policy()),
            }

        def signals(now_s: float) -> Signals:
            return Signals(
                estimates.forecast_cache.arrivals_per_s(now_s),
                load.attainment.value,
                lifecycle.prefix_hits.value,
                admission.expected_late.at(now_s),
                admission.in_good_time.at(now_s),
                deps.directory.has_ceilings,
            )

        return ControlLoop(
            config.control,
            spec.name,
            flow,
            spec.upstreams,
            self.lengths,
            setters_of(
                flow,
                lifecycle,
                lambda: [upstream for upstream in spec.upstreams if upstream in deps.upstreams],
                has_engines=spec.upstreams.may_change
                or any(upstream in deps.upstreams for upstream in spec.upstreams),
                is_foreign=spec.is_foreign,
                own_rests=rests,
                quota=partial(deps.quota_store.spare.set, spec.name),
            ),
            rests=rests,
            signals=signals,
            feed=None if deps.sharing is None else deps.sharing.control(flow),
            on_moves=partial(self.moves.note, spec.name),
        )


def collectors_of(
    pools: Pools, lengths: LengthForecast, holds: Holds, usage_check: UsageCheck
) -> list[Collector]:
    """Of queues, engines, forecasts and control loops."""

    def share_lags() -> dict[tuple[str, int], float]:
        return {
            (name, rank): tokens
            for name, pool in pools.items()
            for rank, tokens in pool.meters.shares.lags().items()
        }

    def probes() -> Mapping[tuple[str, str], ProbeReport]:
        return {
            (name, upstream.replica_id): snapshot.length_probe
            for name, pool in pools.items()
            for upstream in pool.spec.upstreams
            if (snapshot := upstream.snapshot) is not None and snapshot.length_probe.state == "on"
        }

    return [
        LoadCollector(
            lambda: [pool.flow for pool in pools.values()],
            lambda: [upstream for pool in pools.values() for upstream in pool.spec.upstreams],
            pending=lambda: holds.pending,
            overdue=lambda: holds.overdue,
            is_local=lambda: holds.is_local,
            share_lags=share_lags,
            drift=lambda: None if (last := usage_check.last) is None else len(last.problems),
        ),
        CalibrationCollector(pools.calibrations),
        LengthCollector(lengths, probes),
        MacroStateCollector(lambda: {name: pool.control.learned.switch for name, pool in pools.items()}),
        ControlCollector(lambda: {name: pool.control.figures() for name, pool in pools.items()}),
    ]
