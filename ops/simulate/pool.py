"""A gateway's queue and the engines behind it, on virtual time.

The gateway decides whenever a request arrives or ends. Between decisions a replica takes steps one by one, or
many at a time (`engine/virtual/fast_replica.py`); a request that reaches it in the middle of a run ends the
run with the step under way. `runs=False` takes every step by itself: the twin of the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from engine.core.core import EngineConfig
from engine.entry import COUNTER_SCALE, INPUT_TOKEN_COST, OUTPUT_TOKEN_COST, QueueEntry
from engine.messages import EngineKnobs, SamplingParams, Submit, TenantShare
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.knobs import check_knobs
from engine.scheduling.options import PolicyOptions
from engine.scheduling.policy import SIMULATED, make_policy
from engine.scheduling.step_counters import TierTenant
from engine.sequence import Sequence, SequenceStatus
from engine.virtual.fast_replica import SimulatedReplica, StepsTaken
from engine.virtual.step_shapes import make_shapes
from gateway.domain.targets import NO_TARGETS, RequestTargets, targets_of
from gateway.flow.controller import Dispatch, FlowController, Ticket
from gateway.flow.knobs import NEVER_S, QueueSettings
from gateway.flow.window import Replica, WindowRule
from ops.simulate.machines.machines import Machine
from ops.simulate.predictions import Learned, Predictions
from ops.simulate.records import Records
from ops.simulate.stepped_replica import SteppedReplica
from ops.simulate.traffic.requests import PREFIX_BLOCK_TOKENS, SimulatedRequest

LOOKAHEAD_SEQUENCES = 2
KV_WINDOW = 1.0
"""Defaults of the gateway."""
DECLARED_TOKENS = 4096
"""`max_tokens` of requests, which must not give the answer's length away; longer answers declare theirs."""
MOST_QUEUED = 5_000_000
SIMULATED_QUEUE = QueueSettings(
    MOST_QUEUED, MOST_QUEUED, NEVER_S, WindowRule(LOOKAHEAD_SEQUENCES, KV_WINDOW), log_records=1
)


@dataclass(slots=True)
class Member:
    number: int
    replica_id: str
    engine: SimulatedReplica
    size: Replica
    is_busy: bool = False
    ticket: int = 0
    """Number of the event that ends it; its events with other numbers are out of date."""
    happened: StepsTaken | None = None
    """Results of the step under way, known when it ends."""
    idle_since_s: float = 0.0
    idle_gaps: int = 0
    longest_idle_s: float = 0.0
    waits_until_s: float | None = None
    before: dict[str, int] = field(default_factory=dict)
    """Service of its tenants (scaled, per weight) before the step under way, which the engine counts."""
    heard: dict[str, int] = field(default_factory=dict)
    """Service of its tenants that the gateway knows of."""
    live: dict[str, int] = field(default_factory=dict)
    """Number of its requests that have not ended, by tenant."""
    weights: dict[str, float] = field(default_factory=dict)
    """Of every tenant that it ever served, by its latest request."""
    within: list[tuple[int, int, Sequence]] = field(default_factory=list)
    """A heap of sequences within their predictions, by the step after which each may exceed its own."""
    beyond: dict[Sequence, int] = field(default_factory=dict)
    """Sequences beyond their predictions, with the output that the gateway knows of."""
    lifts: dict[TierTenant, int] = field(default_factory=dict)
    """Lifts of the steps that ended, which the gateway does not know of."""


@dataclass(slots=True)
class PoolObserver:
    """Hooks into a run; see `ops/simulate/figures/fairness.py`."""

    on_decision: Callable[[SimulatedPool], None] = lambda pool: None
    on_rows: Callable[[int], None] = lambda rows: None
    """Requests that have arrived or ended since, for a progress bar."""
    admits: Callable[[SimulatedPool, SimulatedRequest], bool] = lambda pool, request: True
    """Whether a request that arrives is queued; its row is the last one. See `admission.py`."""
    on_ended: Callable[[SimulatedPool, int], None] = lambda pool, row: None
    on_event: Callable[[SimulatedPool], None] = lambda pool: None
    """Before every decision; more requests may `arrive`."""


