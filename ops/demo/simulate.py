"""What would another policy have done with the very same arrivals?

The gateway's own flow controller and the engine's own core, on a virtual clock that moves by the step-time
model which the real engine fitted while it served. Nothing here is measured: it is a simulation and the
report says so. The policy that served is simulated as well, so that like is compared with like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.core import EngineConfig
from engine.entry import QueueEntry
from engine.messages import TIER_RANKS, StepTime, Submit
from engine.scheduling.counters import ServiceCounters
from engine.virtual.replica import VirtualClock, VirtualReplica, virtual_prompt
from gateway.flow.controller import FlowController, Ticket
from gateway.flow.dispatch_log import LogRecord
from gateway.flow.window import Replica, WindowRule

REPLICA_ID = "virtual"
CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class VirtualRequest:
    """One arrival of the run that is replayed: what was asked and how long the answer became."""

    request_id: str
    tenant: str
    tier: str
    weight: float
    arrival_s: float
    input_tokens: int
    output_tokens: int
    predicted_output_tokens: int


@dataclass(frozen=True)
class VirtualEngine:
    """The engine that served, as it announced itself, and the step times it fitted."""

    step_time: StepTime
    max_sequences: int
    max_batched_tokens: int
    num_blocks: int
    block_tokens: int


@dataclass
class VirtualRun:
    """Queue waits by request (arrival to dispatch, seconds), and the dispatch log."""

    waits_s: dict[str, float]
    log: list[LogRecord]
    ended_s: float


def simulate(policy: str, requests: Sequence[VirtualRequest], engine: VirtualEngine) -> VirtualRun:
    """Runs all requests to their end under `policy`. Raises `ValueError` for an unknown policy."""
    clock = VirtualClock()
    replica = VirtualReplica(
        EngineConfig(
            policy=policy, max_sequences=engine.max_sequences, max_batched_tokens=engine.max_batched_tokens
        ),
        clock=clock,
        num_blocks=engine.num_blocks,
        block_tokens=engine.block_tokens,
        context_tokens=CONTEXT_TOKENS,
        step_time=engine.step_time,
    )
    flow = FlowController(
        policy,
        ServiceCounters(),
        max_queued=len(requests) + 1,
        max_queued_per_tenant=len(requests) + 1,
        queue_ttl_s=[float("inf")] * len(TIER_RANKS),
        window=WindowRule(lookahead_sequences=2, kv_window=1.0),
        log_records=4 * len(requests) + 16,
    )
    size = Replica(REPLICA_ID, engine.max_sequences, engine.num_blocks * engine.block_tokens)
    arrivals = sorted(requests, key=lambda request: request.arrival_s)
    by_id = {request.request_id: request for request in arrivals}
    waits_s: dict[str, float] = {}
    emitted: dict[str, int] = {}
    arrived = 0
    while True:
        while arrived < len(arrivals) and arrivals[arrived].arrival_s <= clock.now_s:
            flow.enqueue(_ticket(arrivals[arrived]), clock.now_s)
            arrived += 1
        for turn in flow.dispatch(clock.now_s, [size]):
            request = by_id[turn.ticket.entry.entry_id]
            waits_s[request.request_id] = clock.now_s - request.arrival_s
            replica.submit(_submit(request, turn.counter), output_tokens=request.output_tokens)
        if replica.core.has_work():
            result = replica.step()
            for deltas in result.deltas.values():
                for delta in deltas:
                    count = emitted.get(delta.sequence_id, 0) + len(delta.token_ids)
                    emitted[delta.sequence_id] = count
                    flow.progress(delta.sequence_id, count, 1)
                    if delta.outcome is not None:
                        flow.finish(
                            delta.sequence_id,
                            delta.outcome.computed_tokens,
                            delta.outcome.emitted_tokens,
                            clock.now_s,
                        )
        elif arrived < len(arrivals):
            clock.advance(arrivals[arrived].arrival_s - clock.now_s)
        elif not len(flow):
            return VirtualRun(waits_s, list(flow.log.since(0, flow.log.next_index)), clock.now_s)
        else:
            raise RuntimeError("the simulated engine is idle while requests wait")


def _ticket(request: VirtualRequest) -> Ticket:
    entry = QueueEntry(
        entry_id=request.request_id,
        tenant_id=request.tenant,
        arrived_s=request.arrival_s,
        input_tokens=request.input_tokens,
        predicted_output_tokens=request.predicted_output_tokens,
        tier=TIER_RANKS[request.tier],
        weight=request.weight,
    )
    return Ticket(entry, sequences=1, kv_tokens=request.input_tokens + request.predicted_output_tokens)


def _submit(request: VirtualRequest, counter: int) -> Submit:
    return Submit(
        sequence_id=request.request_id,
        request_id=request.request_id,
        tenant_id=request.tenant,
        prompt_token_ids=virtual_prompt(request.request_id, request.input_tokens),
        max_tokens=request.output_tokens,
        lease_tokens=request.output_tokens,
        tier=TIER_RANKS[request.tier],
        weight=request.weight,
        counter=counter,
        predicted_output_tokens=request.predicted_output_tokens,
    )
