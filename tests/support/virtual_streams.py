"""Tenants' streams from the lifecycle to the engine, on a virtual clock.

The real lifecycle, holds, ledger, quota store and queue in front of a real engine core; only the model's
arithmetic and the passing of time are virtual. Time stands still while the gateway works: it moves with the
engine's steps and, when there is nothing to compute, to the next instant that a task sleeps until.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.core.core import EngineConfig
from engine.forecast.length.length import LengthForecast
from engine.messages import Delta, Ready, SamplingParams, Snapshot, StepTime, Submit
from engine.virtual.replica import VirtualReplica
from gateway.background import Site
from gateway.budget.holds import Holds
from gateway.config import GatewayConfig
from gateway.dispatch.dispatcher import Dispatcher
from gateway.domain.call import Call
from gateway.domain.ids import new_request_id
from gateway.estimates.estimator import Estimator
from gateway.metrics.registry import Metrics
from gateway.requests.lifecycle import Lifecycle
from gateway.requests.run import Closed, Run
from gateway.upstream.base import OnService, Wording
from gateway.upstream.capabilities import PLAIN_TEXT
from gateway.upstream.replica_set import ReplicaSet
from tenants.ledger.ledger import Ledger
from tenants.pricing.pricing import Price, uniform_book
from tenants.quota.memory import MemoryQuotaStore
from tenants.storage.database import Database
from tenants.types import Limit, Principal, Tier
from tests.support.builders import flow_controller, virtual_prompt

EPOCH_S = 1e9
HOPS = 40
"""Turns of the event loop in which everything that can happen without time has happened."""
CONFIG = GatewayConfig(
    outcome_wait_s=5.0, settle_wait_s=30.0, accounts_wait_s=5.0, slow_reader_s=5.0, lease_ttl_s=3_600.0,
    max_buffered_events=10_000, max_buffered_bytes=10**9, max_queued_per_tenant=1_000,
    ttl_interactive_s=86_400.0, ttl_standard_s=86_400.0, ttl_batch_s=604_800.0,
)  # fmt: skip


class Watched:
    """Says how much of a database's work is under way: it takes real time, not virtual."""

    def __init__(self, database: Database) -> None:
        self.under_way = 0
        self.changes = 0
        self._read, self._write = database.read, database.write
        self._write_together = database.write_together
        database.read = self.read  # type: ignore[method-assign]
        database.write = self.write  # type: ignore[method-assign]
        database.write_together = self.write_together  # type: ignore[method-assign]

    async def read(self, work: Callable[[Any], Any]) -> Any:
        return await self._counted(self._read(work))

    async def write(self, work: Callable[[Any], Any]) -> Any:
        return await self._counted(self._write(work))

    async def write_together(self, work: Callable[[Any, Sequence[Any]], Any], item: Any, **ways: Any) -> Any:
        return await self._counted(self._write_together(work, item, **ways))

    async def _counted(self, working: Awaitable[Any]) -> Any:
        self.under_way += 1
        self.changes += 1
        try:
            return await working
        finally:
            self.under_way -= 1
            self.changes += 1


