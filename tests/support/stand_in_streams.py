"""Streams and events of the stand-in device: the order of queued work, and virtual time.

Interfaces as in `torch.cuda`. A stream's time moves only by the work queued on it, the host's by its waits.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tests.support.stand_in_device import StandIn

ROOT = Path(__file__).parents[2]
SHOWN = ("engine/", "kernels/", "ops/", "tests/")
active: list[StandIn] = []
"""The stand-ins that were entered, the innermost last."""
_names: dict[str, str | None] = {}


def current() -> StandIn:
    if not active:
        raise RuntimeError("the stand-in device is used outside of a StandIn")
    return active[-1]


def where() -> str:
    """File and line of the nearest frame in our code, in transformers or in a test."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file not in _names:
            _names[file] = _name(file)
        if (name := _names[file]) is not None:
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere:0"


def _name(file: str) -> str | None:
    _, _, package = file.partition("/site-packages/")
    if package:
        return package if package.startswith("transformers/") else None
    name = file.removeprefix(f"{ROOT}/")
    return name if name.startswith(SHOWN) and not name.startswith("tests/support/stand_in_") else None


class Stream:
    """Work that runs in the order in which it was queued. Other streams are waited for only where said."""

    def __init__(self, stand_in: StandIn | None = None) -> None:
        self.ms = 0.0
        """When all that is queued will be done."""
        self.queued = self.done = 0
        self._stand_in = stand_in or current()
        self._queue: deque[Callable[[], object]] = deque()

    def put(self, work: Callable[[], object], takes_ms: float = 0.0) -> None:
        """Queues work; without late execution it runs at once. Raises what a lost device raises."""
        self._check()
        self.ms = max(self.ms, self._stand_in.host_ms) + takes_ms
        if self._stand_in.late:
            self._queue.append(work)
            self.queued += 1
        else:
            work()

    def run_to(self, position: int) -> None:
        """Runs what was queued before `position`."""
        self._check()
        with torch.inference_mode():
            while self.done < position:
                self.done += 1
                self._queue.popleft()()

    def finish(self) -> None:
        """The host waits for all that is queued; the caller counts that."""
        self.run_to(self.queued)
        self._stand_in.host_ms = max(self._stand_in.host_ms, self.ms)

    def synchronize(self) -> None:
        self._stand_in.waits[f"{where()} synchronize"] += 1
        self.finish()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What is queued from now on runs after `event` as it was recorded last."""
        if (other := event.stream) is not None:
            position = event.position
            self.ms = max(self.ms, event.ms)
            self.put(lambda: other.run_to(position))

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def _check(self) -> None:
        if self._stand_in.lost is not None:
            raise self._stand_in.lost


class Event:
    """A point in a stream, with its virtual time: each launch takes the stand-in's `launch_ms`."""

    def __init__(self, **options: Any) -> None:
        """Takes the options of `torch.cuda.Event`; all events keep time."""
        self.stream: Stream | None = None
        self.position = 0
        self.ms = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current().current_stream
        self.position = self.stream.queued
        self.ms = max(self.stream.ms, current().host_ms)

    def query(self) -> bool:
        """Whether it has passed. Under late execution, asking does not make it pass."""
        return self.stream is None or self.stream.done >= self.position

    def synchronize(self) -> None:
        """Runs what was queued before it; counted apart from other waits."""
        stand_in = current()
        stand_in.event_waits[where()] += 1
        if self.stream is not None:
            self.stream.run_to(self.position)
            stand_in.host_ms = max(stand_in.host_ms, self.ms)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds. Raises RuntimeError for an event that was not recorded or waited for."""
        if self.stream is None or end.stream is None or not (self.query() and end.query()):
            raise RuntimeError("the time between two events is known when both have passed")
        return end.ms - self.ms
