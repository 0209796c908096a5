"""Incidents on purpose, on virtual time, and their effect on each request.

A `VirtualPool` (the real controller, real engine cores) in which an engine can be killed, a reader can be
slow, and a request may have waited for its tenant's limits before it came. It keeps the load as the gateway
does, and knows of every request what the gateway knows at its end.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from engine.core.core import EngineConfig
from engine.messages import Refused, Submit
from engine.virtual.replica import VirtualReplica
from gateway.domain.outcomes import RequestOutcome
from gateway.explain.attribution import RequestFacts
from gateway.explain.fluid_share import FluidMachine, Job
from gateway.explain.load_log import LoadLog
from ops.simulate.step_pool import PoolRequest, PoolServed, VirtualPool

TICK_S = 0.05
"""How often readers read."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Takes so many tokens a second, and `buffer_tokens` may wait for it."""

    tokens_per_s: float
    buffer_tokens: int


@dataclass(slots=True)
class _Reading:
    reader: Reader
    sequence_id: str
    replica_id: str
    tokens: int
    lease_tokens: int
    began_s: float = -1.0
    rests_since_s: float = -1.0
    stalled_s: float = 0.0


@dataclass
class IncidentPool(VirtualPool):
    """One replica unless it is told otherwise."""

    readers: dict[str, Reader] = field(default_factory=dict)
    """Slow ones, by tenant."""
    limited_s: dict[str, float] = field(default_factory=dict)
    """By tenant: so long its requests waited for its limits before they came."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log = LoadLog()
        self.facts: list[RequestFacts] = []
        self._reading: dict[str, _Reading] = {}
        self._lengths: dict[str, int] = {}
        for replica_id in self.engines:
            self._open_door(replica_id)
        self._all_sizes = list(self.sizes)
        self.log.serving(0.0, len(self.sizes))

    def as_machine(self) -> FluidMachine:
        """As attribution sees it."""
        machine = self.machine
        return FluidMachine(
            machine.step_time,
            machine.max_sequences,
            machine.max_batched_tokens,
            machine.kv_tokens,
            self.replicas,
        )

    # ------------------------------------------------------------ time

    def live_through(
        self, requests: Iterable[PoolRequest], *, kill_s: float | None = None, down_s: float = 0.0
    ) -> list[RequestFacts]:
        """Serves them all to their end; at `kill_s` the first replica dies, and is back after `down_s`."""
        events: list[tuple[float, int, object]] = [
            (request.at_s, number, request) for number, request in enumerate(requests)
        ]
        if kill_s is not None:
            events += [(kill_s, -2, "kill"), (kill_s + down_s, -1, "back")]
        heapq.heapify(events)
        next_tick_s = TICK_S
        while events or self._records:
            event_s = events[0][0] if events else float("inf")
            step_s = self._steps[0][0] if self._steps else float("inf")
            self.now_s = min(event_s, step_s, next_tick_s)
            if self.now_s == step_s:
                _, _, replica_id, result = heapq.heappop(self._steps)
                self._stepping.discard(replica_id)
                self._collect(result)
            elif self.now_s == event_s:
                what = heapq.heappop(events)[2]
                if isinstance(what, PoolRequest):
                    self.arrive(what)
                elif what == "kill":
                    self._kill()
                else:
                    self._restart()
            else:
                next_tick_s += TICK_S
            self._read()
            self.pump()
        return self.facts

    # ------------------------------------------------------------ what the gateway notes

    def arrive(self, request: PoolRequest) -> PoolServed:
        record = super().arrive(request)
        assert not record.refused
        self.log.arrived(
            str(len(self.served)),
            request.tenant,
            request.tier,
            request.weight,
            self.now_s,
            request.input_tokens,
            request.output_tokens,
        )
        return record

    def _collect(self, result: object) -> None:
        before = dict(self._records)
        super()._collect(result)  # type: ignore[arg-type]
        for entry_id in before.keys() - self._records.keys():
            self._ended(entry_id, before[entry_id], RequestOutcome.COMPLETED)

    def _ended(self, entry_id: str, record: PoolServed, outcome: RequestOutcome) -> None:
        request = record.request
        is_complete = outcome is RequestOutcome.COMPLETED
        self.log.ended(
            entry_id,
            self.now_s,
            request.input_tokens,
            0,
            request.output_tokens,
            is_complete=is_complete,
        )
        reading = self._reading.pop(entry_id, None)
        self.facts.append(
            RequestFacts(
                Job(
                    entry_id,
                    request.tenant,
                    request.tier,
                    request.weight,
                    request.at_s,
                    request.input_tokens,
                    request.output_tokens,
                ),
                arrived_s=request.at_s - self.limited_s.get(request.tenant, 0.0),
                outcome=outcome,
                first_token_s=record.first_s if record.first_s >= 0 else None,
                last_token_s=self.now_s if is_complete else None,
                ended_s=self.now_s,
                limited_s=self.limited_s.get(request.tenant, 0.0),
                stalled_s=reading.stalled_s if reading is not None else 0.0,
            )
        )

    # ------------------------------------------------------------ slow readers

    def _open_door(self, replica_id: str) -> None:
        """Whoever reads slowly gets its lease bit by bit, as the engine's client does it."""
        engine = self.engines[replica_id]
        submit = engine.submit

        def guarded(
            wanted: Submit, *, output_tokens: int | None = None, gateway_id: str = "virtual"
        ) -> Refused | None:
            reader = self.readers.get(wanted.tenant_id)
            if reader is not None:
                tokens = wanted.lease_tokens
                wanted = replace(wanted, lease_tokens=min(tokens, reader.buffer_tokens))
                self._reading[wanted.sequence_id] = _Reading(
                    reader, wanted.sequence_id, replica_id, tokens, wanted.lease_tokens
                )
            return submit(wanted, output_tokens=output_tokens, gateway_id=gateway_id)

        engine.submit = guarded  # type: ignore[method-assign]

    def _read(self) -> None:
        for entry_id, reading in self._reading.items():
            emitted = self._emitted.get(entry_id, 0)
            if reading.began_s < 0 and emitted:
                reading.began_s = self.now_s
            if emitted >= reading.lease_tokens and reading.rests_since_s < 0:
                reading.rests_since_s = self.now_s
            if reading.began_s < 0:
                continue
            read = int((self.now_s - reading.began_s) * reading.reader.tokens_per_s)
            lease = min(reading.tokens, reading.reader.buffer_tokens + read)
            if lease > reading.lease_tokens:
                reading.lease_tokens = lease
                self.engines[reading.replica_id].core.top_up(reading.sequence_id, lease)
                if reading.rests_since_s >= 0:
                    reading.stalled_s += self.now_s - reading.rests_since_s
                    reading.rests_since_s = -1.0

    # ------------------------------------------------------------ a dead engine

    def _kill(self) -> None:
        """Everything on the first replica is lost with it."""
        replica_id = next(iter(self.engines))
        del self.engines[replica_id]
        self._steps = [step for step in self._steps if step[2] != replica_id]
        heapq.heapify(self._steps)
        self._stepping.discard(replica_id)
        self.sizes = [size for size in self.sizes if size.replica_id != replica_id]
        self.log.serving(self.now_s, len(self.sizes))
        for entry_id, record in list(self._records.items()):
            if record.replica_id == replica_id:
                del self._records[entry_id]
                self.flow.finish(entry_id, 0, self._emitted.pop(entry_id, 0), self.now_s)
                self._ended(entry_id, record, RequestOutcome.ENGINE_LOST)

    def _restart(self) -> None:
        machine = self.machine
        replica_id = self._all_sizes[0].replica_id
        self.engines[replica_id] = VirtualReplica(
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
        self._open_door(replica_id)
        self.sizes = [*self._all_sizes]
        self.log.serving(self.now_s, len(self.sizes))
