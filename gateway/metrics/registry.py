"""Prometheus registry of one gateway, and its exposition.

Labels come from closed sets (outcomes, tiers, error codes, replica ids, names of the settings): no tenant or
key label, so that the number of series does not grow with customers. Tenants are in `/admin/v1/status`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from engine.messages import TIER_RANKS, Snapshot
from gateway.metrics.requests import EndedRequests
from gateway.metrics.waits import RecentWaits

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One registry a gateway: two gateways in one process (tests) do not collide."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.refusals_by_code: dict[str, int] = {}
        """The same numbers as `fairgate_refusals_total`, for the status page."""
        self.ended = EndedRequests()
        """Finished requests that held budget."""
        self.registry.register(self.ended)
        self.waits = RecentWaits()
        """What was told and had, by tenant: only for the status page."""
        self._refusals = Counter(
            "fairgate_refusals", "Requests refused, by error code.", ["code"], registry=self.registry
        )
        self._fallbacks = Counter(
            "fairgate_fallbacks",
            "Times that a model of an alias's chain was passed over, by reason.",
            ["alias", "model", "reason"],
            registry=self.registry,
        )
        self._queued = Gauge("fairgate_queued", "Requests that wait.", ["tier"], registry=self.registry)
        self._running = Gauge(
            "fairgate_running", "Requests dispatched and not finished.", registry=self.registry
        )
        self._pending = Gauge(
            "fairgate_settlements_pending", "Settlements that are not durable yet.", registry=self.registry
        )
        self._local = Gauge(
            "fairgate_quota_store_local",
            "1: the quota store is away, a slice of each limit is given out without it.",
            registry=self.registry,
        )
        self._limit_events = Counter(
            "fairgate_limit_events",
            "Soft limits that reached a threshold (once per window and level), requests that a shadow limit "
            "would have refused, and counts of them that were dropped.",
            ["kind"],
            registry=self.registry,
        )
        self._engine_up = Gauge("fairgate_engine_up", "1: serves.", ["replica"], registry=self.registry)
        self._engine_sequences = Gauge(
            "fairgate_engine_sequences",
            "Sequences in the engine.",
            ["replica", "state"],
            registry=self.registry,
        )
        self._engine_blocks = Gauge(
            "fairgate_engine_kv_blocks", "KV blocks.", ["replica", "state"], registry=self.registry
        )
        self._engine_steps = Gauge(
            "fairgate_engine_steps", "Steps since the engine started.", ["replica"], registry=self.registry
        )
        self._engine_preemptions = Gauge(
            "fairgate_engine_preemptions",
            "Preemptions since it started.",
            ["replica"],
            registry=self.registry,
        )

    def refused(self, code: str) -> None:
        """Counts one refusal; `code` is from the error table."""
        self._refusals.labels(code).inc()
        self.refusals_by_code[code] = self.refusals_by_code.get(code, 0) + 1

    def passed_over(self, alias: str, model: str, reason: str) -> None:
        """Counts one model of a chain that did not take a request; the names are those of the settings."""
        self._fallbacks.labels(alias, model, reason).inc()

    def limit_event(self, kind: str) -> None:
        """`threshold`, `would_deny` or `dropped`."""
        self._limit_events.labels(kind).inc()

    def render(
        self,
        queued_by_tier: Sequence[int],
        running: int,
        settlements_pending: int,
        is_local: bool,
        engines: Iterable[tuple[str, bool, Snapshot | None]],
    ) -> bytes:
        """The exposition text, with the gauges as they are now."""
        for tier, rank in TIER_RANKS.items():
            self._queued.labels(tier).set(queued_by_tier[rank])
        self._running.set(running)
        self._pending.set(settlements_pending)
        self._local.set(is_local)
        for replica_id, is_up, snapshot in engines:
            self._engine_up.labels(replica_id).set(1 if is_up else 0)
            if snapshot is None:
                continue
            self._engine_sequences.labels(replica_id, "running").set(len(snapshot.running))
            self._engine_sequences.labels(replica_id, "waiting").set(len(snapshot.waiting))
            self._engine_blocks.labels(replica_id, "free").set(snapshot.free_blocks)
            self._engine_blocks.labels(replica_id, "cached").set(snapshot.cached_blocks)
            self._engine_blocks.labels(replica_id, "referenced").set(snapshot.referenced_blocks)
            self._engine_steps.labels(replica_id).set(snapshot.step)
            self._engine_preemptions.labels(replica_id).set(snapshot.preemptions)
        return generate_latest(self.registry)
