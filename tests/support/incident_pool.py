"""A simulated pool with incidents: a killed engine, slow readers, requests that waited for their limits.

It keeps the load as the gateway does, and knows of every request what the gateway knows at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from engine.messages import Submit
from engine.sequence import Sequence, SequenceStatus
from gateway.explain.attribution import RequestFacts
from gateway.explain.fluid_share import FluidMachine, Job
from gateway.explain.load_log import LoadLog
from ops.simulate.machines.machines import Machine
from ops.simulate.pool import Member, PoolObserver, SimulatedPool
from ops.simulate.predictions import Exact
from ops.simulate.traffic.requests import SimulatedRequest
from tenants.outcomes import RequestOutcome

TICK_S = 0.05
"""How often readers read."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Takes `tokens_per_s`; up to `buffer_tokens` may wait for it."""

    tokens_per_s: float
    buffer_tokens: int


@dataclass(slots=True)
class _Reading:
    reader: Reader
    row: int
    tokens: int
    lease_tokens: int
    rests_since_s: float = -1.0
    stalled_s: float = 0.0


class IncidentPool(SimulatedPool):
    """One replica. `readers`: slow ones, by tenant. `limited_s`: by tenant, how long its requests waited for
    its limits before they came."""

    def __init__(
        self, policy: str, machine: Machine, readers: Mapping[str, Reader], limited_s: Mapping[str, float]
    ) -> None:
        super().__init__(
            policy,
            machine,
            predictions=Exact(),
            prefix_caching=False,
            watch=PoolObserver(on_event=lambda pool: self._read()),
            stepwise=True,
            declared_tokens=0,
        )
        self.log = LoadLog()
        self.facts: list[RequestFacts] = []
        self._readers = readers
        self._limited_s = limited_s
        self._reading: dict[str, _Reading] = {}
        self._limit_leases(self.members[0])
        self.log.serving(0.0, 1)

    def as_machine(self) -> FluidMachine:
        """As attribution sees it."""
        machine = self.machine
        return FluidMachine(
            machine.step_time, machine.max_sequences, machine.max_batched_tokens, machine.kv_tokens, 1
        )

    # ------------------------------------------------------------ time

    def live_through(
        self, requests: Iterable[SimulatedRequest], *, kill_s: float | None = None, down_s: float = 0.0
    ) -> list[RequestFacts]:
        """Serves them all to their end; at `kill_s` the replica dies, and is back after `down_s`."""
        pending = deque(sorted(requests, key=lambda request: request.arrival_s))
        incidents = deque([] if kill_s is None else [(kill_s, self._kill), (kill_s + down_s, self._restart)])
        next_tick_s = TICK_S
        while pending or self._live or incidents:
            until_s = min(next_tick_s, incidents[0][0]) if incidents else next_tick_s
            due = []
            while pending and pending[0].arrival_s <= until_s:
                due.append(pending.popleft())
            self.run(due, until_s=until_s)
            self.now_s = until_s
            if incidents and incidents[0][0] == until_s:
                incidents.popleft()[1]()
            if until_s == next_tick_s:
                next_tick_s += TICK_S
            self._decide(None)
        return self.facts

    # ------------------------------------------------------------ what the gateway notes

    def arrive(self, request: SimulatedRequest) -> None:
        super().arrive(request)
        row = len(self.records) - 1
        assert not self.records.refused[row]
        self.log.arrived(
            str(row), request.tenant, request.tier, request.weight, self.now_s, request.input_tokens,
            request.output_tokens,
        )  # fmt: skip

    def _finish(self, sequence: Sequence) -> None:
        entry_id = sequence.sequence_id
        _, request = self._live[entry_id]
        super()._finish(sequence)
        self._ended(entry_id, request, RequestOutcome.COMPLETED)

    def _ended(self, entry_id: str, request: SimulatedRequest, outcome: RequestOutcome) -> None:
        is_complete = outcome is RequestOutcome.COMPLETED
        self.log.ended(
            entry_id, self.now_s, request.input_tokens, 0, request.output_tokens, is_complete=is_complete
        )
        reading = self._reading.pop(entry_id, None)
        first_s = self.records.first_s[int(entry_id)]
        limited_s = self._limited_s.get(request.tenant, 0.0)
        self.facts.append(
            RequestFacts(
                Job(
                    entry_id, request.tenant, request.tier, request.weight, request.arrival_s,
                    request.input_tokens, request.output_tokens,
                ),
                arrived_s=request.arrival_s - limited_s,
                outcome=outcome,
                first_token_s=first_s if first_s >= 0 else None,
                last_token_s=self.now_s if is_complete else None,
                ended_s=self.now_s,
                limited_s=limited_s,
                stalled_s=reading.stalled_s if reading is not None else 0.0,
            )
        )  # fmt: skip

    # ------------------------------------------------------------ slow readers

    def _limit_leases(self, member: Member) -> None:
        """A slow reader gets its lease bit by bit, as the engine's client does it."""
        submit = member.engine.submit

        def limited(wanted: Submit, output_tokens: int) -> None:
            reader = self._readers.get(wanted.tenant_id)
            if reader is not None:
                lease_tokens = min(output_tokens, reader.buffer_tokens)
                wanted = replace(wanted, lease_tokens=lease_tokens)
                self._reading[wanted.sequence_id] = _Reading(
                    reader, int(wanted.sequence_id), output_tokens, lease_tokens
                )
            submit(wanted, output_tokens)

        member.engine.submit = limited  # type: ignore[method-assign]

    def _read(self) -> None:
        member = self.members[0]
        for entry_id, reading in self._reading.items():
            began_s = self.records.first_s[reading.row]
            sequence = member.engine.table.sequences.get(entry_id)
            if began_s < 0 or sequence is None:
                continue
            is_ahead = member.is_busy and sequence.state is SequenceStatus.RUNNING
            if sequence.emitted_tokens - is_ahead >= reading.lease_tokens and reading.rests_since_s < 0:
                reading.rests_since_s = self.now_s
            read = int((self.now_s - began_s) * reading.reader.tokens_per_s)
            lease = min(reading.tokens, reading.reader.buffer_tokens + read)
            if lease > reading.lease_tokens:
                reading.lease_tokens = lease
                member.engine.core.top_up(entry_id, lease)
                if reading.rests_since_s >= 0:
                    reading.stalled_s += self.now_s - reading.rests_since_s
                    reading.rests_since_s = -1.0

    # ------------------------------------------------------------ a dead engine

    def _kill(self) -> None:
        """All that is on the replica is lost with it."""
        member = self.members[0]
        member.is_busy = True
        member.ticket += 1
        self._sizes.clear()
        self.log.serving(self.now_s, 0)
        for entry_id, (row, request) in list(self._live.items()):
            if self.records.dispatched_s[row] >= 0:
                del self._live[entry_id]
                sequence = member.engine.table.sequences.get(entry_id)
                emitted = sequence.emitted_tokens if sequence is not None else 0
                self.flow.finish(entry_id, 0, emitted, self.now_s)
                self._ended(entry_id, request, RequestOutcome.ENGINE_LOST)

    def _restart(self) -> None:
        member = self._member(0)
        member.idle_since_s = member.engine.now_s = self.now_s
        self.members[0] = self._by_id[member.replica_id] = member
        self._sizes.append(member.size)
        self._limit_leases(member)
        self.log.serving(self.now_s, 1)
