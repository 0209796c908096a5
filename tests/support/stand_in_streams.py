"""Streams and events of the stand-in device, as in `torch.cuda`: the order of queued work, and virtual time.

Work queued on a stream moves its time, waiting moves the host's; nothing else does.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.support.stand_in_device import StandIn

ROOT = Path(__file__).parents[2]
active: list[StandIn] = []
"""The stand-ins that were entered, the innermost last."""


def current() -> StandIn:
    if not active:
        raise RuntimeError("the stand-in device is used outside of a StandIn")
    return active[-1]


def where() -> str:
    """File and line of the nearest frame in the product, in transformers or in a test."""
    frame: Any = sys._getframe(1)
    while frame is not None and not (name := _shown(frame.f_code.co_filename)):
        frame = frame.f_back
    return "elsewhere" if frame is None else f"{name}:{frame.f_lineno}"


@cache
def _shown(file: str) -> str | None:
    name = file.rpartition("/site-packages/")[2].removeprefix(f"{ROOT}/")
    is_shown = name.startswith(("engine/", "kernels/", "ops/", "tests/", "transformers/"))
    return name if is_shown and not name.startswith("tests/support/stand_in_") else None


class Stream:
    """Work that runs in the order in which it was queued. Other streams are waited for only where said."""

    def __init__(self) -> None:
        self.ms = 0.0
        """When all that is queued will be done."""
        self.queued = self.done = 0
        self._queue: deque[Callable[[], object]] = deque()

    def put(self, work: Callable[[], object], takes_ms: float = 0.0) -> Any:
        """Queues work; without late execution it runs at once, and its result is returned."""
        stand_in = current().check()
        self.ms = max(self.ms, stand_in.host_ms) + takes_ms
        if not stand_in.late:
            return work()
        self._queue.append(work)
        self.queued += 1
        return None

    def run_to(self, position: int) -> None:
        """Runs what was queued before `position`."""
        current().check()
        with torch.inference_mode():
            while self.done < position:
                self.done += 1
                self._queue.popleft()()

    def wait_event(self, event: Event) -> None:
        """What is queued from now on runs after `event` as it was recorded last."""
        self.ms = max(self.ms, event.ms)
        self.put(partial(event.stream.run_to, event.position))

    def wait_stream(self, stream: Stream) -> None:
        (event := Event()).record(stream)
        self.wait_event(event)

    def finish(self) -> None:
        """The host waits for all that is queued; the caller counts that."""
        self.run_to(self.queued)
        current().host_ms = max(current().host_ms, self.ms)

    def synchronize(self) -> None:
        current().waits[f"{where()} synchronize"] += 1
        self.finish()


class Event:
    """A point in a stream, with its virtual time. Takes the options of `torch.cuda.Event`; all keep time."""

    def __init__(self, **options: Any) -> None:
        self.stream = Stream()
        self.position, self.ms = 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current().current_stream
        self.position, self.ms = self.stream.queued, max(self.stream.ms, current().host_ms)

    def query(self) -> bool:
        """Whether it has passed. Under late execution, asking does not make it pass."""
        return self.stream.done >= self.position

    def synchronize(self) -> None:
        """Runs what was queued before it; counted apart from other waits."""
        current().event_waits[where()] += 1
        self.stream.run_to(self.position)
        current().host_ms = max(current().host_ms, self.ms)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds. Raises RuntimeError before both have passed."""
        if not (self.query() and end.query()):
            raise RuntimeError("the time between two events is known when both have passed")
        return end.ms - self.ms
