"""Simulates when requests would have got their tokens under an ideal fluid fair share.

The engine's step, divided like a fluid. Places (sequences, as memory allows) are weighted max-min shares of
the backlogged tenants, a higher tier's first; within a tenant in order of arrival. A place may be given away
at any token and cannot be cut: less than one goes to the tenant that has one, then to the one with the least
service for its weight since it was idle. Nor does a tenant get more than its weighted share of a step's time
while others use theirs, so that a large prompt cannot stretch every step. No real scheduler can do this, as
it deals in whole tokens and steps, so policies are measured by it (generalised processor sharing: Parekh and
Gallager 1993; max-min by water-filling: Bertsekas and Gallager, Data Networks, 6.5.2).

A request alone on an idle engine is the case of one job. Pure; times in seconds on any one clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.messages import StepTime

MAX_EVENTS = 60_000
_DONE = 1e-6


class Job(msgspec.Struct, frozen=True):
    """One request as it really was, with its size known or predicted."""

    job_id: str
    tenant_id: str
    tier: int
    weight: float
    arrived_s: float
    input_tokens: int
    """To compute, all sequences together, without prefix hits."""
    output_tokens: int
    """Emitted, all sequences together."""
    sequences: int = 1
    cached_tokens: int = 0
    left_s: float = math.inf
    """When it was taken away unfinished: from then on it takes no share."""

    @property
    def kv_tokens(self) -> int:
        return self.input_tokens + self.cached_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class FluidMachine:
    step_time: StepTime
    max_sequences: int
    max_batched_tokens: int
    kv_tokens: int
    replicas: int = 1

    @property
    def longest_step_s(self) -> float:
        """The time of a full step: no engine changes a step that has begun."""
        return self.step_s(self.max_batched_tokens, 0, self.max_sequences)

    def step_s(self, tokens: float, context_tokens: float, sequences: float) -> float:
        """Seconds for one engine's step."""
        model = self.step_time
        return (
            model.base_s
            + model.per_token_s * tokens
            + model.per_context_token_s * context_tokens
            + model.per_sequence_s * sequences
        )


class Finish(msgspec.Struct, frozen=True):
    """Infinite: not within the run."""

    first_token_s: float
    last_token_s: float


def fair_share(
    jobs: Iterable[Job],
    machine: FluidMachine,
    wanted: Collection[str] | None = None,
    serving: Sequence[tuple[float, int]] = (),
) -> dict[str, Finish]:
    """By job id; ends with `wanted`. `serving`: (since when, how many replicas); before the first, all."""
    chosen = list(jobs)
    fluid = FluidShare(chosen, machine, serving)
    fluid.run(wanted=wanted)
    ids = wanted if wanted is not None else [job.job_id for job in chosen]
    return {job_id: fluid.finish(job_id) for job_id in ids}


def alone(job: Job, machine: FluidMachine) -> Finish:
    return fair_share([job], machine)[job.job_id]


def max_min(demands: Sequence[float], weights: Sequence[float], capacity: float) -> list[float]:
    """Weighted max-min: none exceeds its demand; one below it has, for its weight, no less than any other."""
    if sum(demands) <= capacity:
        return [float(demand) for demand in demands]
    shares = [0.0] * len(demands)
    left, weight_left = float(capacity), float(sum(weights))
    # The least demand for its weight is satisfied first; the rest is for the others.
    for index in sorted(range(len(demands)), key=lambda place: demands[place] / weights[place]):
        shares[index] = min(float(demands[index]), max(0.0, left * weights[index] / weight_left))
        left -= shares[index]
        weight_left -= weights[index]
    return shares


@dataclass(slots=True, eq=False)
class _LiveJob:
    job: Job
    prompt_left: float
    output_left: float
    first_token_s: float = math.inf
    rate: float = 0.0
    """Tokens a second, of its prompt or of its answer, whichever it is at."""
    places: float = 0.0

    @staticmethod
    def of(job: Job) -> _LiveJob:
        return _LiveJob(job, float(max(1, job.input_tokens)), float(job.output_tokens))

    @property
    def is_decoding(self) -> bool:
        return self.prompt_left <= _DONE

    @property
    def context_tokens(self) -> float:
        """Mean context of each of its tokens over the rest of this phase."""
        job = self.job
        prompt = (job.input_tokens + job.cached_tokens) / job.sequences
        if self.is_decoding:
            return prompt + (job.output_tokens - self.output_left / 2) / job.sequences
        return job.cached_tokens / job.sequences + job.input_tokens / job.sequences / 2

    @property
    def tokens_a_step(self) -> float:
        """What it can use of a step: one token for each answer, or the whole prompt (not its rest)."""
        if self.is_decoding:
            return self.places
        return max(1.0, float(self.job.input_tokens)) * self.places / self.job.sequences


