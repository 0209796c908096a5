"""Attributes a missed target to its cause, by counterfactuals.

Each one asks what would have happened if one thing had been different. It is computed from the real load
(`load_log.py`) with the step-time model (`fluid_share.py`):

| counterfactual | asks |
|---|---|
| alone | on an idle engine, with no other request |
| fair | in its turn under an ideal fluid fair share, among all requests that were there, outages included |
| fair without outages | the same with all replicas serving all the time |
| fair without its own | the same without its tenant's other requests |

The first that holds is the cause:

1. `fault`: an engine, a store or an upstream ended it.
2. `client`: its reader was so slow that it was cut.
3. `request`: alone it would have missed, too.
4. Under the fair share it would have missed, too: `quota` if without the wait for its tenant's own limits it
   would not have; `fault` if without the outages; `quota` if without its tenant's own backlog; `gateway` as
   below; else `capacity`.
5. Under the fair share it would have met its target: `client` if without the time for which its reader stood
   still; `gateway` if without the time that our stores took to hold its budget and that the gateway lagged
   behind the engine, together; else `scheduling`, our policy.

A wait for a limit of its tenant is the same under any policy, so it is part of the fair share's time. So is
one full step: no engine changes a step that has begun. Times are seconds. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from gateway.explain.fluid_share import Finish, FluidMachine, FluidShare, Job, alone, fair_share
from tenants.outcomes import Cause, RequestOutcome


class Metric(StrEnum):
    TTFT = "ttft"
    """Arrival to the first token."""
    TPOT = "tpot"
    """From the first token to the last, per token after the first of one sequence."""
    E2E = "e2e"
    """Arrival to the last token."""


FAULTS = frozenset(
    {
        RequestOutcome.ENGINE_LOST,
        RequestOutcome.ENGINE_FAILED,
        RequestOutcome.UPSTREAM_ERROR,
        RequestOutcome.ACCOUNTS_LOST,
        RequestOutcome.NO_ENGINE,
        RequestOutcome.FAILED,
        RequestOutcome.RECOVERED,
        RequestOutcome.LOST,
    }
)
ENDED_BY_CLIENT = frozenset({RequestOutcome.DISCONNECTED, RequestOutcome.CANCELLED, RequestOutcome.WITHDRAWN})


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """A finished request, as targets need it. Instants on the clock of its `job`."""

    job: Job
    """As counted; `job.arrived_s` is when it could run: held, durable and in the queue."""
    arrived_s: float
    outcome: RequestOutcome
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float
    limited_s: float = 0.0
    """Wait before the queue for its tenant's own limits."""
    store_s: float = 0.0
    """Wait before the queue for our stores: the hold and its row."""
    rested_s: float = 0.0
    """Wait while decoding for its tenant's own rate."""
    stalled_s: float = 0.0
    """Time its reader did not read."""
    first_lag_s: float = 0.0
    """How long the engine had made its first token before the gateway had it."""
    last_lag_s: float = 0.0
    """The same of its last token, without the waits for its reader."""

    def at_gateway_s(self, metric: Metric) -> float:
        match metric:
            case Metric.TTFT:
                return self.store_s + self.first_lag_s
            case Metric.E2E:
                return self.store_s + self.last_lag_s
        return max(0.0, self.last_lag_s - self.first_lag_s)

    @property
    def is_complete(self) -> bool:
        """It ended by itself, or at its budget."""
        return self.outcome in (RequestOutcome.COMPLETED, RequestOutcome.BUDGET)

    def actual_s(self, metric: Metric) -> float | None:
        """To compare with a target. Infinite: never reached; None: unknown, as its client left before."""
        never = None if self.outcome in ENDED_BY_CLIENT else math.inf
        if metric is Metric.TTFT:
            return never if self.first_token_s is None else self.first_token_s - self.arrived_s
        if not self.is_complete or self.last_token_s is None:
            return never
        if metric is Metric.E2E:
            return self.last_token_s - self.arrived_s
        assert self.first_token_s is not None
        return _per_token(self.first_token_s, self.last_token_s, self.job)

    def misses(self, metric: Metric, target_s: float) -> bool | None:
        """Whether the target was missed. None: it does not count."""
        actual_s = self.actual_s(metric)
        if actual_s is not None:
            return actual_s > target_s
        # Its client left before. If the target's time had passed by then, it was missed.
        if metric is Metric.TPOT:
            return None
        return True if self.ended_s - self.arrived_s > target_s else None


