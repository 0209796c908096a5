"""Runs an open loop of requests on one engine on virtual time, without a gateway.

One `VirtualReplica`, fed with arrivals at their instants; it runs the scheduler, the KV bookkeeping and the
core of a real engine, and its clock moves by a stated step-time model. Nothing is measured with a real clock,
so that a figure depends on neither the machine nor what else runs on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from engine.core.core import EngineConfig, StepResult
from engine.entry import INPUT_TOKEN_COST, OUTPUT_TOKEN_COST
from engine.messages import SamplingParams, Submit
from engine.scheduling.policy import Policy
from engine.virtual.replica import VOCABULARY, VirtualReplica
from engine.virtual.step_shapes import make_shapes
from gateway.domain.targets import targets_of
from ops.simulate.machines.machines import Machine
from ops.simulate.traffic.requests import PREFIX_BLOCK_TOKENS, SimulatedRequest
from tests.support.drawn_arrivals import Predictions, exact

IDLE_STEPS = 1000
"""Steps in a row that compute nothing and move no time: then the engine hangs."""


@dataclass(slots=True)
class ServedRequest:
    """Outcome of one request; times are seconds on the virtual clock."""

    arrival: SimulatedRequest
    started_s: float = -1.0
    """When it first ran."""
    first_s: float = -1.0
    last_s: float = -1.0
    emitted_tokens: int = 0
    finish: str = ""

    @property
    def done(self) -> bool:
        """Whether the whole answer came."""
        return self.finish in ("stop", "length")

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token; infinite if none came."""
        return self.first_s - self.arrival.arrival_s if self.first_s >= 0 else float("inf")

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token; infinite if the answer is not complete."""
        return self.last_s - self.arrival.arrival_s if self.done else float("inf")

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 for an answer of one token."""
        if not self.done:
            return float("inf")
        return (self.last_s - self.first_s) / max(1, self.emitted_tokens - 1)


@dataclass(slots=True)
class Moment:
    """After one step: its service, and the tenants that wait."""

    at_s: float
    service: dict[str, int]
    """Cost tokens by tenant, of this step alone."""
    computed: dict[str, int]
    """Prompt tokens computed for the first time, by tenant, of this step alone."""
    emitted: dict[str, int]
    """Output tokens, by tenant, of this step alone."""
    backlogged: frozenset[str]
    """Tenants with a request that still waited after the step's admissions."""
    running: dict[str, int] = field(default_factory=dict)
    """Sequences of each tenant that go on after the step."""
    kv_tokens: dict[str, int] = field(default_factory=dict)
    """Held by them."""


@dataclass(slots=True)
class EngineRun:
    """One run of one policy."""

    served: list[ServedRequest]
    ended_s: float = 0.0
    computed_tokens: int = 0
    """In steps, recomputation included."""
    padded_tokens: int = 0
    """Of them and beside them: places in a padded step that held no token."""
    moments: list[Moment] = field(default_factory=list)
    policy: Policy | None = None
    """The choices that ran, for their counters."""

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens of the requests that were answered in full."""
        return sum(each.arrival.input_tokens + each.emitted_tokens for each in self.served if each.done)

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output tokens a second, until the last answer was complete."""
        return self.total_tokens / self.ended_s

    def of(self, kind: str) -> list[ServedRequest]:
        """The requests of one class."""
        return [each for each in self.served if each.arrival.kind == kind]


def run_load(
    policy: str | Callable[[], Policy],
    arrivals: Sequence[SimulatedRequest],
    machine: Machine,
    *,
    predictions: Predictions = exact,
    seed: int = 0,
    until_s: float | None = None,
    watch: bool = False,
    watch_running: bool = False,
    while_waiting: bool = False,
) -> EngineRun:
    """Runs `arrivals` (in order of time) to their end, or until `until_s`.

    `policy`: a name, or what makes the choices. Requests declare the longest answer of all as
    their maximum: one that equals the answer would tell its length. `watch` keeps
    a `Moment` a step, `watch_running` adds what runs to it. `while_waiting`: ends when no request waits.

    Raises ValueError for a request that the engine refuses, RuntimeError when it hangs.
    """
    load = _Load(policy, arrivals, machine, predictions, seed)
    run = EngineRun(load.served, policy=load.replica.core.table.policy)
    clock, core = load.replica.clock, load.replica.core
    idle_steps = 0
    while until_s is None or clock.now_s < until_s:
        load.submit_due()
        if not core.has_work():
            if load.next_arrival_s is None:
                break
            clock.advance(load.next_arrival_s - clock.now_s)
            continue
        result = load.replica.step()
        load.collect(result)
        if result.num_tokens:
            idle_steps = 0
            run.computed_tokens += result.num_tokens
            if watch:
                run.moments.append(load.moment(result, with_running=watch_running))
            if while_waiting and not len(core.table.waiting):
                break
        elif not result.deltas:
            idle_steps += 1
            load.wait(result, idle_steps)
    run.ended_s = clock.now_s
    run.padded_tokens = load.replica.runner.padded_tokens
    return run


