"""Two hashes at a time, in threads of their own, and a bounded line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from tenants.errors import TooManyLogIns
from tenants.people.hashing_gate import AT_ONCE, MOST_WAITING, HashingGate


@pytest.fixture
def gate() -> Iterator[HashingGate]:
    made = HashingGate()
    yield made
    made.close()


async def test_a_hundred_at_once_two_run_eighteen_are_taken_and_the_rest_is_told_to_wait(
    gate: HashingGate,
) -> None:
    go, threads = threading.Event(), set[int]()

    def work() -> None:
        threads.add(threading.get_ident())
        assert go.wait(30)

    asked = [asyncio.ensure_future(gate.run(work)) for _ in range(100)]
    refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert len(refused) == 100 - AT_ONCE - MOST_WAITING == gate.refused
    assert all(isinstance(each.exception(), TooManyLogIns) for each in refused)
    go.set()
    await asyncio.gather(*(set(asked) - refused))
    assert gate.hashed == AT_ONCE + MOST_WAITING
    assert gate.most_at_once == AT_ONCE
    assert gate.on_event_loop == 0
    assert threading.get_ident() not in threads
    assert await gate.run(lambda: "free again") == "free again"


async def test_callers_that_leave_free_their_places_and_a_failure_is_the_callers(gate: HashingGate) -> None:
    go = threading.Event()
    asked = [asyncio.ensure_future(gate.run(lambda: go.wait(30))) for _ in range(AT_ONCE + MOST_WAITING)]
    await asyncio.sleep(0)
    for each in asked:
        each.cancel()
    await asyncio.wait(asked)
    # Two still run: that their callers left did not end them.
    failing = asyncio.ensure_future(gate.run(lambda: 1 // 0))
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(ZeroDivisionError):
        await failing
    assert gate.refused == 0
