"""A lease is topped up before what its closing keeps is all that is left of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from engine.messages import SequenceOutcome
from gateway.budget.top_up import Leases, TopUpTask
from gateway.domain.usage import SequenceUse
from tenants.quota.store import Denied, Granted
from tenants.types import Amounts, Limit, Meter, SubjectKind, Window

BUDGET = Limit("w", "t", SubjectKind.TENANT, "t", Meter.OUTPUT_TOKENS, 10_000, Window.DAY)


class Budget:
    """Grants as far as `most`, at least what is asked for first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[int] = []

    async def top_up(self, request_id: str, used: Amounts, first: Amounts, ahead: Amounts) -> object:
        self.asked.append(first.output_tokens)
        if first.output_tokens > self.most:
            return Denied(BUDGET, first.output_tokens, 0, None)
        return Granted((), covered=Amounts(output_tokens=min(ahead.output_tokens, self.most)))


class Engine:
    """Emits a token a turn of each sequence, and none of the last `kept` of a lease."""

    def __init__(self, leases: Leases, most: int) -> None:
        self.leases, self.most = leases, most
        self.tokens = list(leases.tokens)
        self.cancelled: dict[int, int] = {}

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        self.tokens[int(sequence_id)] = lease_tokens

    def cancel(self, sequence_id: str, cause: str) -> None:
        assert cause == "budget"
        index = int(sequence_id)
        self.cancelled.setdefault(index, self.leases.uses[index].output_tokens)

    def step(self, index: int) -> bool:
        """Whether it emitted a token."""
        use = self.leases.uses[index]
        end = self.tokens[index] if self.tokens[index] >= self.most else self.tokens[index] - self.leases.kept
        if use.outcome is not None or index in self.cancelled or use.output_tokens >= end:
            return False
        use.output_tokens += 1
        if use.output_tokens == self.most:
            use.outcome = SequenceOutcome(str(index), "r", "t", "length", 1, 0, 1, self.most)
        return True


@pytest.mark.parametrize("kept", [0, 1, 7, 40])
@pytest.mark.parametrize("budget", [1, 8, 41, 60, 97, 150])
@pytest.mark.parametrize("covered", [1, 20])
@pytest.mark.parametrize("sequences", [1, 2])
async def test_a_budget_that_ends_leaves_each_answer_what_its_end_needs(
    kept: int, budget: int, covered: int, sequences: int
) -> None:
    """Nothing waits for ever, and nothing is cancelled that could have gone on."""
    most, now_s = 64, 0.0
    uses = [SequenceUse(1) for _ in range(sequences)]
    counting: Any = SimpleNamespace(
        uses=uses,
        size=lambda tokens: Amounts(output_tokens=tokens),
        report=lambda: Amounts(output_tokens=sum(use.output_tokens for use in uses)),
    )
    leases = Leases((BUDGET,), counting, most, kept)
    leases.granted(Amounts(output_tokens=min(covered, budget)))
    engine, holds = Engine(leases, most), Budget(budget)
    task = TopUpTask(
        "r", leases, lambda: engine, holds,  # type: ignore[arg-type]
        predict=lambda emitted: emitted + 8,
        sequence_ids=[str(index) for index in range(sequences)],
        clock=lambda: now_s,
        sleep=lambda _: asyncio.sleep(0),
        hold_wait_s=0.0, accounts_wait_s=0.0,
    )  # fmt: skip
    running = asyncio.create_task(task.run())
    idle = 0
    while any(
        use.outcome is None and str(index) not in map(str, engine.cancelled) for index, use in enumerate(uses)
    ):
        now_s += 0.01
        moved = [index for index in range(sequences) if engine.step(index)]
        for index in moved:
            task.seen(index)
        idle = 0 if moved else idle + 1
        assert idle < 400, f"it waits for ever: {leases.tokens}, {holds.asked}"
        await asyncio.sleep(0)
    running.cancel()
    for index, use in enumerate(uses):
        if index in engine.cancelled:
            assert leases.tokens[index] < most
            assert min(most, use.output_tokens + kept) >= leases.tokens[index] >= use.output_tokens
    if engine.cancelled:
        assert sum(leases.tokens) == budget, "what is left of the budget is in the leases"
    else:
        assert budget >= most * sequences
