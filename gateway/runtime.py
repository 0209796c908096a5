"""Which parts does a gateway own itself, and in which order do they start and stop?"""

from __future__ import annotations

import asyncio
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
from gateway.lifecycle import Lifecycle
from gateway.metrics import Metrics
from gateway.understand import ServedModel
from tenants.types import Tier

SAVE_LENGTHS_EVERY_S = 30.0
MAX_QUOTE_BUCKETS = 10_000
RECOVERY_RETRY_S = 2.0
PACE_EVERY_S = 0.1

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
            make_policy(config.policy).order,
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
        self.books = Books(
            deps.ledger,
            deps.quota_store,
            deps.gateway_id,
            lease_ttl_s=config.lease_ttl_s,
            wall_clock=deps.wall_clock,
            all_limits=deps.directory.limits,
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
            outcome_wait_s=config.outcome_wait_s,
            settle_wait_s=config.settle_wait_s,
        )
        self._quote_buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._tasks: list[asyncio.Task[None]] = []
        self._engine_changed = asyncio.Event()
        self._saved_at_observation = 0

    # ------------------------------------------------------------ start and stop

    async def start(self) -> None:
        """Recovers what an earlier process left, then opens. Raises `DatabaseUnavailable`,
        `QuotaStoreUnavailable`: nothing is served before the books are right."""
        # What was created a moment ago (the owner's key, at the first start) works from the first request on.
        await self.deps.directory.refresh()
        if self.deps.recovery is None:
            await recovery.recover(self.deps)
        self.books.start()
        self.dispatcher.start()
        for upstream in self.deps.upstreams:
            upstream.watch(self._engine_changed.set)
        self._tasks = [
            asyncio.create_task(self._keep_lengths(), name="gateway lengths"),
            asyncio.create_task(self._keep_recovered(), name="gateway recovery"),
            asyncio.create_task(self._keep_pace(), name="gateway pace"),
        ]

    async def stop(self) -> None:
        """Drains: running requests may end, what waits is refused, everything settles."""
        await self.lifecycle.close(self.deps.config.shutdown_grace_s)
        await self.dispatcher.close()
        await self.books.close(self.deps.config.settle_wait_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._save_lengths()

    async def _keep_lengths(self) -> None:
        while True:
            await asyncio.sleep(SAVE_LENGTHS_EVERY_S)
            await self._save_lengths()

    async def _keep_pace(self) -> None:
        while True:
            await asyncio.sleep(PACE_EVERY_S)
            self.estimates.watch_pace()

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
