"""Simulates other policies on the arrivals of a demo run.

On virtual time, with the step-time model that the real engine fitted while it served. Nothing here is
measured: it is a simulation and the report says so. The policy that served is simulated as well, so that like
is compared with like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gateway.flow.dispatch_log import LogRecord
from ops.simulate.machines.machines import Machine
from ops.simulate.pool import SimulatedPool
from ops.simulate.traffic.requests import SimulatedRequest


@dataclass(frozen=True, slots=True)
class PastRequest(SimulatedRequest):
    """One arrival of the run that is simulated again, with the length that its answer had."""

    request_id: str = ""
    predicted_output_tokens: int = 1


@dataclass
class PolicyRun:
    """Queue waits by request (arrival to dispatch, seconds), and the dispatch log."""

    waits_s: dict[str, float]
    log: list[LogRecord]
    ended_s: float


class _Recorded:
    """Implements `Predictions`: what was predicted in the run."""

    def predict(self, request: SimulatedRequest) -> tuple[int, int]:
        assert isinstance(request, PastRequest)
        return request.predicted_output_tokens, 0

    def ended(self, request: SimulatedRequest) -> None:
        """Nothing to learn."""


def simulate(policy: str, requests: Sequence[PastRequest], machine: Machine) -> PolicyRun:
    """Runs all requests to their end under `policy`. Raises `ValueError` for an unknown policy."""
    log_records = 4 * len(requests) + 16
    pool = SimulatedPool(
        policy, machine, predictions=_Recorded(), prefix_caching=False, flow={"log_records": log_records}
    )
    arrivals = sorted(requests, key=lambda request: request.arrival_s)
    pool.run(arrivals)
    records, log = pool.records, pool.flow.log
    return PolicyRun(
        {each.request_id: records.dispatched_s[row] - each.arrival_s for row, each in enumerate(arrivals)},
        [
            replace(record, request_id=arrivals[int(record.request_id)].request_id)
            for record in log.since(0, log.next_index)
        ],
        pool.now_s,
    )
