"""Cost of one scheduling step without a model, and its growth with the number of waiting sequences.

Timed in a steady state: now and then a sequence ends and the next is admitted, and as many wait as before.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from engine.core.core import EngineConfig, EngineCore
from engine.core.plan import Plan
from engine.core.scheduler import schedule
from engine.messages import SamplingParams, Submit
from engine.scheduling.policy import make_policy
from engine.sequence import Sequence
from engine.step_time.model import PRIOR, predict_step_s
from engine.virtual.replica import VOCABULARY, VirtualClock, VirtualRunner, VirtualTexts
from ops.reporting import Report, quantile

SEED = 20
PROMPT_TOKENS = 64
MEAN_OUTPUT_TOKENS = 128
BATCHED_TOKENS_PER_SEQUENCE = 2
SETTLE_STEPS = 100
STEPS = 1000
BLOCK_TOKENS = 16
P50_LIMIT_US = 300.0
P99_LIMIT_US = 600.0
_KEY = ("policy", "running", "tenants")
_PARTS = ("schedule_us", "books_us", "step_us", "cpu_us")
GROWTH_LIMIT = 1.5
"""Most that a step with the most waiting may cost over one with the least."""


@dataclass(frozen=True, slots=True)
class SchedulerCase:
    policy: str
    running: int
    waiting: int
    tenants: int


@dataclass(frozen=True, slots=True)
class Timing:
    schedule_us: float
    books_us: float
    cpu_us: float
    """Of both, processor time of this thread alone: other load on the machine hardly changes it."""
    admitted: int

    @property
    def step_us(self) -> float:
        return self.schedule_us + self.books_us


class SteadyState:
    """A scheduler that is kept at a case's numbers; `step` is an engine's loop without its model."""

    def __init__(self, case: SchedulerCase) -> None:
        """Raises `UnknownPolicy`."""
        self._case = case
        self._random = random.Random(SEED)
        self._clock = VirtualClock()
        most_tokens = PROMPT_TOKENS + 2 * MEAN_OUTPUT_TOKENS
        per_sequence = -(-most_tokens // BLOCK_TOKENS)
        # Twice what all can ever hold: memory never binds here.
        runner = VirtualRunner(
            self._clock, num_blocks=2 * case.running * per_sequence, block_tokens=BLOCK_TOKENS
        )
        config = EngineConfig(
            policy=case.policy,
            max_batched_tokens=BATCHED_TOKENS_PER_SEQUENCE * case.running,
            max_sequences=case.running,
            max_waiting=case.waiting + case.running,
        )
        self.table = EngineCore(runner, VirtualTexts(), config, self._clock).table
        self._added = 0
        self._ends: dict[Sequence, int] = {}
        """Output tokens after which each one ends."""
        for _ in range(case.waiting + case.running):
            self._add()

    def settle(self) -> None:
        """Goes on until ends and admissions are mixed. Raises RuntimeError if places stay free."""
        for _ in range(20 * SETTLE_STEPS):
            self.step()
            if len(self.table.running) == self._case.running and not self.table.prefills:
                break
        else:
            raise RuntimeError(
                f"policy {self._case.policy!r} never ran {self._case.running} sequences at once, only "
                f"{len(self.table.running)}"
            )
        for _ in range(2 * MEAN_OUTPUT_TOKENS + SETTLE_STEPS):
            self.step()

    def step(self) -> Timing:
        cpu = time.thread_time_ns()
        started = time.perf_counter_ns()
        table = self.table
        plan = schedule(table, self._clock.now_s)
        scheduled = time.perf_counter_ns()
        cpu = time.thread_time_ns() - cpu
        # The work of a model and its texts is not timed: sampled tokens, and the sequences that end.
        chosen, ended = self._execute(plan)
        cpu -= time.thread_time_ns()
        executed = time.perf_counter_ns()
        table.commit(plan.shares, chosen)
        for sequence in ended:
            table.finish(sequence)
        booked = time.perf_counter_ns()
        cpu += time.thread_time_ns()
        self._clock.advance(predict_step_s(PRIOR, plan.num_tokens, plan.room.used_context, len(plan.shares)))
        for sequence in ended:
            del self._ends[sequence]
            self._add()
        return Timing(
            schedule_us=(scheduled - started) / 1e3,
            books_us=(booked - executed) / 1e3,
            cpu_us=cpu / 1e3,
            admitted=len(plan.admitted),
        )

    def _execute(self, plan: Plan) -> tuple[list[int | None], list[Sequence]]:
        chosen: list[int | None] = []
        ended = []
        for sequence, tokens in plan.shares.items():
            is_last = sequence.computed_tokens + tokens == sequence.total_tokens
            chosen.append(1 if is_last else None)
            if is_last and sequence.emitted_tokens + 1 >= self._ends[sequence]:
                ended.append(sequence)
        return chosen, ended

    def _add(self) -> None:
        number = self._added
        self._added += 1
        output_tokens = self._random.randint(1, 2 * MEAN_OUTPUT_TOKENS)
        prompt = [self._random.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        sequence = Sequence.of(
            Submit(
                sequence_id=f"sequence-{number}",
                request_id=f"sequence-{number}",
                tenant_id=f"tenant-{self._random.randrange(self._case.tenants)}",
                prompt_token_ids=prompt,
                max_tokens=2 * MEAN_OUTPUT_TOKENS,
                lease_tokens=2 * MEAN_OUTPUT_TOKENS,
                sampling=SamplingParams(seed=number),
                predicted_output_tokens=MEAN_OUTPUT_TOKENS,
            ),
            "bench",
            self._clock.now_s,
        )
        self._ends[sequence] = output_tokens
        self.table.add(sequence)


def measure_case(case: SchedulerCase, *, steps: int = STEPS) -> dict[str, Any]:
    """Microseconds a step, p50 and p99. Raises `UnknownPolicy`, RuntimeError."""
    state = SteadyState(case)
    state.settle()
    gc.collect()
    collections = _collections()
    taken = [state.step() for _ in range(steps)]
    return {
        **asdict(case),
        "steps": steps,
        **{part: _points([getattr(timing, part) for timing in taken]) for part in _PARTS},
        "admissions": sum(timing.admitted for timing in taken),
        "preemptions": state.table.preemptions,
        "garbage_collections": _collections() - collections,
    }


def run(
    *,
    running: SequenceOf[int],
    waiting: SequenceOf[int],
    tenants: SequenceOf[int],
    policies: SequenceOf[str],
    steps: int = STEPS,
) -> dict[str, Any]:
    """All combinations, and their `growth`. Raises as `measure_case` does."""
    for policy in policies:
        make_policy(policy)
    cases = [
        measure_case(SchedulerCase(policy, runners, waiters, parties), steps=steps)
        for policy, runners, parties, waiters in product(policies, running, tenants, sorted(waiting))
    ]
    return {"cases": cases, "growth": growth(cases)}


def growth(cases: SequenceOf[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each policy, tenants and running: the p50 of a step with the most waiting over the least."""
    by_key: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in sorted(cases, key=lambda case: case["waiting"]):
        by_key.setdefault(tuple(case[name] for name in _KEY), []).append(case)
    return [
        dict(zip(_KEY, key, strict=True))
        | {
            "waiting": [same[0]["waiting"], same[-1]["waiting"]],
            "ratio": same[-1]["step_us"]["p50"] / same[0]["step_us"]["p50"],
        }
        for key, same in by_key.items()
        if len(same) > 1
    ]


def show(report: dict[str, Any]) -> None:
    parts = dict(zip(_PARTS, ("schedule", "books", "both", "CPU"), strict=True))
    Report(
        "one scheduling step, without a model",
        (
            *((name, name) for name in ("policy", "running", "waiting", "tenants")),
            *((part, f"{heading} us p50/p99") for part, heading in parts.items()),
            ("admissions", "admissions"),
            ("garbage_collections", "collections"),
        ),
        [
            case | {part: f"{case[part]['p50']:.0f} / {case[part]['p99']:.0f}" for part in parts}
            for case in report["cases"]
        ],
    ).show()
    for row in report["growth"]:
        least, most = row["waiting"]
        print(
            f"{row['policy']}, {row['tenants']:,} tenants: {most:,} waiting cost {row['ratio']:.2f} times "
            f"what {least:,} cost ({GROWTH_LIMIT} allowed)"
        )
    print(f"wanted of hybrid: p50 <= {P50_LIMIT_US:.0f} us, p99 <= {P99_LIMIT_US:.0f} us for both together")


def _points(values: SequenceOf[float]) -> dict[str, float]:
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "most": max(values)}


def _collections() -> int:
    """Garbage collections so far that looked at all objects."""
    return int(gc.get_stats()[-1]["collections"])