class PoolBudget(Protocol):
    def lend(self, share: float) -> None:
        """Sets the share of spare capacity that a control loop lends to limits with a ceiling."""
        ...

    def arrive(self, row: int, request: SimulatedRequest, high_tokens: int, most_tokens: int) -> None:
        """A request with limits arrives: it is queued (`SimulatedPool.queue_up`) or refused, now or later."""
        ...

    def lease_of(self, entry_id: str) -> int | None:
        """Output tokens that a request may emit before it is topped up; None: all."""
        ...

    def look(self, entry_id: str, emitted_tokens: int) -> None:
        """A request has emitted its `look_at_tokens`, or has used up its lease."""
        ...

    def ended(self, entry_id: str, output_tokens: int) -> None: ...


class SimulatedPool:
    """Replicas behind one queue, for one run. Raises `UnknownPolicy` and ValueError for options."""

    # Options of an experiment: a caller names two or three of them.
    def __init__(
        self,
        policy: str,
        machine: Machine,
        *,
        replicas: int = 1,
        options: PolicyOptions | None = None,
        predictions: Predictions | None = None,
        prefix_caching: bool = True,
        runs: bool = True,
        watch: PoolObserver | None = None,
        stepwise: bool = False,
        declared_tokens: int = DECLARED_TOKENS,
        flow: Mapping[str, Any] | None = None,
        budget: Callable[[SimulatedPool], PoolBudget] | None = None,
    ) -> None:
        """`stepwise`: replicas are whole engine cores, and the gateway decides after each step.
        `declared_tokens`: `max_tokens` of requests without their own. `flow`: settings of the queue
        that differ, and its `scorer`."""
        self.policy = policy
        self.machine = machine
        self.records = Records()
        self.now_s = 0.0
        self.service: dict[str, int] = {}
        """Cost tokens by tenant at the last decision: prompts with the first token, outputs as they come."""
        self.queued: dict[str, int] = {}
        self.emptied: set[str] = set()
        """Tenants that had no waiting request at some instant; the observer empties it."""
        self._predictions = predictions if predictions is not None else Learned()
        self._prefix_caching = prefix_caching
        self._runs = runs
        self._stepwise = stepwise
        self._declared_tokens = declared_tokens
        self.watch = watch or PoolObserver()
        made = SIMULATED.get(policy, policy)
        of_queue = dict(flow or {})
        scorer = of_queue.pop("scorer", None)
        settings = replace(SIMULATED_QUEUE, **of_queue)
        self.flow = FlowController(make_policy(made, options).order, ServiceCounters(), settings, scorer)
        self._config = EngineConfig(
            policy=made,
            policy_options=options or PolicyOptions(),
            max_batched_tokens=machine.max_batched_tokens,
            max_sequences=machine.max_sequences,
            max_waiting=MOST_QUEUED,
            prefix_caching=prefix_caching,
        )
        self.members = [self._member(number) for number in range(replicas)]
        self._by_id = {member.replica_id: member for member in self.members}
        self._sizes = [member.size for member in self.members]
        self._events: list[tuple[float, int, int]] = []
        """A heap of ends of steps and runs: instant, replica, ticket."""
        self._live: dict[str, tuple[int, SimulatedRequest]] = {}
        """Row and request of all that have not ended, by entry id."""
        self._arrivals: Iterator[SimulatedRequest] = iter(())
        self._coming: SimulatedRequest | None = None
        self._emitted: dict[str, int] = {}
        """Output tokens that `service` holds, by running request."""
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        """A heap of scheduled actions: instant, serial number, action."""
        self._serial = 0
        self._cause: Member | None = None
        """The replica whose end is being decided on; None: an arrival or an action."""
        self.budget = budget(self) if budget is not None else None

    def _member(self, number: int) -> Member:
        machine, replica_id = self.machine, f"replica-{number}"
        make = SteppedReplica if self._stepwise else SimulatedReplica
        engine = make(
            self._config,
            machine.timing,
            make_shapes(
                padded=machine.padded,
                keeps_rows=machine.keeps_rows or self.policy in SIMULATED,
            ),
            num_blocks=machine.num_blocks,
            block_tokens=machine.block_tokens,
            context_tokens=machine.context_tokens,
            step_time=machine.step_time,
        )
        size = Replica(
            replica_id,
            machine.max_sequences,
            machine.num_blocks * machine.block_tokens,
            machine.step_time,
            machine.max_batched_tokens,
        )
        return Member(number, replica_id, engine, size)

    def run(self, requests: Iterable[SimulatedRequest], *, until_s: float = float("inf")) -> None:
        """Serves `requests` (in order of arrival) to their end, or until `until_s`. Raises `RuntimeError`
        where work is left and no event is due: a bug."""
        self._arrivals = iter(requests)
        self._coming = next(self._arrivals, None)
        events = self._events
        while True:
            coming = self._coming
            while events and self.members[events[0][1]].ticket != events[0][2]:
                heapq.heappop(events)
            arrival_s = coming.arrival_s if coming is not None else float("inf")
            timer_s = self._timers[0][0] if self._timers else float("inf")
            end_s = events[0][0] if events else float("inf")
            if min(arrival_s, timer_s, end_s) > until_s:
                break
            if coming is not None and arrival_s <= min(timer_s, end_s):
                self.now_s = max(self.now_s, arrival_s)
                self._decide(None, arriving=coming)
            elif self._timers and timer_s <= end_s:
                self.now_s, _, action = heapq.heappop(self._timers)
                self._decide(None, action=action)
            elif events:
                self.now_s, number, _ = heapq.heappop(events)
                self._end(self.members[number])
            else:
                break
        if until_s == float("inf") and self._live:
            raise RuntimeError(f"{len(self._live)} requests are left and nothing runs under {self.policy}")
        for member in self.members:
            if not member.is_busy:
                member.longest_idle_s = max(member.longest_idle_s, self.now_s - member.idle_since_s)

    def _end(self, member: Member) -> None:
        engine, happened = member.engine, member.happened
        if member.is_busy:
            member.idle_since_s = self.now_s
        member.is_busy, member.happened = False, None
        member.before = {}
        if engine.in_run:
            engine.end_run()
        if happened is not None:
            for key, amount in happened.lifts.items():
                member.lifts[key] = member.lifts.get(key, 0) + amount
            for sequence in happened.first:
                self._first(sequence)
            if happened.service is not None:
                for tenant, had in happened.service.items():
                    self._serve(
                        tenant,
                        had.computed_tokens * INPUT_TOKEN_COST + had.emitted_tokens * OUTPUT_TOKEN_COST,
                    )
        if self.budget is not None:
            for sequence, emitted in engine.to_look_at():
                self.budget.look(sequence.submit.sequence_id, emitted)
        if happened is not None and (happened.finished or self._stepwise):
            self._decide(member, finished=happened.finished)
            return
        self._begin(member)

    def _decide(
        self,
        member: Member | None,
        *,
        arriving: SimulatedRequest | None = None,
        action: Callable[[], None] | None = None,
        finished: Iterable[Sequence] = (),
    ) -> None:
        """After an arrival, an action that was due, or answers that ended at `member`."""
        self._cause = member
        if arriving is not None or action is not None or len(self.flow):
            for other in self.members:
                self._hear(other, member)
            for other in self.members:
                self._settle_emitted(other, member)
        elif member is not None:
            self._hear(member, member)
        for sequence in finished:
            self._finish(sequence)
        if arriving is not None:
            self.arrive(arriving)
            # Before the turns: a source may look at the pool.
            self._coming = next(self._arrivals, None)
        if action is not None:
            action()
        self.watch.on_event(self)
        for turn in self.flow.dispatch(self.now_s, self._sizes):
            self._send(turn, member)
        self.watch.on_decision(self)
        for other in self.members:
            self._begin(other)

    def _begin(self, member: Member) -> None:
        engine = member.engine
        if member.is_busy or not engine.has_work:
            return
        idle_s = self.now_s - engine.now_s
        if idle_s > 0:
            engine.now_s = self.now_s
        steps = engine.steps_alike() if self._runs else 0
        if steps:
            ends_s = engine.begin_run(steps)[-1]
        else:
            standings = engine.table.standings
            member.before = {tenant_id: standings.service(tenant_id) for tenant_id in member.live}
            happened = engine.step()
            if not happened.num_tokens:
                self._wait(member, happened)
                return
            member.happened = happened
            ends_s = engine.now_s
        if self.now_s > member.idle_since_s:
            member.idle_gaps += 1
            member.longest_idle_s = max(member.longest_idle_s, self.now_s - member.idle_since_s)
        member.is_busy = True
        member.waits_until_s = None
        member.ticket += 1
        heapq.heappush(self._events, (ends_s, member.number, member.ticket))

    def _wait(self, member: Member, happened: StepsTaken) -> None:
        """The policy waits on purpose: it is asked again then, or when something arrives."""
        until_s = happened.wait_until_s
        if until_s is None or until_s <= self.now_s:
            raise RuntimeError(
                f"{member.replica_id} computes nothing at {self.now_s:.3f} s under {self.policy}"
            )
        if member.waits_until_s != until_s:
            member.waits_until_s = until_s
            member.ticket += 1
            heapq.heappush(self._events, (until_s, member.number, member.ticket))

    def arrive(self, request: SimulatedRequest) -> None:
        """A request arrives now; for `PoolObserver.on_event`."""
        row = self.records.arrive(request)
        self.watch.on_rows(1)
        machine = self.machine
        tokens = request.input_tokens + request.output_tokens
        is_too_long = (
            tokens > machine.context_tokens or tokens - 1 > machine.num_blocks * machine.block_tokens
        )
        if is_too_long or not self.watch.admits(self, request):
            self.refuse(row)
        elif self.budget is not None and request.limits is not None:
            most = self._most_tokens(request)
            self.budget.arrive(row, request, min(self._predictions.predict(request)[1], most), most)
        else:
            self.queue_up(row, request)

    def refuse(self, row: int) -> None:
        self.records.refused[row] = 1
        self.watch.on_rows(1)

    def queue_up(self, row: int, request: SimulatedRequest) -> None:
        entry_id = str(row)
        median, high = self._predictions.predict(request)
        most = self._most_tokens(request)
        median, high = min(median, most), min(high, most)
        entry = QueueEntry(
            entry_id,
            request.tenant,
            self.now_s,
            request.input_tokens,
            median,
            request.tier,
            request.weight,
            high,
            deadline_s=_targets(request, median).deadline_s,
        )
        ticket = Ticket(
            entry,
            1,
            request.input_tokens + median,
            max_tokens=most,
            reserved_cost_per_s=request.reserved_cost_per_s,
            reserved_tier=request.reserved_tier,
            prefix_hashes=request.prefix_hashes,
        )
        if self.flow.enqueue(ticket, self.now_s) is not None:
            self.records.refused[row] = 1
            return
        self._live[entry_id] = (row, request)
        self.queued[request.tenant] = self.queued.get(request.tenant, 0) + 1

    def _most_tokens(self, request: SimulatedRequest) -> int:
        machine = self.machine
        room = min(machine.context_tokens, machine.num_blocks * machine.block_tokens + 1)
        declared = request.max_tokens or self._declared_tokens
        return max(request.output_tokens, min(declared, room - request.input_tokens))

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._timers, (at_s, self._serial, action))

    def top_up(self, entry_id: str, lease_tokens: int, look_at_tokens: int) -> None:
        """Sets the tokens that a running request may emit, and the number at which it is looked at again."""
        member = self.members[self.records.replica[self._live[entry_id][0]]]
        member.engine.top_up(entry_id, lease_tokens, look_at_tokens)

    def cut(self, entry_id: str, output_tokens: int) -> None:
        """Ends the answer of a running request after so many tokens: its budget is spent."""
        row, request = self._live[entry_id]
        self.records.output_tokens[row] = output_tokens
        self._live[entry_id] = row, replace(request, output_tokens=output_tokens)
        ended = self.members[self.records.replica[row]].engine.cut(entry_id, output_tokens)
        if ended is not None:
            self._finish(ended)
            # There is a free place: the gateway decides.
            self.at(self.now_s, lambda: None)

    def emitted_by_now(self, entry_id: str) -> int:
        member = self.members[self.records.replica[self._live[entry_id][0]]]
        sequence = member.engine.table.sequences[entry_id]
        # A resting sequence has no part in the step under way.
        ahead = self._ahead(member, None) if sequence.state is SequenceStatus.RUNNING else 0
        return max(1, len(sequence.token_ids) - sequence.prompt_tokens - ahead)

    def set_engine_knobs(self, knobs: EngineKnobs) -> None:
        """From the engines' next steps on; call it in a decision. Raises ValueError, with nothing changed."""
        check_knobs(knobs)
        for member in self.members:
            self._end_run(member, self._cause)
            member.engine.set_knobs(knobs)

    def _hear(self, member: Member, cause: Member | None) -> None:
        """Takes over what a replica's ended steps reported and the gateway does not know yet."""
        engine = member.engine
        standings = engine.table.standings
        ended = engine.steps_ended(self.now_s, at_now=_is_before(member, cause)) if engine.in_run else 0
        in_run = engine.service_of_run(ended)
        under_way = member.happened
        lifts: dict[str, dict[int, int]] = {}
        for (tier, tenant_id), amount in member.lifts.items():
            lifts.setdefault(tenant_id, {})[tier] = amount
        member.lifts = {}
        shares: dict[str, TenantShare] = {}
        for tenant_id in member.live.keys() | lifts.keys():
            counted = standings.service(tenant_id)
            service = member.before.get(tenant_id, counted) + in_run.get(tenant_id, 0)
            grown = service - member.heard.get(tenant_id, 0)
            if not grown and tenant_id not in lifts:
                continue
            member.heard[tenant_id] = service
            serials = {
                tier: serial - counted + service for tier, serial in standings.serials(tenant_id).items()
            }
            if under_way is not None:
                for tier in serials:
                    serials[tier] -= under_way.lifts.get((tier, tenant_id), 0)
            cost = round(grown * member.weights.get(tenant_id, 1.0) / COUNTER_SCALE)
            shares[tenant_id] = TenantShare(cost, 0, serials, lifts.get(tenant_id, {}))
        if shares:
            self.flow.heard(member.replica_id, "", shares)

    def _send(self, turn: Dispatch, cause: Member | None) -> None:
        entry = turn.ticket.entry
        row, request = self._live[entry.entry_id]
        self.records.dispatched_s[row] = self.now_s
        self.records.displaced_tokens[row] = sum(other.kv_tokens for other in turn.displaced)
        self.queued[request.tenant] -= 1
        if not self.queued[request.tenant]:
            self.emptied.add(request.tenant)
        member = self._by_id[turn.replica_id]
        self.records.replica[row] = member.number
        engine = member.engine
        if not self._end_run(member, cause) and not member.is_busy and self.now_s > engine.now_s:
            engine.now_s = self.now_s
        most = turn.ticket.max_tokens
        covered = None if self.budget is None else self.budget.lease_of(entry.entry_id)
        engine.submit(
            Submit(
                sequence_id=entry.entry_id,
                request_id=entry.entry_id,
                tenant_id=request.tenant,
                prompt_token_ids=self._prompt(request, row),
                max_tokens=most,
                lease_tokens=most if covered is None else min(covered, most),
                sampling=SAMPLING,
                tier=turn.tier,
                weight=request.weight,
                counter=turn.counter,
                had=turn.had,
                heard=turn.heard,
                is_owed=turn.is_owed,
                predicted_output_tokens=entry.predicted_output_tokens,
                predicted_high_tokens=entry.predicted_high_tokens,
                **_targets(request, entry.predicted_output_tokens).for_engine(self.now_s),
            ),
            request.output_tokens,
        )
        member.live[request.tenant] = member.live.get(request.tenant, 0) + 1
        member.weights[request.tenant] = request.weight
        self._watch_for_excess(member, engine.table.sequences[entry.entry_id], 0, self._ahead(member, cause))

    def _end_run(self, member: Member, cause: Member | None) -> bool:
        """Ends a run with the step under way; False: there is no run."""
        engine = member.engine
        if not engine.in_run:
            return False
        at_now = _is_before(member, cause)
        steps = engine.steps_begun(self.now_s, at_now=at_now)
        ended = engine.service_of_run(engine.steps_ended(self.now_s, at_now=at_now))
        standings = engine.table.standings
        member.before = {
            tenant_id: standings.service(tenant_id) + ended.get(tenant_id, 0) for tenant_id in member.live
        }
        member.ticket += 1
        heapq.heappush(self._events, (engine.end_run(steps), member.number, member.ticket))
        member.happened = None
        return True

    def _prompt(self, request: SimulatedRequest, row: int) -> list[int]:
        """Token ids below 2^31: a block's id for each token of it; what no id covers is of this row alone."""
        if request.prompt:
            return list(request.prompt)
        if not self._prefix_caching:
            return [0] * request.input_tokens
        tokens: list[int] = []
        for block in request.prefix_blocks:
            tokens += [block] * PREFIX_BLOCK_TOKENS
        del tokens[request.input_tokens :]
        own = request.input_tokens - len(tokens)
        # A token that begins a block and is no block's id.
        return tokens + [_OWN_TOKENS + row % _OWN_TOKENS] * own

    def _first(self, sequence: Sequence) -> None:
        row, request = self._live[sequence.submit.sequence_id]
        self.records.first_s[row] = self.now_s
        self.flow.progress(sequence.submit.sequence_id, 1, 1)
        self._emitted[sequence.submit.sequence_id] = 0
        if not self._stepwise:
            self._serve(request.tenant, sequence.computed_prompt_tokens * INPUT_TOKEN_COST)

    def _finish(self, sequence: Sequence) -> None:
        entry_id = sequence.submit.sequence_id
        row, request = self._live.pop(entry_id)
        records = self.records
        member = self.members[records.replica[row]]
        member.beyond.pop(sequence, None)
        member.live[request.tenant] -= 1
        if not member.live[request.tenant]:
            del member.live[request.tenant]
        records.last_s[row] = self.now_s
        records.cached_tokens[row] = sequence.cached_tokens
        records.preemptions[row] = sequence.preemptions
        records.recomputed_tokens[row] = sequence.recomputed_tokens
        records.set_back[row] = sequence.times_set_back
        emitted, known = sequence.emitted_tokens, self._emitted.pop(entry_id)
        if not self._stepwise:
            self._serve(request.tenant, (emitted - known) * OUTPUT_TOKEN_COST)
        self.flow.finish(entry_id, sequence.computed_prompt_tokens, emitted, self.now_s)
        self._predictions.ended(request)
        if self.budget is not None:
            self.budget.ended(entry_id, emitted)
        self.watch.on_ended(self, row)
        self.watch.on_rows(1)

    def _serve(self, tenant: str, cost: int) -> None:
        self.service[tenant] = self.service.get(tenant, 0) + cost

    def _settle_emitted(self, member: Member, cause: Member | None) -> None:
        """Reports output beyond its prediction; up to there the flow controller's charges do not change."""
        ahead = self._ahead(member, cause)
        within, steps = member.within, member.engine.work.steps - ahead
        while within and within[0][0] <= steps:
            sequence = heapq.heappop(within)[2]
            if sequence.state is not SequenceStatus.FINISHED:
                emitted = len(sequence.token_ids) - sequence.prompt_tokens - min(ahead, 0)
                self._watch_for_excess(member, sequence, emitted, ahead)
        progress = self.flow.progress
        for sequence, known in member.beyond.items():
            emitted = len(sequence.token_ids) - sequence.prompt_tokens - ahead
            if emitted != known and sequence.state is SequenceStatus.RUNNING:
                member.beyond[sequence] = emitted
                progress(sequence.submit.sequence_id, emitted, 1)

    def _watch_for_excess(self, member: Member, sequence: Sequence, emitted: int, ahead: int) -> None:
        """Schedules a look for when it may exceed its prediction: at most one token a step."""
        left = sequence.submit.predicted_output_tokens - emitted
        if left < 0:
            member.beyond[sequence] = 0
        else:
            self._serial += 1
            due = member.engine.work.steps - ahead + left + 1
            heapq.heappush(member.within, (due, self._serial, sequence))

    def _ahead(self, member: Member, cause: Member | None) -> int:
        """Tokens in its sequences that are not emitted yet (negative: emitted and not in them)."""
        if member.engine.in_run:
            return -member.engine.steps_ended(self.now_s, at_now=_is_before(member, cause))
        return int(member.is_busy)

    def service_by_now(self) -> dict[str, int]:
        """Cost tokens of each tenant by now: prompts from their first token, outputs as they come."""
        for member in self.members:
            engine = member.engine
            ahead = -engine.steps_ended(self.now_s, at_now=True) if engine.in_run else int(member.is_busy)
            for sequence in engine.table.running:
                known = self._emitted.get(sequence.submit.sequence_id)
                if known is None:
                    continue
                emitted = max(known, len(sequence.token_ids) - sequence.prompt_tokens - ahead)
                self._emitted[sequence.submit.sequence_id] = emitted
                self._serve(sequence.submit.tenant_id, (emitted - known) * OUTPUT_TOKEN_COST)
        return self.service


