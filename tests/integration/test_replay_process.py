"""The process that replays queues: a real one, asked, killed and asked again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from engine.entry import QueueEntry
from engine.forecast.wait.arrivals import ArrivalPattern
from engine.forecast.wait.picture import FUTURES, Picture
from engine.forecast.wait.replayed_engine import EngineLoad
from engine.forecast.wait.surface import NEWCOMER, Line
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.tiers import TieredQueue
from gateway.estimates import replay_process
from gateway.estimates.replay_process import ReplayProcess
from gateway.flow.lanes import LaneRule
from tests.support.builders import step_time


def picture(waiting: int) -> Picture:
    counters = ServiceCounters()
    queue = TieredQueue("hybrid", counters)
    for number in range(waiting):
        queue.add(QueueEntry(f"w{number}", "busy", 0.0, 100, 50))
    load = EngineLoad("e", step_time(0.01, samples=50), 2, 256, 3, 100_000)
    return Picture(
        now_s=5.0, queue=queue, counters=counters, engines=[load], lengths={}, sequences={}, kv_tokens={},
        lane_of=LaneRule().lane, promised=[], arrivals=ArrivalPattern({}, 5.0), lines=[Line("busy", 1)],
        tiers=(0, 1, 2), knots=(64, 256), most_events=400,
    )  # fmt: skip


@pytest.fixture
async def replays() -> AsyncIterator[ReplayProcess]:
    process = ReplayProcess()
    yield process
    await process.close()


async def test_it_answers_as_a_replay_here_would(replays: ReplayProcess) -> None:
    asked = picture(30)
    answer = await replays.submit(asked)
    here = asked.surface(futures=FUTURES, seed=1)
    for line in (("busy", 1), (NEWCOMER, 2)):
        assert answer.read(*line, 64, 1, (50, 90)) == here.read(*line, 64, 1, (50, 90))
    assert answer.read("busy", 1, 256, 1, (50, 90)).wait_s[0] > 1.0
    assert answer.basis == "replay, sampled futures"


async def test_what_cannot_be_replayed_is_said_and_the_process_goes_on(replays: ReplayProcess) -> None:
    with pytest.raises(RuntimeError, match="AttributeError"):
        await replays.submit(replace(picture(3), arrivals=None))  # type: ignore[arg-type]
    assert (await replays.submit(picture(3))).at_s == 5.0


async def test_one_that_was_killed_is_started_again(
    replays: ReplayProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_process, "START_AGAIN_S", 0.0)
    await replays.submit(picture(3))
    process = replays._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError):
        await replays.submit(picture(3))
    assert (await replays.submit(picture(3))).at_s == 5.0
    assert replays._process is not None
    assert replays._process.pid != process.pid


async def test_it_ends_with_the_gateway(replays: ReplayProcess) -> None:
    await replays.submit(picture(3))
    process = replays._process
    assert process is not None
    await replays.close()
    await asyncio.wait_for(process.wait(), 10)
