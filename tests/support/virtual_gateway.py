"""A gateway's queue and an engine on a virtual clock.

The real flow controller in front of a real engine core; only the model's arithmetic and the passing of time
are virtual. Used by the tests of fairness and of forecasts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.core.core import EngineConfig
from engine.entry import QueueEntry
from engine.forecast.length.length import LengthForecast
from engine.forecast.wait.arrivals import NOTHING_CAME, RecentArrivals
from engine.forecast.wait.forecast import Forecast
from engine.forecast.wait.picture import QUANTILES, AnswerLength
from engine.forecast.wait.replayed_engine import EngineLoad
from engine.grammar.compiler import Grammars
from engine.messages import Grammar, StepTime, Submit, TenantShare
from engine.scheduling.options import PolicyOptions
from engine.step_time.model import PRIOR
from engine.virtual.replica import VirtualReplica
from gateway.estimates.engine_load import flights_of
from gateway.flow.controller import Ticket
from gateway.flow.window import Replica
from tests.support.builders import flow_controller, virtual_prompt
from tests.support.pictures import forecast_of, picture

REPLICA_ID = "engine-0"
LIFE = "engine-0/1"
MODEL_ID = "virtual"


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and how long its answer will really be."""

    tenant_id: str
    input_tokens: int
    output_tokens: int
    tier: int = 1
    weight: float = 1.0
    max_tokens: int = 512
    tpot_target_s: float = 0.0
    grammar: Grammar | None = None


@dataclass(slots=True)
class Done:
    """Outcome of a job."""

    job: Job
    arrived_s: float
    estimate: Forecast | None = None
    dispatched_s: float = -1.0
    first_token_s: float = -1.0
    ended_s: float = -1.0

    @property
    def wait_s(self) -> float:
        """Arrival to dispatch."""
        return self.dispatched_s - self.arrived_s