@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """Seconds of one metric under each counterfactual; infinite: never reached."""

    alone_s: float
    fair_s: float
    """With the waits for its tenant's limits."""
    fair_unlimited_s: float
    """Without them."""
    fair_without_outages_s: float
    fair_without_own_s: float
    """NaN: not computed, as something else decides."""

    def as_numbers(self) -> dict[str, float | None]:
        """The evidence, as it is stored; None for infinite, and for what was not computed."""
        named = {
            "alone_s": self.alone_s,
            "fair_s": self.fair_s,
            "fair_unlimited_s": self.fair_unlimited_s,
            "fair_without_outages_s": self.fair_without_outages_s,
            "fair_without_own_s": self.fair_without_own_s,
        }
        return {name: round(value, 6) if math.isfinite(value) else None for name, value in named.items()}


@dataclass(frozen=True, slots=True)
class MissVerdict:
    metric: Metric
    target_s: float
    actual_s: float
    """Infinite: never reached."""
    cause: Cause
    evidence: Mapping[str, float | None]


def cause_of(facts: RequestFacts, metric: Metric, target_s: float, seen: Counterfactuals | None) -> Cause:
    """The rules of this module's docstring. `seen` None: there are no counterfactuals."""
    if facts.outcome in FAULTS:
        return Cause.FAULT
    if facts.outcome is RequestOutcome.SLOW_READER and metric is not Metric.TTFT:
        return Cause.CLIENT
    if seen is None:
        return _without_model(facts, metric, target_s)
    if seen.alone_s > target_s:
        return Cause.REQUEST
    actual_s = facts.actual_s(metric)
    late = actual_s is not None and (
        _without(actual_s, facts.at_gateway_s(metric), metric, facts.job) <= target_s
    )
    if seen.fair_s > target_s:
        if seen.fair_unlimited_s <= target_s:
            return Cause.QUOTA
        if seen.fair_without_outages_s <= target_s:
            return Cause.FAULT
        if seen.fair_without_own_s <= target_s:
            return Cause.QUOTA
        return Cause.GATEWAY if late else Cause.CAPACITY
    if actual_s is None:
        return Cause.SCHEDULING
    if _without(actual_s, _stalled_s(facts, metric), metric, facts.job) <= target_s:
        return Cause.CLIENT
    return Cause.GATEWAY if late else Cause.SCHEDULING


def _without_model(facts: RequestFacts, metric: Metric, target_s: float) -> Cause:
    """Only measured waits can be left out."""
    actual_s = facts.actual_s(metric)
    if actual_s is None or math.isinf(actual_s):
        return Cause.UNKNOWN
    if _without(actual_s, _stalled_s(facts, metric), metric, facts.job) <= target_s:
        return Cause.CLIENT
    limits_s = (0.0 if metric is Metric.TTFT else facts.rested_s) + (
        0.0 if metric is Metric.TPOT else facts.limited_s
    )
    if _without(actual_s, limits_s, metric, facts.job) <= target_s:
        return Cause.QUOTA
    gateway_s = facts.at_gateway_s(metric)
    return Cause.GATEWAY if _without(actual_s, gateway_s, metric, facts.job) <= target_s else Cause.UNKNOWN


def _stalled_s(facts: RequestFacts, metric: Metric) -> float:
    """No reader is waited for before the first token."""
    return 0.0 if metric is Metric.TTFT else facts.stalled_s