class _Load:
    """A replica, its submitted requests and their results."""

    def __init__(
        self,
        policy: str | Callable[[], Policy],
        arrivals: Sequence[SimulatedRequest],
        machine: Machine,
        predictions: Predictions,
        seed: int,
    ) -> None:
        self.replica = VirtualReplica(
            EngineConfig(
                policy=policy if isinstance(policy, str) else "fcfs",
                max_batched_tokens=machine.max_batched_tokens,
                max_sequences=machine.max_sequences,
                max_waiting=len(arrivals) + 1,
            ),
            num_blocks=machine.num_blocks,
            block_tokens=machine.block_tokens,
            context_tokens=machine.context_tokens,
            step_time=machine.step_time,
            shapes=make_shapes(padded=machine.padded, keeps_rows=machine.keeps_rows),
        )
        if not isinstance(policy, str):
            self.replica.core.table.set_policy(policy())
        self.served = [ServedRequest(arrival) for arrival in arrivals]
        self._predicted = predictions(arrivals, random.Random(seed))
        self._most = max((each.output_tokens for each in arrivals), default=1)
        self._next = 0
        self._received_s: list[float] = []

    @property
    def next_arrival_s(self) -> float | None:
        """When the next request arrives; None: no more will."""
        return self.served[self._next].arrival.arrival_s if self._next < len(self.served) else None

    def submit_due(self) -> None:
        """Submits what has arrived by now."""
        now_s = self.replica.clock.now_s
        while self._next < len(self.served) and self.served[self._next].arrival.arrival_s <= now_s:
            self._submit(self._next, now_s)
            self._received_s.append(now_s)
            self._next += 1

    def wait(self, result: StepResult, idle_steps: int) -> None:
        """The engine waits on purpose: time passes until the instant that it names, or the next arrival."""
        clock = self.replica.clock
        instants = [at_s for at_s in (result.wait_until_s, self.next_arrival_s) if at_s is not None]
        if not instants or idle_steps > IDLE_STEPS:
            raise RuntimeError(
                f"the engine hangs at {clock.now_s:.3f} s: {len(self.replica.core.table.waiting)} wait, "
                f"{len(self.replica.core.table.running)} run, and nothing is computed"
            )
        clock.advance(max(0.0, min(instants) - clock.now_s))

    def collect(self, result: StepResult) -> None:
        """Records a step's results."""
        now_s = self.replica.clock.now_s
        for delta in result.deltas.get("virtual", ()):
            served = self.served[int(delta.sequence_id)]
            if delta.token_ids:
                if served.first_s < 0:
                    served.first_s = now_s
                served.last_s = now_s
                served.emitted_tokens += len(delta.token_ids)
            if delta.outcome is not None:
                served.started_s = self._received_s[int(delta.sequence_id)] + (
                    delta.outcome.scheduled_s or 0.0
                )
                served.finish = delta.outcome.finish

    def moment(self, result: StepResult, *, with_running: bool) -> Moment:
        """Service by tenant in the step, and the tenants that wait."""
        table = self.replica.core.table
        running: dict[str, int] = {}
        kv_tokens: dict[str, int] = {}
        if with_running:
            for sequence in table.running:
                tenant = sequence.tenant_id
                running[tenant] = running.get(tenant, 0) + 1
                kv_tokens[tenant] = kv_tokens.get(tenant, 0) + sequence.computed_tokens
        return Moment(
            self.replica.clock.now_s,
            {
                tenant: each.computed_tokens * INPUT_TOKEN_COST + each.emitted_tokens * OUTPUT_TOKEN_COST
                for tenant, each in result.service.items()
            },
            {tenant: each.computed_tokens for tenant, each in result.service.items()},
            {tenant: each.emitted_tokens for tenant, each in result.service.items()},
            frozenset({entry.tenant_id for entry in table.waiting.entries()}),
            running,
            kv_tokens,
        )

    def _submit(self, number: int, now_s: float) -> None:
        arrival = self.served[number].arrival
        median, high = self._predicted[number]
        # As a gateway sets them: what its tenant's SLO says, less what has passed if it arrived in a step.
        targets = targets_of(
            {} if arrival.e2e_target_s is None else {"e2e": arrival.e2e_target_s},
            None,
            since_s=arrival.arrival_s,
            expires_s=None,
            output_tokens=median,
        )
        refused = self.replica.submit(
            Submit(
                sequence_id=str(number),
                request_id=str(number),
                tenant_id=arrival.tenant,
                prompt_token_ids=self._prompt(arrival, number),
                max_tokens=self._most,
                lease_tokens=self._most,
                sampling=SamplingParams(seed=number),
                tier=arrival.tier,
                weight=arrival.weight,
                predicted_output_tokens=median,
                predicted_high_tokens=high,
                **targets.for_engine(now_s),
            ),
            output_tokens=arrival.output_tokens,
        )
        if refused is not None:
            raise ValueError(f"request {number} ({arrival}) was refused: {refused.message}")

    def _prompt(self, arrival: SimulatedRequest, number: int) -> list[int]:
        """Its prefix blocks, then tokens that no other prompt has there."""
        base = VOCABULARY - 1
        blocks = [1 + block % base for block in arrival.prefix_blocks for _ in range(PREFIX_BLOCK_TOKENS)]
        own = [1 + number // base**place % base for place in range(3)]
        return (blocks + own + [1] * arrival.input_tokens)[: arrival.input_tokens]


def tenants_of(arrivals: Collection[SimulatedRequest]) -> dict[str, float]:
    """Weight by tenant."""
    return {arrival.tenant: arrival.weight for arrival in arrivals}
