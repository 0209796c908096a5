"""The engines' present load, in the form that replays take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from engine.entry import QueueEntry
from engine.forecast.wait.replayed_engine import EngineLoad, Flight
from engine.messages import RunningSequence, Snapshot, StepTime
from engine.sizes import DECODE_TOKENS
from gateway.flow.controller import FlowController, InFlight
from gateway.upstream.base import Upstream, takes_turns


def engine_loads(
    flow: FlowController, upstreams: Iterable[Upstream], step_time_of: Callable[[Upstream], StepTime]
) -> list[EngineLoad]:
    by_replica: dict[str, list[InFlight]] = {}
    for flight in flow.in_flight:
        by_replica.setdefault(flight.replica_id, []).append(flight)
    loads: list[EngineLoad] = []
    for upstream in upstreams:
        ready = upstream.ready
        if ready is None or not takes_turns(upstream):
            continue
        kv_tokens = ready.num_blocks * ready.block_tokens
        loads.append(
            EngineLoad(
                replica_id=upstream.replica_id,
                step_time=step_time_of(upstream),
                max_sequences=ready.max_sequences,
                max_batched_tokens=ready.max_batched_tokens,
                window_sequences=flow.placement.window.places(ready.max_sequences),
                window_kv_tokens=int(kv_tokens * flow.placement.window.kv_window),
                decode_slots=upstream.snapshot.decode_slots if upstream.snapshot else 0,
                flights=flights_of(by_replica.get(upstream.replica_id, []), upstream.snapshot),
                brakes=flow.knobs.brakes,
                pauses=bool(ready.policy),  # other servers name none
            )
        )
    return loads


def flights_of(in_flight: Sequence[InFlight], snapshot: Snapshot | None) -> list[Flight]:
    """Every dispatched sequence as the engine last reported it; unreported ones have just left."""
    reported: dict[str, list[RunningSequence]] = {}
    strangers: list[RunningSequence] = []
    known = {flight.ticket.entry.entry_id for flight in in_flight}
    for running in [*snapshot.running, *snapshot.waiting] if snapshot is not None else []:
        if running.request_id in known:
            reported.setdefault(running.request_id, []).append(running)
        else:
            strangers.append(running)
    flights: list[Flight] = []
    for flight in in_flight:
        entry = flight.ticket.entry
        if flight.foreseen_tokens is not None:
            # What it is charged by now: its end corrects that.
            entry = replace(entry, predicted_output_tokens=flight.predicted_output_tokens)
        seen = reported.get(entry.entry_id, [])
        each_kv = flight.kv_tokens // max(1, flight.live_sequences)
        flights += [_flight(entry, running, each_kv) for running in seen[: flight.live_sequences]]
        prompt = max(1, entry.input_tokens // flight.ticket.sequences)
        unseen = flight.live_sequences - len(seen)
        if flight.output_tokens == 0:
            flights += [Flight(entry, prompt, 0, 0, each_kv) for _ in range(unseen)]
    return flights + [_stranger(running) for running in strangers]


def _flight(entry: QueueEntry, running: RunningSequence, kv_tokens: int) -> Flight:
    left = running.prompt_tokens + running.emitted_tokens - running.computed_tokens
    decodes = running.emitted_tokens > 0 and left <= DECODE_TOKENS
    return Flight(
        entry, 0 if decodes else max(1, left), running.computed_tokens, running.emitted_tokens, kv_tokens
    )


def _stranger(running: RunningSequence) -> Flight:
    """A sequence of another gateway, or one that is just ending."""
    entry = QueueEntry(
        entry_id=running.request_id,
        tenant_id=running.tenant_id,
        arrived_s=0.0,
        input_tokens=running.prompt_tokens,
        predicted_output_tokens=min(running.predicted_output_tokens, running.max_tokens),
        tier=running.tier,
    )
    return _flight(entry, running, running.prompt_tokens + entry.predicted_output_tokens)
