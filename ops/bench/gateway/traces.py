"""What traces cost: processor time of a kept and of a dropped one, and a collector to send them to.

The time is that of this process from the decision to the export, with the gateway's own decision, builder,
thread and exporter; the timeline, which each request has anyway, is not part of it. The collector is a
process of its own that reads exports and keeps nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engine.messages import SequenceOutcome
from engine.telemetry.sender import SpanTarget, open_sender
from gateway.domain.outcomes import RequestOutcome
from gateway.domain.timeline import Event, TimelineKind
from gateway.tracing.build import KeptTrace
from gateway.tracing.decision import TraceRule
from gateway.tracing.tracer import Tracer
from ops.bench.common.errors import CannotBench
from ops.sandbox.server import ROOT
from ops.settings.telemetry import PATH

RATIO = 0.01
"""Of the rounds with traces."""
TRACES = 2_000
REPEATS = 3
EVENTS: Sequence[Event] = (
    Event(TimelineKind.RECEIVED, 0, (30, 1, 1, 64, 300)),
    Event(TimelineKind.QUOTED, 0, (0, 1_000, 40_000, 64, 1_000, 2_000, 60_000, 64, 0)),
    Event(TimelineKind.RESERVED, 500, (0, 30, 64, 0)),
    Event(TimelineKind.QUEUED, 520, (0, 0, 0, 64)),
    Event(TimelineKind.DISPATCHED, 540, (1, 0, 0)),
    Event(TimelineKind.FIRST_TOKEN, 1_500),
    Event(TimelineKind.TOPPED_UP, 3_000, (200, 48)),
    Event(TimelineKind.LAST_TOKEN, 9_000, (64,)),
    Event(TimelineKind.ENDED, 9_100, (0,)),
    Event(TimelineKind.SETTLED, 9_100, (30, 64, 43_000)),
)
OUTCOME = SequenceOutcome("s", "r", "t", "length", 30, 0, 30, 64)


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[str]:
    """URL of a collector in a process of its own. Raises `CannotBench`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "ops.bench.gateway.collector"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = await process.stdout.readline()
        if not line:
            raise CannotBench("the benchmark's collector did not start")
        yield f"http://127.0.0.1:{int(line)}"
    finally:
        process.stdin.close()
        await process.wait()


def cost_of_traces(url: str) -> dict[str, Any]:
    """Processor seconds of a kept and of a dropped trace, each the least of some repetitions, and the spans
    of a kept one. Raises `CannotBench` where the collector did not get them all."""
    dropped_s = min(_cost_s(0.0, url)[0] for _ in range(REPEATS))
    kept = [_cost_s(1.0, url) for _ in range(REPEATS)]
    return {
        "cpu_s_per_dropped": dropped_s,
        "cpu_s_per_kept": min(seconds for seconds, _ in kept),
        "spans_per_kept": kept[0][1],
    }


def _cost_s(ratio: float, url: str) -> tuple[float, float]:
    """Processor seconds and spans of each trace."""
    sender = open_sender(SpanTarget(url + PATH, 100_000, 2 * TRACES), {"service.name": "fairgate-bench"})
    tracer = Tracer(TraceRule(ratio), sender)
    began_s = time.process_time()
    for number in range(TRACES):
        trace = tracer.rule.trace_of(f"req_{number}", None)
        cause = tracer.decide(
            trace, RequestOutcome.COMPLETED, [OUTCOME], is_quote_kept=None, has_missed=lambda: False
        )
        if cause is not None:
            now_ns = time.time_ns()
            route, operation = "/v1/chat/completions", "chat"
            tracer.keep(
                KeptTrace(
                    trace, cause, operation, "bench", "bench", route, EVENTS, now_ns - 10**7, now_ns, {}
                )
            )
    while sender.waiting:
        time.sleep(0.01)
    tracer.close()
    seconds = time.process_time() - began_s
    if sender.exported != sender.built or (ratio and not sender.built):
        raise CannotBench(f"the collector did not take all spans: {sender.last_error}")
    return seconds / TRACES, sender.built / TRACES