def _without(actual_s: float, seconds: float, metric: Metric, job: Job) -> float:
    if metric is Metric.TPOT:
        return actual_s - seconds / max(1, job.output_tokens // job.sequences - 1)
    return actual_s - seconds


def judge(
    missed: Sequence[tuple[RequestFacts, Metric, float]],
    jobs: Iterable[Job],
    machine: FluidMachine | None,
    serving: Sequence[tuple[float, int]] = (),
) -> list[MissVerdict]:
    """The causes of (request, metric, target) that were missed; `jobs` are all that could run meanwhile, with
    or without the missed ones. `machine` None: there is no step-time model. `serving` as in `fair_share`."""
    if machine is None:
        return [verdict_of(*miss, None) for miss in missed]
    # What ended it early must not end it in the counterfactuals, too.
    judged = {facts.job.job_id: replace(facts.job, left_s=math.inf) for facts, _, _ in missed}
    all_jobs = {job.job_id: job for job in jobs} | judged
    simulations = _Simulations(list(all_jobs.values()), machine, serving, judged)
    verdicts: dict[int, MissVerdict] = {}
    for index in sorted(range(len(missed)), key=lambda place: missed[place][0].job.arrived_s):
        verdicts[index] = verdict_of(*missed[index], simulations.seen(*missed[index]))
    return [verdicts[index] for index in range(len(missed))]


class _Simulations:
    """The counterfactuals of some requests: one run for all, and one a tenant without its own requests."""

    def __init__(
        self,
        jobs: Sequence[Job],
        machine: FluidMachine,
        serving: Sequence[tuple[float, int]],
        judged: Mapping[str, Job],
    ) -> None:
        self._machine = machine
        self._fair = fair_share(jobs, machine, judged, serving)
        had_outage = any(replicas < machine.replicas for _, replicas in serving)
        self._whole = fair_share(jobs, machine, judged) if had_outage else self._fair
        self._jobs = jobs
        self._without_own: dict[str, Finish] = {}
        self._others: dict[str, FluidShare] = {}
        self._num_of: Counter[str] = Counter(job.tenant_id for job in jobs)

    def _by_itself(self, job: Job) -> Finish:
        """The job among the others as they were, without its tenant's own. Call in order of arrival."""
        if self._num_of[job.tenant_id] == 1:
            return self._whole[job.job_id]
        if job.job_id not in self._without_own:
            fluid = self._others.get(job.tenant_id)
            if fluid is None:
                apart = [other for other in self._jobs if other.tenant_id != job.tenant_id]
                fluid = self._others[job.tenant_id] = FluidShare(apart, self._machine)
            fluid.run(until_s=job.arrived_s)
            fork = fluid.fork_with(replace(job, left_s=math.inf))
            fork.run(wanted=[job.job_id])
            self._without_own[job.job_id] = fork.finish(job.job_id)
        return self._without_own[job.job_id]

    def seen(self, facts: RequestFacts, metric: Metric, target_s: float) -> Counterfactuals:
        job = facts.job
        further = max(1, job.output_tokens // job.sequences - 1)
        slack_s = self._machine.longest_step_s
        waits_s = facts.limited_s if metric is not Metric.TPOT else 0.0
        if metric is not Metric.TTFT:
            waits_s += facts.rested_s
        if metric is Metric.TPOT:
            slack_s, waits_s = slack_s / further, waits_s / further

        alone_finish = alone(replace(job, left_s=math.inf), self._machine)

        def within(finish: Finish) -> float:
            return _since(finish, metric, job) + slack_s

        fair_s = within(self._fair[job.job_id])
        # Computed only where it can matter: each tenant needs a run of its own.
        is_asked = fair_s + waits_s > target_s >= within(alone_finish)
        return Counterfactuals(
            alone_s=_since(alone_finish, metric, job),
            fair_s=fair_s + waits_s,
            fair_unlimited_s=fair_s,
            fair_without_outages_s=within(self._whole[job.job_id]) + waits_s,
            fair_without_own_s=within(self._by_itself(job)) + waits_s if is_asked else math.nan,
        )


def _since(finish: Finish, metric: Metric, job: Job) -> float:
    if metric is Metric.TTFT:
        return finish.first_token_s - job.arrived_s
    if metric is Metric.E2E:
        return finish.last_token_s - job.arrived_s
    if math.isinf(finish.last_token_s):
        return math.inf
    return _per_token(finish.first_token_s, finish.last_token_s, job) or 0.0


def _per_token(first_s: float, last_s: float, job: Job) -> float | None:
    further = job.output_tokens // job.sequences - 1
    return (last_s - first_s) / further if further > 0 else None


def verdict_of(
    facts: RequestFacts, metric: Metric, target_s: float, seen: Counterfactuals | None
) -> MissVerdict:
    actual_s = facts.actual_s(metric)
    if actual_s is None:
        actual_s = facts.ended_s - facts.arrived_s
    evidence: dict[str, float | None] = {} if seen is None else dict(seen.as_numbers())
    evidence |= {
        "limited_s": round(facts.limited_s, 6),
        "store_s": round(facts.store_s, 6),
        "first_lag_s": round(facts.first_lag_s, 6),
        "last_lag_s": round(facts.last_lag_s, 6),
        "rested_s": round(facts.rested_s, 6),
        "stalled_s": round(facts.stalled_s, 6),
    }
    return MissVerdict(metric, target_s, actual_s, cause_of(facts, metric, target_s, seen), evidence)