SAMPLING = SamplingParams(seed=None)
_OWN_TOKENS = 1 << 30


def _targets(request: SimulatedRequest, output_tokens: int) -> RequestTargets:
    """As in a gateway, from the tenant's SLO."""
    if request.e2e_target_s is None:
        return NO_TARGETS
    slo_s = {"e2e": request.e2e_target_s}
    return targets_of(slo_s, None, since_s=request.arrival_s, expires_s=None, output_tokens=output_tokens)


def _is_before(member: Member, cause: Member | None) -> bool:
    """Of two events at one instant arrivals come first, then replicas by number."""
    return cause is not None and member.number < cause.number


@dataclass(slots=True)
class Busy:
    """How the replicas of a run spent their time, all together."""

    steps: int = 0
    steps_in_runs: int = 0
    busy_s: float = 0.0
    computed_tokens: int = 0
    padded_tokens: int = 0
    preemptions: int = 0
    idle_gaps: int = 0
    longest_idle_s: float = 0.0
    kv_use: float = 0.0
    """Mean share of the KV cache that was held while steps ran."""
    most_kv_use: float = 0.0


def busy(pool: SimulatedPool) -> Busy:
    total = Busy()
    blocks = pool.machine.num_blocks
    held = 0.0
    for member in pool.members:
        work = member.engine.work
        total.steps += work.steps
        total.steps_in_runs += work.steps_in_runs
        total.busy_s += work.busy_s
        total.computed_tokens += work.computed_tokens
        total.padded_tokens += member.engine.shapes.padded_tokens
        total.preemptions += member.engine.table.preemptions
        total.idle_gaps += member.idle_gaps
        total.longest_idle_s = max(total.longest_idle_s, member.longest_idle_s)
        total.most_kv_use = max(total.most_kv_use, work.most_kv_blocks / blocks)
        held += work.kv_block_seconds
    total.kv_use = held / blocks / total.busy_s if total.busy_s else 0.0
    return total