class CoreUpstream:
    """An engine core as an upstream: commands immediately, deltas with the step that made them."""

    replica_id = "engine-0"
    is_up = True
    is_drained = False
    capabilities = PLAIN_TEXT

    def __init__(self, replica: VirtualReplica) -> None:
        self.replica = replica
        config, runner = replica.core.config, replica.runner
        self.ready: Ready | None = Ready(
            self.replica_id, runner.info, config.policy, runner.block_tokens, runner.num_blocks,
            config.max_sequences, config.max_batched_tokens, 1,
        )  # fmt: skip
        self._streams: dict[str, asyncio.Queue[Delta]] = {}

    @property
    def snapshot(self) -> Snapshot | None:
        return self.replica.core.snapshot(self.replica_id)

    def watch(self, on_change: Callable[[], None]) -> None:
        pass

    def listen(self, on_service: OnService) -> None:
        pass

    def run(self, submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
        refused = self.replica.submit(submit)
        assert refused is None, refused
        self._streams[submit.sequence_id] = asyncio.Queue()
        return self._deltas(submit.sequence_id)

    async def _deltas(self, sequence_id: str) -> AsyncIterator[Delta]:
        while True:
            delta = await self._streams[sequence_id].get()
            yield delta
            if delta.outcome is not None:
                return

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        self.replica.core.top_up(sequence_id, lease_tokens, lease_gpu_us)

    def cancel(self, sequence_id: str, cause: str) -> None:
        self.replica.core.cancel(sequence_id, cause)

    def acknowledge(self, sequence_ids: Sequence[str], *, is_traced: bool = False) -> None:
        pass

    def step(self) -> list[Delta]:
        """One step of the engine, its deltas handed to their readers."""
        deltas = [delta for each in self.replica.step().deltas.values() for delta in each]
        for delta in deltas:
            self._streams[delta.sequence_id].put_nowait(delta)
        return deltas


@dataclass(eq=False)
class Stream:
    """One request, and when its tokens came."""

    run: Run
    tenant_id: str
    came_s: list[float] = field(default_factory=list)
    """By token."""
    closed: Closed | None = None


class VirtualStreams:
    """A gateway and an engine without waiting. Use from one event loop; close it."""

    def __init__(
        self,
        database: Database,
        step_time: StepTime,
        *,
        num_blocks: int = 4096,
        config: EngineConfig | None = None,
    ) -> None:
        self.replica = VirtualReplica(config, num_blocks=num_blocks, step_time=step_time)
        self.clock = self.replica.clock
        self.upstream = CoreUpstream(self.replica)
        self.store = MemoryQuotaStore(lambda: EPOCH_S + self.clock())
        self._database = Watched(database)
        self.ledger = Ledger(database)
        self.streams: dict[str, Stream] = {}
        self.on_step: Callable[[], None] = lambda: None
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._slept = 0
        prices = uniform_book({"m": Price(1, 1, 1)})
        flow = flow_controller(lookahead=2)
        self._dispatcher = Dispatcher(flow, ReplicaSet([self.upstream]), self.clock, engine_grace_s=1e9)
        here = Site(
            gateway_id="gw", database=database, config=CONFIG, clock=self.clock,
            wall_clock=lambda: EPOCH_S + self.clock(),
        )  # fmt: skip
        self._books = Holds(here, self.ledger, self.store, all_limits=list)
        self._lifecycle = Lifecycle(
            here,
            self._books,
            self._dispatcher,
            Estimator(
                flow=flow, upstreams=[self.upstream], lengths=LengthForecast(), prices=lambda: prices,
                model="m", cache_s=0.05,
            ),
            Metrics(),
            sleep=self._sleep,
        )  # fmt: skip

    async def close(self) -> None:
        await self._lifecycle.close(0)
        await self._dispatcher.close()
        await self._books.close(5)

    def begin(
        self,
        tenant_id: str,
        *limits: Limit,
        prompt_tokens: int = 8,
        max_tokens: int = 20,
        choices: int = 1,
        asked_max_tokens: bool = True,
    ) -> Stream:
        """A request that arrives now."""
        principal = Principal(
            tenant_id, tenant_id, "p", f"key-{tenant_id}", "x", 1.0, frozenset({"inference"}), Tier.STANDARD,
            frozenset(Tier), None, limits,
        )  # fmt: skip
        request_id = new_request_id(EPOCH_S)
        call = Call(
            request_id=request_id, chat=False, model="m", principal=principal, tier=Tier.STANDARD,
            prompts=(virtual_prompt(request_id, prompt_tokens),), choices=choices,
            max_tokens=max_tokens, sampling=SamplingParams(ignore_eos=True), stream=True, include_usage=True,
            created=1, asked_max_tokens=asked_max_tokens,
        )  # fmt: skip
        stream = Stream(self._lifecycle.begin(call), tenant_id)
        self.streams[request_id] = stream
        return stream

    async def run_until(self, is_done: Callable[[], bool], *, most_steps: int = 100_000) -> None:
        """Lets time pass until `is_done`. Fails when nothing is left that could happen."""
        for _ in range(most_steps):
            await self._settle()
            known = len(self.streams)
            if is_done():
                return
            if len(self.streams) > known:
                continue  # a request was begun
            if self.replica.core.has_work():
                for delta in self.upstream.step():
                    stream = self.streams[delta.sequence_id.rpartition(".")[0]]
                    stream.came_s += [self.clock()] * len(delta.token_ids)
            else:
                assert self._sleepers, f"nothing runs and no task waits for a time: {self._stuck()}"
                self.clock.advance(max(0.0, self._sleepers[0][0] - self.clock()))
            self.on_step()
            while self._sleepers and self._sleepers[0][0] <= self.clock():
                sleeper = heapq.heappop(self._sleepers)[2]
                if not sleeper.done():
                    sleeper.set_result(None)
        raise AssertionError(f"not done after {most_steps} steps")

    def _stuck(self) -> str:
        """The waits of all streams that have not ended."""
        stuck = [stream.run for stream in self.streams.values() if stream.closed is None]
        return (
            "; ".join(
                f"{run.output_tokens} tokens, turn {run.turn is not None},"
                f" lease {run.leases and run.leases.tokens}"
                for run in stuck[:3]
            )
            + f" ({len(stuck)} in all)"
        )

    async def _settle(self) -> None:
        """Everything that can happen at this moment happens."""
        while True:
            before = self._database.changes
            for _ in range(HOPS):
                await asyncio.sleep(0)
            if self._database.under_way:
                await asyncio.sleep(0.0005)
            elif self._database.changes == before:
                break
        for stream in self.streams.values():
            for event in stream.run.events.take():
                if isinstance(event, Closed):
                    stream.closed = event

    async def _sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._slept += 1
        heapq.heappush(self._sleepers, (self.clock() + seconds, self._slept, future))
        await future
