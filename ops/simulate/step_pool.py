"""What do a gateway's queue and the engines behind it do with these requests, on virtual time?

The flow controller that serves, in front of any number of virtual replicas, each with the scheduler and the
KV bookkeeping of a real engine. A step's results are known when its time has passed, and not before. Nothing
is measured with a real clock.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.core.core import EngineConfig, StepResult
from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, QueueEntry
from engine.messages import StepTime, Submit
from engine.scheduling.counters import ServiceCounters
from engine.virtual.replica import VirtualReplica, virtual_prompt
from gateway.flow.controller import Dispatch, FlowController, QueueFull, Ticket
from gateway.flow.lanes import LaneRule
from gateway.flow.placement import Scorer
from gateway.flow.window import NUM_RANKS, Replica, WindowRule

LOOKAHEAD_SEQUENCES = 2
NEVER_S = (float("inf"),) * NUM_RANKS
SET_BACK = "place lost by share"


@dataclass(frozen=True, slots=True)
class PoolMachine:
    """One of the replicas; all are alike."""

    step_time: StepTime
    max_sequences: int
    max_batched_tokens: int
    num_blocks: int
    block_tokens: int = 16
    context_tokens: int = 8192

    @property
    def kv_tokens(self) -> int:
        """That the cache holds."""
        return self.num_blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """One arrival, with the length that its answer will have."""

    at_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    tier: int = 1
    weight: float = 1.0
    reserved_cost_per_s: float = 0.0
    prompt: tuple[int, ...] = ()
    """Token ids; empty: a prompt that begins like no other."""
    prefix_hashes: tuple[int, ...] = ()

    @property
    def cost(self) -> int:
        """Cost tokens of the whole answer."""
        return self.input_tokens * INPUT_TOKEN_COST + self.output_tokens * OUTPUT_TOKEN_COST


@dataclass(slots=True)
class PoolServed:
    """What became of one request; instants on the virtual clock, -1 while they have not come."""

    request: PoolRequest
    replica_id: str = ""
    dispatched_s: float = -1.0
    first_s: float = -1.0
    ended_s: float = -1.0
    cached_tokens: int = 0
    displaced_tokens: int = 0
    """KV tokens of lower tiers whose places it took."""
    set_back: int = 0
    """Places that it lost to a tenant of its tier that was owed one."""
    refused: bool = False

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token; infinite if none came."""
        return self.first_s - self.request.at_s if self.first_s >= 0 else float("inf")


