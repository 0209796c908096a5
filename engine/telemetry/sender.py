"""Sends kept traces from a thread, at a limited rate; its queue is bounded, lost traces are counted."""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.telemetry.spans import SpanRecord

Build = Callable[[], Sequence[SpanRecord]]
EXTRA = "traces need the extra otel: pip install 'fairgate[otel]'"
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
GATHER_S = 0.2
"""Traces that come within this time are sent together."""
MAX_BATCH_SPANS = 512
LAST_S = 2.0
"""How long a closing sender goes on sending what waits."""
WARN_EVERY_S = 60.0
SHARE_OF_SAMPLED = 0.5
"""Of the line, for traces kept by sampling alone: traces with an error always have room."""

log = logging.getLogger("fairgate.telemetry")


class SpanExport(Protocol):
    """Where spans go. Used from the sender's thread."""

    def send(self, spans: Sequence[SpanRecord]) -> str:
        """Sends them; what went wrong, empty: nothing. Does not raise."""
        ...

    def close(self) -> None:
        """Ends what is under way, from any thread."""
        ...


@dataclass(frozen=True, slots=True)
class SpanTarget:
    """Where spans go, and how many."""

    endpoint: str
    """The whole URL of a collector's traces, by OTLP/HTTP."""
    spans_per_s: int = 300
    max_waiting: int = 1_000
    """Traces."""


class TelemetryMissing(Exception):
    """The packages that export spans are not installed; the message says what to install."""


def require_extra() -> None:
    try:
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError:  # a parent package of it
        missing = list(PACKAGES)
    if missing:
        raise TelemetryMissing(EXTRA)


class SpanSender:
    """One line of traces and the thread that empties it. `offer` from any thread."""

    def __init__(self, export: SpanExport, target: SpanTarget) -> None:
        self._export = export
        self._target = target
        self._line: deque[Build] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._warned_s = float("-inf")
        self.built = 0
        self.exported = 0
        self.lost = {"line_full": 0, "collector": 0, "fault": 0}
        """Traces that were kept and did not arrive, by what was in the way."""
        self.last_error = ""
        self._thread = threading.Thread(target=self._run, name="fairgate spans", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._line)

    def offer(self, build: Build, *, is_sampled: bool = False) -> bool:
        """Takes a trace, unless the line is full. `is_sampled`: nothing is wrong with it."""
        with self._changed:
            room = self._target.max_waiting * (SHARE_OF_SAMPLED if is_sampled else 1)
            if len(self._line) >= room or self._is_closing:
                self.lost["line_full"] += 1
                return False
            self._line.append(build)
            self._changed.notify()
            return True

    def close(self, last_s: float = LAST_S) -> None:
        """Sends what waits, for at most `last_s`; what is left is lost, and counted."""
        with self._changed:
            if self._is_closing:
                return
            self._is_closing = True
            self._changed.notify()
        self._thread.join(last_s)
        with self._changed:
            self.lost["collector"] += len(self._line)
            self._line.clear()
        self._export.close()
        self._thread.join(GATHER_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._line or self._is_closing)
                if not self._line:
                    return
            began_s = time.monotonic()
            traces, spans = self._batch()
            if spans:
                self._send(traces, spans)
            least_s = 0.0 if self._line else GATHER_S
            self._rest(max(least_s, len(spans) / self._target.spans_per_s) - (time.monotonic() - began_s))

    def _batch(self) -> tuple[int, list[SpanRecord]]:
        """The spans of the next traces, and how many traces these are."""
        most = min(MAX_BATCH_SPANS, self._target.spans_per_s)
        traces = 0
        spans: list[SpanRecord] = []
        while len(spans) < most:
            try:
                build = self._line.popleft()
            except IndexError:
                break
            try:
                made = build()
            except Exception:
                log.exception("the spans of a trace could not be made; it goes on")
                self._lose("fault", 1)
                continue
            self.built += len(made)
            traces += 1
            spans += made
        return traces, spans

    def _send(self, traces: int, spans: Sequence[SpanRecord]) -> None:
        self.last_error = self._export.send(spans)
        if not self.last_error:
            self.exported += len(spans)
            return
        self._lose("collector", traces)
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            log.warning(
                "the collector at %s takes no spans: %s; %d traces are lost so far, and nothing else is",
                self._target.endpoint,
                self.last_error,
                sum(self.lost.values()),
            )

    def _lose(self, why: str, traces: int) -> None:
        with self._changed:
            self.lost[why] += traces

    def _rest(self, seconds: float) -> None:
        """Until it may send again; a closing sender does not rest."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closing, max(0.0, seconds))


def open_sender(target: SpanTarget, resource: Mapping[str, str]) -> SpanSender:
    """Begins to send to a collector, as a process with these attributes. Raises `TelemetryMissing`."""
    require_extra()
    from engine.telemetry.otlp import OtlpExport

    return SpanSender(OtlpExport(target.endpoint, resource), target)