@dataclass(slots=True, eq=False)
class _TenantLine:
    weight: float
    jobs: list[_LiveJob] = field(default_factory=list)
    sequences: int = 0
    kv_tokens: int = 0
    served: float = 0.0
    """Cost tokens per weight; lifted when it returns from being idle."""

    def add(self, live: _LiveJob) -> None:
        self.jobs.append(live)
        self.sequences += live.job.sequences
        self.kv_tokens += live.job.kv_tokens
        self.weight = live.job.weight

    def remove(self, live: _LiveJob) -> None:
        self.jobs.remove(live)
        self.sequences -= live.job.sequences
        self.kv_tokens -= live.job.kv_tokens

    @property
    def has_place(self) -> bool:
        return bool(self.jobs) and self.jobs[0].places > 0


class FluidShare:
    """One run through time, which can be stopped and forked."""

    def __init__(
        self, jobs: Iterable[Job], machine: FluidMachine, serving: Sequence[tuple[float, int]] = ()
    ) -> None:
        self._machine = machine
        self._serving = serving
        self._coming = sorted(jobs, key=lambda job: (job.arrived_s, job.job_id), reverse=True)
        self._lines: dict[int, dict[str, _TenantLine]] = {}
        self._in_step: list[_LiveJob] = []
        self._leaving: list[tuple[float, int, _LiveJob]] = []
        self._num_live = 0
        self._events = 0
        self._now_s = self._coming[-1].arrived_s if self._coming else 0.0
        self.finished: dict[str, Finish] = {}
        self.had: dict[tuple[str, int], float] = {}

    def fork_with(self, job: Job) -> FluidShare:
        """An independent copy with `job` added. Raises `ValueError` for a job that arrived before now."""
        has_begun = self._num_live > 0 or bool(self.finished)
        if has_begun and job.arrived_s < self._now_s:
            raise ValueError(f"job {job.job_id} came at {job.arrived_s}, and it is {self._now_s} already")
        fork = FluidShare([*self._coming, job], self._machine, self._serving)
        if has_begun:
            fork._now_s = self._now_s
            fork.had = dict(self.had)
        for tier, lines in self._lines.items():
            for tenant_id, line in lines.items():
                copy = fork._lines.setdefault(tier, {})[tenant_id] = replace(line, jobs=[])
                copy.jobs = [replace(job) for job in line.jobs]
                for live in copy.jobs:
                    fork._note(live)
        return fork

    def run(self, *, until_s: float = math.inf, wanted: Collection[str] | None = None) -> None:
        """Advances to `until_s`, until all of `wanted` have ended, or until nothing is left to do."""
        if self._now_s > until_s:
            return  # the first job comes later: one may still come before it
        missing = None if wanted is None else set(wanted) - self.finished.keys()
        while self._events < MAX_EVENTS:
            while self._coming and self._coming[-1].arrived_s <= self._now_s:
                self._arrive(self._coming.pop())
            ended = self._take_away()
            if missing is not None:
                missing.difference_update(ended)
            is_over = self._num_live == 0 and not self._coming
            if missing == set() or self._now_s >= until_s or is_over:
                return
            self._events += 1
            self._share_out()
            next_s = min(self._next_event_s(), until_s)
            if math.isinf(next_s):
                return
            self._advance(max(0.0, next_s - self._now_s))
            self._now_s = max(self._now_s, next_s)

    def finish(self, job_id: str) -> Finish:
        if job_id in self.finished:
            return self.finished[job_id]
        lines = (line for tier in self._lines.values() for line in tier.values())
        found = (live for line in lines for live in line.jobs if live.job.job_id == job_id)
        return Finish(next((live.first_token_s for live in found), math.inf), math.inf)

    # ------------------------------------------------------------ events

    def _arrive(self, job: Job) -> None:
        lines = self._lines.setdefault(job.tier, {})
        line = lines.get(job.tenant_id)
        if line is None:
            line = lines[job.tenant_id] = _TenantLine(job.weight)
        if not line.jobs:
            lowest = min((other.served for other in lines.values() if other.jobs), default=0.0)
            line.served = max(line.served, lowest)
        live = _LiveJob.of(job)
        line.add(live)
        self._note(live)

    def _note(self, live: _LiveJob) -> None:
        self._num_live += 1
        if live.job.left_s < math.inf:
            heapq.heappush(self._leaving, (live.job.left_s, self._num_live, live))

    def _take_away(self) -> list[str]:
        gone: list[str] = []
        for live in self._in_step:
            if not live.is_decoding:
                continue
            if math.isinf(live.first_token_s):
                # The step that computes a prompt's end emits the first token of each sequence.
                live.first_token_s = self._now_s
                first = min(live.output_left, float(live.job.sequences))
                live.output_left -= first
                self._note_had(live.job, first * OUTPUT_TOKEN_COST)
            if live.output_left <= _DONE:
                gone.append(self._through(live, self._now_s))
        while self._leaving and self._leaving[0][0] <= self._now_s:
            leaving = heapq.heappop(self._leaving)[2]
            if leaving.job.job_id not in self.finished:
                gone.append(self._through(leaving, math.inf))
        if gone:  # a run may end here, and the next one begins here
            self._in_step = [live for live in self._in_step if live.job.job_id not in self.finished]
        return gone

    def _through(self, live: _LiveJob, last_token_s: float) -> str:
        job = live.job
        self.finished[job.job_id] = Finish(live.first_token_s, last_token_s)
        self._lines[job.tier][job.tenant_id].remove(live)
        self._num_live -= 1
        return job.job_id

    def _next_event_s(self) -> float:
        next_s = self._coming[-1].arrived_s if self._coming else math.inf
        if self._leaving:
            next_s = min(next_s, self._leaving[0][0])
        for since_s, _ in self._serving:
            if self._now_s < since_s < next_s:
                next_s = since_s
        for live in self._in_step:
            left = live.output_left if live.is_decoding else live.prompt_left
            next_s = min(next_s, self._now_s + left / live.rate)
        return next_s

    def _advance(self, seconds: float) -> None:
        for live in self._in_step:
            job = live.job
            done = live.rate * seconds
            line = self._lines[job.tier][job.tenant_id]
            if live.is_decoding:
                live.output_left -= done
                cost = done * OUTPUT_TOKEN_COST
            else:
                live.prompt_left -= done
                cost = done * INPUT_TOKEN_COST
            line.served += cost / job.weight
            self._note_had(job, cost)

    def _note_had(self, job: Job, cost: float) -> None:
        whose = job.tenant_id, job.tier
        self.had[whose] = self.had.get(whose, 0.0) + cost

    def _replicas(self) -> int:
        count = self._machine.replicas
        for since_s, replicas in self._serving:
            if since_s > self._now_s:
                break
            count = replicas
        return count

    # ------------------------------------------------------------ shares

    def _share_out(self) -> None:
        replicas = self._replicas()
        machine = self._machine
        places = machine.max_sequences * replicas
        kv_tokens = float(machine.kv_tokens * replicas)
        placed: list[list[_LiveJob]] = []
        before, self._in_step = self._in_step, []
        had_places = {id(job) for job in before}
        for tier in sorted(self._lines):
            lines = [line for line in self._lines[tier].values() if line.jobs]
            if not lines or places < 1:
                continue
            seated = _seat(lines, places, kv_tokens)
            places -= sum(round(job.places) for own in seated for job in own)
            kv_tokens -= sum(live.job.kv_tokens for own in seated for live in own)
            placed += seated
            had_places -= {id(job) for own in seated for job in own}
        for job in before:
            if id(job) in had_places:
                job.places = 0.0
        if not placed:
            return
        in_step = _share_steps(placed, machine, replicas)
        step_s = machine.step_s(
            sum(amount for _, amount in in_step) / replicas,
            sum(amount * job.context_tokens for job, amount in in_step) / replicas,
            sum(job.places for job, _ in in_step) / replicas,
        )
        for job, amount in in_step:
            job.rate = amount / step_s
            self._in_step.append(job)


