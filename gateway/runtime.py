"""Which parts does a gateway own itself, and in which order do they start and stop?"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import OrderedDict

from engine.scheduling.counters import ServiceCounters
from engine.scheduling.policy import make_policy
from gateway import errors, recovery
from gateway.books import Books
from gateway.deps import GatewayDeps
from gateway.dispatcher import Dispatcher
from gateway.estimates import Estimates, load_lengths, save_lengths
from gateway.flow.controller import FlowController
from gateway.flow.window import WindowRule
from gateway.idempotency import Idempotency
from gateway.lifecycle import Lifecycle, Rule
from gateway.limit_events import LimitEvents
from gateway.metrics import Metrics
from gateway.presence import Presence
from gateway.understand import ServedModel
from tenants.errors import DatabaseUnavailable, Invalid
from tenants.gateways import GatewaySeen
from tenants.quota.store import QuotaStoreUnavailable
from tenants.types import Tier

SAVE_LENGTHS_EVERY_S = 30.0
MAX_QUOTE_BUCKETS = 10_000
RECOVERY_RETRY_S = 2.0
PURGE_EVERY_S = 60.0
PACE_EVERY_S = 0.1
BEATS_PER_STALE = 5
"""Heartbeats that may be lost in a row before others take this gateway for dead."""

log = logging.getLogger("fairgate.gateway")


class Gateway:
    """One gateway process's own state; `deps` is everybody else's."""

    def __init__(self, deps: GatewayDeps) -> None:
        """Raises `UnknownPolicy`."""
        config = deps.config
        self.policy = config.policy
        """Name of the policy in force, of the queue and of the engines."""
        self.deps = deps
        self.metrics = Metrics()
        self.flow = FlowController(
            make_policy(config.policy, config.policy_options).order,
            ServiceCounters(),
            max_queued=config.max_queued,
            max_queued_per_tenant=config.max_queued_per_tenant,
            queue_ttl_s=[config.queue_ttl_s[tier] for tier in Tier],
            window=WindowRule(config.lookahead_sequences, config.kv_window),
            log_records=config.dispatch_log_records,
        )
        self.dispatcher = Dispatcher(
            self.flow, deps.upstreams, deps.clock, engine_grace_s=config.engine_grace_s
        )
        self.presence = Presence(deps.gateway_id, config.gateway_stale_s, deps.clock)
        self.limit_events = LimitEvents(deps.database, self.metrics, deps.wall_clock)
        self.books = Books(
            deps.ledger,
            deps.quota_store,
            deps.gateway_id,
            lease_ttl_s=config.lease_ttl_s,
            wall_clock=deps.wall_clock,
            all_limits=lambda: deps.directory.limits(deps.wall_clock()),
            require_presence=self.presence.require,
            on_granted=self.limit_events.note,
        )
        self.estimates = Estimates(
            flow=self.flow,
            upstreams=deps.upstreams,
            lengths=deps.lengths if deps.lengths is not None else load_lengths(config.data_dir),
            prices=deps.prices,
            model=deps.model_name,
            cache_s=config.estimate_cache_s,
        )
        self.lifecycle = Lifecycle(
            books=self.books,
            dispatcher=self.dispatcher,
            estimates=self.estimates,
            prices=deps.prices,
            metrics=self.metrics,
            clock=deps.clock,
            wall_clock=deps.wall_clock,
            rule=Rule(
                reserve_quantile=config.reserve_quantile,
                outcome_wait_s=config.outcome_wait_s,
                settle_wait_s=config.settle_wait_s,
                hold_wait_s=config.hold_wait_s,
                accounts_wait_s=config.accounts_wait_s,
                slow_reader_s=config.slow_reader_s,
                max_buffered_events=config.max_buffered_events,
                max_fed_waiting=config.max_queued_per_tenant,
                feed_wait_s=config.queue_ttl_s,
            ),
        )
        self.idempotency = Idempotency(deps)
        self._quote_buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._dead: list[GatewaySeen] = []
        self._adopting: dict[str, asyncio.Task[None]] = {}
        self._engine_changed = asyncio.Event()
        self._saved_at_observation = 0

    # ------------------------------------------------------------ start and stop

    async def start(self) -> None:
        """Recovers what an earlier process left, then opens. While the quota store is not ready nothing is
        admitted, and `/readyz` says so. Raises `DatabaseUnavailable`, and `Invalid` where another gateway
        serves this database and each would count for itself."""
        # What was created a moment ago (the owner's key, at the first start) works from the first request on.
        await self.deps.directory.refresh()
        others = [each for each in await self._beat() if each.gateway_id != self.deps.gateway_id]
        await self._prepare_counters(others)
        self.books.start()
        self.limit_events.start()
        self.dispatcher.start()
        for upstream in self.deps.upstreams:
            upstream.watch(self._engine_changed.set)
        self._tasks = [
            asyncio.create_task(self._keep_lengths(), name="gateway lengths"),
            asyncio.create_task(self._keep_recovered(), name="gateway recovery"),
            asyncio.create_task(self._keep_pace(), name="gateway pace"),
            asyncio.create_task(self._keep_presence(), name="gateway presence"),
            asyncio.create_task(self._keep_purged(), name="gateway idempotency"),
        ]

    async def stop(self) -> None:
        """Drains: running requests may end, what waits is refused, everything settles."""
        await self.lifecycle.close(self.deps.config.shutdown_grace_s)
        await self.dispatcher.close()
        await self.books.close(self.deps.config.settle_wait_s)
        await self.limit_events.close()
        tasks = [*self._tasks, *self._adopting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._save_lengths()
        with contextlib.suppress(DatabaseUnavailable):
            if not await self.deps.ledger.open_requests(self.deps.gateway_id, most=1):
                await self.deps.registry.forget(self.deps.gateway_id)

    async def _prepare_counters(self, others: list[GatewaySeen]) -> None:
        """Counters that are right, and an earlier life settled; or, as long as Redis is not ready, both
        later."""
        deps = self.deps
        if deps.rebuild_counters:
            for each in others:
                if each.silent_s <= deps.config.gateway_stale_s:
                    raise Invalid(
                        "redis_url",
                        f"gateway {each.gateway_id} {each.address} serves this database, and each would count"
                        " limits for itself: stop it, or give both the same Redis",
                    )
        try:
            await self.books.fill(is_new=deps.rebuild_counters)
            if deps.recovery is None:
                await recovery.recover(deps)
        except QuotaStoreUnavailable as error:
            log.warning("the quota store is not ready, nothing is admitted yet: %s", error)
            deps.recovery = deps.recovery or recovery.RecoveryReport()
            self._engine_changed.set()

    async def _beat(self) -> list[GatewaySeen]:
        """One heartbeat; returns every gateway that the database knows. Adoption is `_keep_presence`'s."""
        deps, asked_s = self.deps, self.deps.clock()
        seen = await deps.registry.beat(deps.gateway_id, deps.address, deps.engine_names())
        self._dead = self.presence.beaten(asked_s, seen)
        return seen

    async def _keep_presence(self) -> None:
        """Says that this gateway lives, and settles what those left that do not any more."""
        stale_s = self.deps.config.gateway_stale_s
        while True:
            try:
                await self._beat()
                for dead in self._dead:
                    if dead.gateway_id not in self._adopting:
                        self._adopting[dead.gateway_id] = asyncio.create_task(
                            self._adopt(dead), name=f"adopt {dead.gateway_id}"
                        )
            except DatabaseUnavailable as error:
                log.warning("no heartbeat could be written: %s", type(error).__name__)
            except Exception:
                log.exception("the heartbeat failed; it goes on")
            await asyncio.sleep(stale_s / BEATS_PER_STALE)

    async def _adopt(self, dead: GatewaySeen) -> None:
        """Beside the heartbeat: engines may take their time to answer."""
        try:
            await recovery.adopt(self.deps, dead, self.deps.config.gateway_stale_s, self.books.live)
        except (DatabaseUnavailable, QuotaStoreUnavailable) as error:
            log.warning("gateway %s is adopted later: %s", dead.gateway_id, type(error).__name__)
        except Exception:
            log.exception("gateway %s could not be adopted; it is tried again", dead.gateway_id)
        finally:
            del self._adopting[dead.gateway_id]

    async def _keep_lengths(self) -> None:
        while True:
            await asyncio.sleep(SAVE_LENGTHS_EVERY_S)
            await self._save_lengths()

    async def _keep_pace(self) -> None:
        while True:
            await asyncio.sleep(PACE_EVERY_S)
            self.estimates.watch_pace()

    async def _keep_purged(self) -> None:
        while True:
            await asyncio.sleep(PURGE_EVERY_S)
            with contextlib.suppress(DatabaseUnavailable):
                await self.idempotency.purge()

    async def _save_lengths(self) -> None:
        data_dir = self.deps.config.data_dir
        observed = self.estimates.observed
        if data_dir is None or observed == self._saved_at_observation:
            return
        text = json.dumps(self.estimates.lengths.to_dict())
        try:
            await asyncio.to_thread(save_lengths, data_dir, text)
            self._saved_at_observation = observed
        except OSError as error:
            log.warning("the length forecast could not be saved: %s", error.strerror)

    async def _keep_recovered(self) -> None:
        """An engine that came (back) may hold outcomes that nobody has settled or acknowledged."""
        while True:
            await self._engine_changed.wait()
            self._engine_changed.clear()
            if not self.dispatcher.has_engine:
                continue
            try:
                await recovery.sweep(self.deps, self.books.live)
            except Exception as error:
                log.warning("recovery is tried again: %s", type(error).__name__)
                await asyncio.sleep(RECOVERY_RETRY_S)
                self._engine_changed.set()

    # ------------------------------------------------------------ what routes ask

    def model(self) -> ServedModel:
        """The served model. Raises `ApiError` (503) before any engine has announced it."""
        for upstream in self.deps.upstreams:
            ready = upstream.ready
            if ready is not None:
                kv_tokens = ready.num_blocks * ready.block_tokens
                # The last token's own keys and values are never needed.
                context_tokens = min(ready.model.context_tokens, kv_tokens + 1)
                return ServedModel(self.deps.model_name, context_tokens, ready.model.vocabulary)
        raise errors.engine_unavailable()

    def require_engine(self) -> None:
        """Raises `ApiError` (503) when no engine serves right now."""
        if not self.dispatcher.has_engine:
            raise errors.engine_unavailable()

    def take_quote(self, key_id: str) -> None:
        """Counts one fresh replay against the key's rate. Raises `ApiError` (429)."""
        rate = self.deps.config.quotes_per_s
        burst = 2 * rate
        now_s = self.deps.clock()
        level, at_s = self._quote_buckets.pop(key_id, (burst, now_s))
        level = min(burst, level + (now_s - at_s) * rate)
        allowed = level >= 1
        self._quote_buckets[key_id] = (level - 1 if allowed else level, now_s)
        if len(self._quote_buckets) > MAX_QUOTE_BUCKETS:
            self._quote_buckets.popitem(last=False)
        if not allowed:
            raise errors.rate_limited(
                f"A key may ask for {rate:g} quotes per second.", "requests", (1 - level) / rate
            )
