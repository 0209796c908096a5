"""Prometheus collectors of what waits and runs now, and of the engines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.messages import TIER_RANKS
from gateway.flow.controller import FlowController
from gateway.upstream.base import Upstream
from gateway.upstream.openai.upstream import OpenAIUpstream


@dataclass(frozen=True, eq=False)
class LoadCollector(Collector):
    """Queue, budget and upstreams. An engine's counts restart with it, as Prometheus expects of a counter."""

    flows: Callable[[], Collection[FlowController]]
    upstreams: Callable[[], Collection[Upstream]]
    pending: Callable[[], int]
    """Settlements that are not durable."""
    overdue: Callable[[], int]
    """Holds of other gateways older than their lease."""
    is_local: Callable[[], bool]
    share_lags: Callable[[], dict[tuple[str, int], float]]
    """Cost tokens by model and rank of a tier, of the tenant furthest behind."""
    drift: Callable[[], int | None]
    """What the last comparison of usage with the ledger found, None without one."""

    def collect(self) -> Iterator[Metric]:
        yield from self._waiting()
        yield from self._budget()
        yield from self._engines()

    def _waiting(self) -> Iterator[Metric]:
        flows, lags = self.flows(), self.share_lags()
        queued = GaugeMetricFamily("fairgate_queued", "Requests that wait.", labels=["tier"])
        behind = GaugeMetricFamily(
            "fairgate_fair_share_lag_tokens",
            "Cost tokens that the tenant furthest behind lacks of its fair share of a tier's service here, "
            "recent ones weighing most.",
            labels=["model", "tier"],
        )
        for tier, rank in TIER_RANKS.items():
            queued.add_metric([tier], sum(flow.queue.queued_by_tier()[rank] for flow in flows))
            for (model, lagging), tokens in lags.items():
                if lagging == rank:
                    behind.add_metric([model, tier], tokens)
        yield queued
        running = sum(len(flow.in_flight) for flow in flows)
        yield GaugeMetricFamily("fairgate_running", "Requests dispatched and not finished.", running)
        yield behind

    def _budget(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "fairgate_settlements_pending", "Settlements that are not durable yet.", self.pending()
        )
        yield GaugeMetricFamily(
            "fairgate_holds_overdue",
            "Holds of other gateways that were older than their lease when last looked at: these are dead or "
            "stalled, and the budget stays held until they are settled.",
            self.overdue(),
        )
        yield GaugeMetricFamily(
            "fairgate_quota_store_local",
            "1: the quota store is away, a slice of each limit is given out without it.",
            self.is_local(),
        )
        drift = GaugeMetricFamily(
            "fairgate_ledger_drift_problems",
            "Differences that the last comparison of the sums of usage with the ledger found here.",
        )
        if (problems := self.drift()) is not None:
            drift.add_metric([], problems)
        yield drift

    def _engines(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("fairgate_engine_up", "1: serves.", labels=["replica"])
        info = GaugeMetricFamily(
            "fairgate_engine_info",
            "1, of what an engine of ours computes with.",
            labels=["replica", "attention", "forward", "device", "dtype"],
        )
        of_state = ["replica", "state"]
        sequences = GaugeMetricFamily(
            "fairgate_engine_sequences", "Sequences in the engine.", labels=of_state
        )
        blocks = GaugeMetricFamily("fairgate_engine_kv_blocks", "KV blocks.", labels=of_state)
        steps = CounterMetricFamily("fairgate_engine_steps", "Steps of the engine.", labels=["replica"])
        preemptions = CounterMetricFamily(
            "fairgate_engine_preemptions", "Preemptions in the engine.", labels=["replica"]
        )
        lost = CounterMetricFamily(
            "fairgate_engine_traces_lost",
            "Kept traces whose spans of this engine the collector does not have.",
            labels=["replica"],
        )
        contradictions = CounterMetricFamily(
            "fairgate_upstream_contradictions",
            "Answers of another server that went on beyond max_tokens (overrun), or whose usage was below "
            "what the text holds (usage_low) or above max_tokens (usage_high).",
            labels=["replica", "kind"],
        )
        for upstream in self.upstreams():
            replica, snapshot = upstream.replica_id, upstream.snapshot
            up.add_metric([replica], upstream.is_up)
            if upstream.is_up and (ready := upstream.ready) is not None and ready.model.forward:
                model = ready.model
                kernel = model.attention.partition(":")[0]
                info.add_metric([replica, kernel, model.forward, model.device, model.dtype], 1)
            if isinstance(upstream, OpenAIUpstream):
                for kind, number in upstream.monitor.contradictions.items():
                    contradictions.add_metric([replica, kind], number)
            if snapshot is None:
                continue
            sequences.add_metric([replica, "running"], len(snapshot.running))
            sequences.add_metric([replica, "waiting"], len(snapshot.waiting))
            blocks.add_metric([replica, "free"], snapshot.free_blocks)
            blocks.add_metric([replica, "cached"], snapshot.cached_blocks)
            blocks.add_metric([replica, "referenced"], snapshot.referenced_blocks)
            steps.add_metric([replica], snapshot.step)
            preemptions.add_metric([replica], snapshot.preemptions)
            lost.add_metric([replica], snapshot.traces_lost)
        yield from (up, info, sequences, blocks, steps, preemptions, lost, contradictions)
