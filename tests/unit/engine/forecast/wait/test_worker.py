"""The process that replays answers every picture, also one that it cannot read."""

from __future__ import annotations

import pickle
from io import BytesIO

import pytest

from engine.entry import QueueEntry
from engine.forecast.wait.picture import FUTURES, AnswerLength
from engine.forecast.wait.replayed_engine import EngineLoad, Flight
from engine.forecast.wait.surface import Surface
from engine.forecast.wait.worker import HEADER, serve
from engine.scheduling.counters import ServiceCounters
from engine.scheduling.policy import ORDERS
from engine.scheduling.tiers import TieredQueue
from tests.support.builders import step_time
from tests.support.pictures import picture


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_a_picture_is_answered_with_its_surface_and_a_broken_one_with_text(order: str) -> None:
    counters = ServiceCounters()
    queue = TieredQueue(order, counters)
    for number in range(20):
        queue.add(QueueEntry(f"w{number}", "ab"[number % 2], 0.0, 10 * number, 10))
    flight = Flight(QueueEntry("runs", "a", 0.0, 10, 10), 0, 12, 3, 20)
    load = EngineLoad("e", step_time(0.01, samples=9), 1, 256, 1, 10_000, [flight])
    seen = picture(queue, counters, [load], 5.0, lengths={"runs": AnswerLength(300, 50, 80)})
    contents = [pickle.dumps(seen), b"no pickle", pickle.dumps("no picture"), pickle.dumps(seen)]
    sent = BytesIO(b"".join(HEADER.pack(len(content)) + content for content in contents) + b"\0")
    received = BytesIO()
    serve(sent, received)
    received.seek(0)
    answers = []
    while header := received.read(HEADER.size):
        answers.append(pickle.loads(received.read(*HEADER.unpack(header))))
    assert [type(answer) for answer in answers] == [Surface, str, str, Surface]
    assert answers[0].points != answers[3].points, "other futures each time"
    assert answers[0].points == seen.surface(futures=FUTURES, seed=1).points
    assert answers[3].points == seen.surface(futures=FUTURES, seed=4).points