@dataclass
class VirtualPool:
    """Replicas behind one queue. `predict` tells a request's median output on arrival, else the truth."""

    machine: PoolMachine
    replicas: int = 1
    policy: str = "vtc"
    ageing_s: Sequence[float] = NEVER_S
    lanes: LaneRule = field(default_factory=LaneRule)
    scorer: Scorer | None = None
    max_queued_per_tenant: int = 512
    predict: Callable[[PoolRequest], int] = lambda request: request.output_tokens

    def __post_init__(self) -> None:
        machine = self.machine
        self.engines = {
            f"replica-{number}": VirtualReplica(
                EngineConfig(
                    policy=self.policy,
                    max_sequences=machine.max_sequences,
                    max_batched_tokens=machine.max_batched_tokens,
                ),
                num_blocks=machine.num_blocks,
                block_tokens=machine.block_tokens,
                context_tokens=machine.context_tokens,
                step_time=machine.step_time,
            )
            for number in range(self.replicas)
        }
        self.sizes = [
            Replica(
                replica_id,
                machine.max_sequences,
                machine.kv_tokens,
                machine.step_time,
                machine.max_batched_tokens,
            )
            for replica_id in self.engines
        ]
        self.flow = FlowController(
            self.policy,
            ServiceCounters(),
            max_queued=1_000_000,
            max_queued_per_tenant=self.max_queued_per_tenant,
            queue_ttl_s=NEVER_S,
            window=WindowRule(LOOKAHEAD_SEQUENCES, 1.0),
            log_records=1,
            ageing_s=self.ageing_s,
            lanes=self.lanes,
            scorer=self.scorer,
        )
        self.now_s = 0.0
        self.served: list[PoolServed] = []
        self.service: dict[str, int] = {}
        """Cost tokens by tenant, as the engines computed and emitted them."""
        self._records: dict[str, PoolServed] = {}
        self._emitted: dict[str, int] = {}
        self._steps: list[tuple[float, int, str, StepResult]] = []
        """A heap of the steps under way, by their end."""
        self._stepping: set[str] = set()
        self._started = 0

    def run(
        self,
        requests: Iterable[PoolRequest],
        *,
        until_s: float = float("inf"),
        on_time: Callable[[VirtualPool], None] = lambda pool: None,
    ) -> None:
        """Serves `requests` (in order of arrival) to their end, or until `until_s`; `on_time` is told after
        every event."""
        arrivals = iter(requests)
        coming = next(arrivals, None)
        while True:
            arrival_s = coming.at_s if coming is not None else float("inf")
            end_s = self._steps[0][0] if self._steps else float("inf")
            if min(arrival_s, end_s) > until_s or (coming is None and not self._steps):
                return
            if coming is not None and arrival_s <= end_s:
                self.now_s = max(self.now_s, arrival_s)
                self.arrive(coming)
                coming = next(arrivals, None)
            else:
                self.now_s, _, replica_id, result = heapq.heappop(self._steps)
                self._stepping.discard(replica_id)
                self._collect(result)
            on_time(self)
            self.pump()

    def arrive(self, request: PoolRequest) -> PoolServed:
        """A request arrives now."""
        record = PoolServed(request)
        self.served.append(record)
        entry_id = str(len(self.served))
        median = self.predict(request)
        entry = QueueEntry(
            entry_id,
            request.tenant,
            self.now_s,
            request.input_tokens,
            median,
            request.tier,
            request.weight,
        )
        ticket = Ticket(
            entry,
            1,
            request.input_tokens + median,
            max_tokens=request.output_tokens,
            reserved_cost_per_s=request.reserved_cost_per_s,
            prefix_hashes=request.prefix_hashes,
        )
        record.refused = isinstance(self.flow.enqueue(ticket, self.now_s), QueueFull)
        if not record.refused:
            self._records[entry_id] = record
        return record

    def pump(self) -> None:
        """Lets go what may go, and starts the steps of replicas that have something to do."""
        for turn in self.flow.dispatch(self.now_s, self.sizes):
            self._send(turn)
        for replica_id, engine in self.engines.items():
            if replica_id not in self._stepping and engine.core.has_work():
                engine.clock.advance(max(0.0, self.now_s - engine.clock.now_s))
                result = engine.step()
                self._started += 1
                self._stepping.add(replica_id)
                heapq.heappush(self._steps, (engine.clock.now_s, self._started, replica_id, result))

    def _send(self, turn: Dispatch) -> None:
        entry = turn.ticket.entry
        record = self._records[entry.entry_id]
        request = record.request
        record.dispatched_s, record.replica_id = self.now_s, turn.replica_id
        record.displaced_tokens = sum(each.kv_tokens for each in turn.displaced)
        prompt = request.prompt or virtual_prompt(entry.entry_id, request.input_tokens)
        refused = self.engines[turn.replica_id].submit(
            Submit(
                sequence_id=entry.entry_id,
                request_id=entry.entry_id,
                tenant_id=request.tenant,
                prompt_token_ids=list(prompt),
                max_tokens=request.output_tokens,
                lease_tokens=request.output_tokens,
                tier=turn.tier,
                weight=request.weight,
                counter=turn.counter,
                is_owed=turn.is_owed,
                predicted_output_tokens=entry.predicted_output_tokens,
            ),
            output_tokens=request.output_tokens,
        )
        if refused is not None:
            raise ValueError(f"a request of {request.tenant} was refused: {refused.message}")

    def _collect(self, result: StepResult) -> None:
        for tenant, had in result.service.items():
            cost = had.computed_tokens * INPUT_TOKEN_COST + had.emitted_tokens * OUTPUT_TOKEN_COST
            self.service[tenant] = self.service.get(tenant, 0) + cost
        for delta in result.deltas.get("virtual", ()):
            entry_id = delta.sequence_id
            record = self._records[entry_id]
            emitted = self._emitted.get(entry_id, 0) + len(delta.token_ids)
            self._emitted[entry_id] = emitted
            if record.first_s < 0 < emitted:
                record.first_s = self.now_s
            outcome = delta.outcome
            self.flow.progress(entry_id, emitted, 1 if outcome is None else 0)
            if outcome is not None:
                record.ended_s, record.cached_tokens = self.now_s, outcome.cached_tokens
                record.set_back = sum(each.rule == SET_BACK for each in outcome.decisions)
                self.flow.finish(entry_id, outcome.computed_tokens, outcome.emitted_tokens, self.now_s)
                del self._records[entry_id], self._emitted[entry_id]
