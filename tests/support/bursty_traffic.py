"""Small traffic with bursts above what a small machine serves, for tests of what learns from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from engine.messages import StepTime
from engine.virtual.step_shapes import LinearTiming
from ops.simulate.learn.trial import LearningSetup
from ops.simulate.machines.machines import Machine
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import SimulatedRequest

STEP_TIME = StepTime(10e-3, 1e-3, 0.0, 0.0, samples=1, relative_error=0.0)
TWO_PLACES = Machine("two places", LinearTiming(STEP_TIME), STEP_TIME, 4000, 1000, 2, 64)
"""Serves about 2.5 of the requests below a second."""
SETUP = LearningSetup("tiny", TWO_PLACES, slo=SloLimits(ttft_s=2.0, tpot_s=0.1))
BURST_S = 40.0


def bursty(seconds: float = 300.0, *, quiet: float = 0.4, burst: float = 3.0) -> list[SimulatedRequest]:
    """Every other `BURST_S` seconds more requests a second than two places serve."""
    rng = random.Random("bursty")
    found: list[SimulatedRequest] = []
    at_s = 0.0
    while True:
        at_s += rng.expovariate(burst if int(at_s / BURST_S) % 2 else quiet)
        if at_s >= seconds:
            return found
        found.append(SimulatedRequest(at_s, f"tenant-{rng.randrange(2)}", 20, rng.choice([20, 60, 100])))


def shuffled(requests: Sequence[SimulatedRequest]) -> list[SimulatedRequest]:
    """The same requests, with the gaps between them in another order: no bursts are left."""
    rng = random.Random("shuffled")
    times_s = [0.0, *(request.arrival_s for request in requests)]
    gaps_s = [later - earlier for earlier, later in pairwise(times_s)]
    rng.shuffle(gaps_s)
    at_s, found = 0.0, []
    for request, gap_s in zip(requests, gaps_s, strict=True):
        at_s += gap_s
        found.append(replace(request, arrival_s=at_s))
    return found


def write_trace(path: Path, requests: Sequence[SimulatedRequest]) -> Path:
    """As a file for `--trace`."""
    rows = (
        f"{each.arrival_s!r},{each.tenant},{each.input_tokens},{each.output_tokens}\n" for each in requests
    )
    path.write_text("arrival_s,tenant,input_tokens,output_tokens\n" + "".join(rows))
    return path