def _seat(lines: Sequence[_TenantLine], places: int, kv_tokens: float) -> list[list[_LiveJob]]:
    """Each tenant's placed jobs: its first ones, by fair shares, fewer where memory is scarce."""
    needed = sum(line.kv_tokens for line in lines)
    if needed > kv_tokens:
        # A request larger than all memory would never have been placed: it may run alone.
        wanted = sum(line.sequences for line in lines)
        places = min(places, max(1, int(wanted * kv_tokens / needed)))
    shares = max_min([line.sequences for line in lines], [line.weight for line in lines], places)
    whole = [int(share + _DONE) for share in shares]
    rest = places - sum(whole)
    if rest > 0:
        claims = [index for index, line in enumerate(lines) if line.sequences > whole[index]]
        claims.sort(
            key=lambda index: (not lines[index].has_place, lines[index].served, _first_s(lines[index]))
        )
        for index in claims[:rest]:
            whole[index] += 1
    seated: list[list[_LiveJob]] = []
    for line, left in zip(lines, whole, strict=True):
        own: list[_LiveJob] = []
        for live in line.jobs:
            if left <= 0:
                break
            live.places = float(min(left, live.job.sequences))
            left -= round(live.places)
            own.append(live)
        if own:
            seated.append(own)
    return seated