class VirtualGateway:
    """One gateway, one engine, no network. `on_end` gets every job that ends, and may add others."""

    def __init__(
        self,
        *,
        policy: str = "vtc",
        options: PolicyOptions | None = None,
        max_sequences: int = 16,
        max_batched_tokens: int = 256,
        num_blocks: int = 4096,
        block_tokens: int = 16,
        lookahead_sequences: int = 2,
        step_time: StepTime = PRIOR,
        lengths: LengthForecast | None = None,
        on_end: Callable[[Done], None] = lambda done: None,
        log_records: int = 16,
        grammars: Grammars | None = None,
    ) -> None:
        self.replica = VirtualReplica(
            EngineConfig(
                policy=policy,
                policy_options=options or PolicyOptions(),
                max_sequences=max_sequences,
                max_batched_tokens=max_batched_tokens,
            ),
            grammars=grammars,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            step_time=step_time,
        )
        self.clock = self.replica.clock
        self.lengths = lengths if lengths is not None else LengthForecast()
        self.flow = flow_controller(policy, lookahead=lookahead_sequences, log_records=log_records)
        self.sees_arrivals = True
        self.recent = RecentArrivals()
        self.done: list[Done] = []
        self.steps = 0
        self.words = 0
        """Requests sent with a serial that the engine had reported."""
        self.lifts = 0
        """By the engine, heard of."""
        self._sizes = [Replica(REPLICA_ID, max_sequences, num_blocks * block_tokens, life=LIFE)]
        self._max_batched_tokens = max_batched_tokens
        self._on_end = on_end
        self._records: dict[str, Done] = {}
        self._emitted: dict[str, int] = {}
        self._arrivals: list[tuple[float, int, Job, bool]] = []
        self._numbered = 0

    # ------------------------------------------------------------ arrivals

    def at(self, at_s: float, job: Job, *, estimate: bool = False) -> None:
        """Schedules an arrival."""
        self._numbered += 1
        heapq.heappush(self._arrivals, (at_s, self._numbered, job, estimate))

    def arrive(self, job: Job, *, estimate: bool = False) -> Done:
        """A request arrives now; with `estimate` its forecast is made on arrival."""
        self._numbered += 1
        entry = self._entry(f"request-{self._numbered}", job)
        record = Done(job, self.clock.now_s)
        if estimate:
            record.estimate = self.forecast(entry, job)
        self.recent.observe(entry)
        self._records[entry.entry_id] = record
        ticket = Ticket(
            entry, 1, entry.input_tokens + entry.predicted_output_tokens, max_tokens=job.max_tokens
        )
        assert self.flow.enqueue(ticket, self.clock.now_s) is None
        return record

    def queued(self, tenant_id: str) -> int:
        """Requests of a tenant in the gateway's queue."""
        return sum(ticket.entry.tenant_id == tenant_id for ticket in self.flow.queue.tickets())

    def forecast(self, entry: QueueEntry, job: Job) -> Forecast:
        """As the gateway makes it."""
        snapshot = self.replica.core.snapshot(REPLICA_ID)
        size = self._sizes[0]
        counters = self.flow.counters.clone()
        load = EngineLoad(
            replica_id=REPLICA_ID,
            step_time=snapshot.step_time,
            max_sequences=size.max_sequences,
            max_batched_tokens=self._max_batched_tokens,
            window_sequences=size.max_sequences + self.flow.placement.window.lookahead_sequences,
            window_kv_tokens=size.kv_tokens,
            decode_slots=snapshot.decode_slots,
            flights=flights_of(list(self.flow.in_flight), snapshot),
        )
        out = {flight.entry: flight.emitted_tokens for flight in load.flights}
        seen = picture(
            self.flow.queue_clone(counters),
            counters,
            [load],
            self.clock.now_s,
            lengths={
                each.entry_id: self._length(each, out.get(each, 0))
                for each in [*out, *(ticket.entry for ticket in self.flow.queue.tickets())]
            },
            arrivals=self.recent.pattern(self.clock.now_s) if self.sees_arrivals else NOTHING_CAME,
            lane_of=self.flow.queue.lane_rule.lane,
        )
        high = self.lengths.quantile(entry.tenant_id, MODEL_ID, 0.9, max_tokens=job.max_tokens)
        return forecast_of(entry, seen, (entry.predicted_output_tokens, high))

    # ------------------------------------------------------------ time

    def run(self, *, until_s: float = float("inf"), while_: Callable[[], bool] = lambda: True) -> None:
        """Goes on until nothing is left to do, until `until_s`, or while `while_` says so."""
        while while_() and self.clock.now_s < until_s:
            while self._arrivals and self._arrivals[0][0] <= self.clock.now_s:
                _, _, job, estimate = heapq.heappop(self._arrivals)
                self.arrive(job, estimate=estimate)
            self._dispatch()
            if self.replica.core.has_work():
                self._step()
            elif self._arrivals:
                self.clock.advance(self._arrivals[0][0] - self.clock.now_s)
            else:
                return

    def _dispatch(self) -> None:
        for turn in self.flow.dispatch(self.clock.now_s, self._sizes):
            entry = turn.ticket.entry
            record = self._records[entry.entry_id]
            record.dispatched_s = self.clock.now_s
            self.words += turn.heard > 0
            job = record.job
            refused = self.replica.submit(
                Submit(
                    sequence_id=entry.entry_id,
                    request_id=entry.entry_id,
                    tenant_id=entry.tenant_id,
                    prompt_token_ids=virtual_prompt(entry.entry_id, job.input_tokens),
                    max_tokens=job.max_tokens,
                    lease_tokens=job.max_tokens,
                    tier=turn.tier,
                    weight=job.weight,
                    counter=turn.counter,
                    had=turn.had,
                    heard=turn.heard,
                    is_owed=turn.is_owed,
                    predicted_output_tokens=entry.predicted_output_tokens,
                    tpot_target_s=job.tpot_target_s,
                    grammar=job.grammar,
                ),
                output_tokens=job.output_tokens,
            )
            assert refused is None, refused

    def _step(self) -> None:
        result = self.replica.step()
        self.steps += 1
        service = {
            tenant_id: TenantShare(
                share.total.computed_tokens, share.total.emitted_tokens, share.serials, share.lifts
            )
            for tenant_id, share in result.shares.items()
        }
        self.lifts += sum(len(share.lifts) for share in service.values())
        self.flow.heard(REPLICA_ID, LIFE, service)
        for deltas in result.deltas.values():
            for delta in deltas:
                record = self._records[delta.sequence_id]
                emitted = self._emitted.get(delta.sequence_id, 0) + len(delta.token_ids)
                self._emitted[delta.sequence_id] = emitted
                if record.first_token_s < 0 < emitted:
                    record.first_token_s = self.clock.now_s
                self.flow.progress(delta.sequence_id, emitted - delta.forced_tokens, 1)
                if delta.outcome is not None:
                    del self._records[delta.sequence_id], self._emitted[delta.sequence_id]
                    outcome = delta.outcome
                    forced = outcome.forced_tokens
                    inputs, outputs = outcome.computed_tokens + forced, outcome.emitted_tokens - forced
                    self.flow.finish(delta.sequence_id, inputs, outputs, self.clock.now_s)
                    record.ended_s = self.clock.now_s
                    self.lengths.observe(record.job.tenant_id, MODEL_ID, outcome.emitted_tokens)
                    self.done.append(record)
                    self._on_end(record)

    def _entry(self, entry_id: str, job: Job) -> QueueEntry:
        median, high = (
            self.lengths.quantile(job.tenant_id, MODEL_ID, share, max_tokens=job.max_tokens)
            for share in (0.5, 0.9)
        )
        return QueueEntry(
            entry_id, job.tenant_id, self.clock.now_s, job.input_tokens, median, job.tier, job.weight, high
        )

    def _length(self, entry: QueueEntry, emitted: int) -> AnswerLength:
        most = self._records[entry.entry_id].job.max_tokens
        quantiles = [self.lengths.quantile(entry.tenant_id, MODEL_ID, u, emitted, most) for u in QUANTILES]
        return AnswerLength(most, quantiles=quantiles)


def service(gateway: VirtualGateway) -> dict[str, int]:
    """Cost tokens each tenant has had from the engine: computed input + 2 x emitted."""
    totals = gateway.replica.core.snapshot(REPLICA_ID).service
    return {tenant_id: had.computed_tokens + 2 * had.emitted_tokens for tenant_id, had in totals.items()}


def share_within(pairs: Iterable[tuple[float, float]], factor: float, floor_s: float) -> float:
    """Share of (estimated, actual) pairs that differ by at most `factor`, or by at most `floor_s`."""
    verdicts = [
        abs(estimated - actual) <= floor_s
        or (min(estimated, actual) > 0 and max(estimated, actual) <= factor * min(estimated, actual))
        for estimated, actual in pairs
    ]
    return sum(verdicts) / len(verdicts)
