"""Simulates policies on the arrivals of a demo run, at the pace at which its engine served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.messages import TIER_RANKS, StepTime
from ops.demo.replay import Sent
from ops.simulate.machines.machines import Machine, profile_machine
from ops.simulate.pool import SimulatedPool
from ops.simulate.traffic.requests import SimulatedRequest

CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class PastRequest(SimulatedRequest):
    """One arrival of the run that is simulated again, with the length that its answer had."""

    request_id: str = ""
    predicted_output_tokens: int = 1


def past_requests(requests: Sequence[Sent], weights: Mapping[str, float]) -> list[PastRequest]:
    """Real requests and answers in order of arrival; of cut requests, what was planned."""
    past = []
    for place, sent in enumerate(requests):
        if sent.refusal is not None or sent.planned is None:
            continue
        plan, request_id = sent.planned, f"cut-{place}"
        lengths = plan.input_tokens, plan.output_tokens, plan.output_tokens
        if sent.ok and sent.account.get("estimate"):
            estimate, actual = sent.account["estimate"], sent.account["actual"]
            request_id = sent.account["request_id"]
            lengths = actual["input_tokens"], actual["output_tokens"], round(estimate["output_tokens"]["p50"])
        past.append(
            PastRequest(
                max(0.0, sent.sent_s),
                sent.tenant,
                lengths[0],
                max(1, lengths[1]),
                tier=TIER_RANKS[sent.tier],
                weight=weights[sent.tenant],
                request_id=request_id,
                predicted_output_tokens=max(1, lengths[2]),
            )
        )
    return sorted(past, key=lambda request: request.arrival_s)


def served_machine(engine: Mapping[str, Any], max_tokens_per_s: float) -> Machine:
    """An engine by its ceiling and its mean step, slow ones included: a typical step would be too fast."""
    return profile_machine(
        "demo",
        msgspec.convert(engine["mean_step_time"], StepTime),
        kv_tokens=engine["kv_blocks"]["total"] * engine["block_tokens"],
        context_tokens=CONTEXT_TOKENS,
        max_sequences=engine["max_sequences"],
        max_batched_tokens=engine["max_batched_tokens"],
        block_tokens=engine["block_tokens"],
        max_tokens_per_s=max_tokens_per_s,
    )


class _Recorded:
    """Implements `Predictions`: what was predicted in the run."""

    def predict(self, request: SimulatedRequest) -> tuple[int, int]:
        assert isinstance(request, PastRequest)
        return request.predicted_output_tokens, 0

    def ended(self, request: SimulatedRequest) -> None:
        """Nothing to learn."""


def simulate(
    policy: str, requests: Sequence[PastRequest], machine: Machine
) -> tuple[SimulatedPool, dict[str, float]]:
    """A pool that has served all, and their queue waits by request id. Raises `ValueError`."""
    log = {"log_records": 4 * len(requests) + 16}
    pool = SimulatedPool(policy, machine, predictions=_Recorded(), prefix_caching=False, flow=log)
    pool.run(requests)
    dispatched_s = pool.records.dispatched_s
    return pool, {one.request_id: dispatched_s[row] - one.arrival_s for row, one in enumerate(requests)}
