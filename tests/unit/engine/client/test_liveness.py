"""The liveness thread: speaks for a loop that turns, or stood still for less than its patience."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine import messages
from engine.client.liveness import LivenessThread

DEADLINE_MS = 20_000


class ManualClock:
    """A time that stands until it is set."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


def test_it_speaks_while_the_loop_turns_and_falls_silent_when_it_stood_still_too_long(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    address, clock = f"ipc://{tmp_path}/s", ManualClock()
    with context.socket(zmq.ROUTER) as engine:
        engine.setsockopt(zmq.LINGER, 0)
        engine.bind(address)
        thread = LivenessThread(context, address, None, patience_s=30.0, clock=clock)
        try:
            assert not engine.poll(700), "there is no session yet"
            thread.session = "first"
            clock.now_s += 29.0
            assert engine.poll(DEADLINE_MS)
            assert messages.decode_command(engine.recv_multipart()[1]) == messages.Alive("first")
            clock.now_s += 1.0
            while engine.poll(700):  # what was on its way; then nothing more
                engine.recv_multipart()
            thread.turned()
            thread.session = "second"
            assert engine.poll(DEADLINE_MS)
            assert messages.decode_command(engine.recv_multipart()[1]) == messages.Alive("second")
        finally:
            thread.close()