def _first_s(line: _TenantLine) -> float:
    return line.jobs[0].job.arrived_s


def _share_steps(
    seated: Sequence[list[_LiveJob]], machine: FluidMachine, replicas: int
) -> list[tuple[_LiveJob, float]]:
    """Each job's tokens of a step, by shares of its time and token budget; a tenant's jobs in order."""
    weights = [own[-1].job.weight for own in seated]
    needs = [[(live, live.tokens_a_step, _token_s(live, machine)) for live in own] for own in seated]
    wanted_s = [sum(tokens * token_s for _, tokens, token_s in own) for own in needs]
    allowed_s = _time_shares(wanted_s, weights, machine.step_time.base_s * replicas)
    fed = [_in_order(own, left_s) for own, left_s in zip(needs, allowed_s, strict=True)]
    most = float(machine.max_batched_tokens * replicas)
    amounts = [sum(tokens for _, tokens in own) for own in fed]
    if sum(amounts) > most:
        shares = max_min(amounts, weights, most)
        fed = [
            _in_order([(job, tokens, 1.0) for job, tokens in own], share)
            for own, share in zip(fed, shares, strict=True)
        ]
    return [part for own in fed for part in own if part[1] > _DONE]


def _token_s(live: _LiveJob, machine: FluidMachine) -> float:
    """What one more token of it adds to a step."""
    model = machine.step_time
    of_place_s = model.per_sequence_s if live.is_decoding else 0.0
    return model.per_token_s + model.per_context_token_s * live.context_tokens + of_place_s


def _time_shares(wanted_s: Sequence[float], weights: Sequence[float], base_s: float) -> list[float]:
    """Seconds of a step by tenant: its demand, at most its weighted share of the step with its fixed part."""
    order = sorted(range(len(wanted_s)), key=lambda index: wanted_s[index] / weights[index])
    weight = weight_left = sum(weights)
    step_s = base_s
    allowed_s = list(wanted_s)
    for position, index in enumerate(order):
        weight_left -= weights[index]
        step_s += wanted_s[index]
        rest = order[position + 1 :]
        if not rest:
            break
        # The step's time if each tenant that wants more got only its share:
        whole_s = step_s / (1 - weight_left / weight)
        if wanted_s[rest[0]] / weights[rest[0]] > whole_s / weight:
            for place in rest:
                allowed_s[place] = whole_s * weights[place] / weight
            break
    return allowed_s


def _in_order(needs: Sequence[tuple[_LiveJob, float, float]], left: float) -> list[tuple[_LiveJob, float]]:
    """`left` to (job, tokens, each token's part of it) in order, answers first, as engines that batch do."""
    had: list[tuple[_LiveJob, float]] = []
    for job, tokens, each_takes in sorted(needs, key=lambda need: not need[0].is_decoding):
        amount = min(tokens, left / each_takes) if each_takes > 0 else tokens
        had.append((job, amount))
        left -= amount * each_takes
    return had
