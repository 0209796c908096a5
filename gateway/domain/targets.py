"""Targets of a request: what was promised to it, and what its client asks for. Pure.

Promised are the SLO of its tenant and tier and its quote; the tightest counts. If neither bounds the whole
answer, it is due when the promised pace reaches the predicted end or, without a pace, with its first token.
They order requests of different tenants, so they count from when the tenant's own limits let it in. A
client's timeout only refuses early (`deadline_check.py`) and orders its tenant's own requests: between
tenants the shortest would always win.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

import msgspec

from gateway.domain.estimate import Estimate

LEAST_S = 0.001
"""An engine reads 0 as no target."""


class SubmitTargets(TypedDict):
    """Fields of a `Submit`."""

    ttft_target_s: float
    tpot_target_s: float
    deadline_in_s: float | None
    own_deadline_in_s: float | None


class RequestTargets(msgspec.Struct, frozen=True):
    """When what is due, on the gateway's clock. None: no target."""

    first_token_s: float | None = None
    tpot_s: float | None = None
    """Seconds for each further token."""
    deadline_s: float | None = None
    """Promised, for the whole answer."""
    own_deadline_s: float | None = None
    """The client's, if earlier than what is promised."""

    def for_engine(self, now_s: float) -> SubmitTargets:

        def left_s(instant_s: float | None) -> float | None:
            return None if instant_s is None else max(LEAST_S, instant_s - now_s)

        return {
            "ttft_target_s": left_s(self.first_token_s) or 0.0,
            "tpot_target_s": self.tpot_s or 0.0,
            "deadline_in_s": left_s(self.deadline_s),
            "own_deadline_in_s": left_s(self.own_deadline_s),
        }


NO_TARGETS = RequestTargets()


def targets_of(
    slo_s: Mapping[str, float],
    quoted: Estimate | None,
    *,
    since_s: float,
    expires_s: float | None,
    output_tokens: int,
) -> RequestTargets:
    """The tightest of each. `since_s`: let in by its limits; `output_tokens`: predicted per sequence."""
    ttft_s = _least(slo_s.get("ttft"), None if quoted is None else quoted.ttft_s[1])
    e2e_s = _least(slo_s.get("e2e"), None if quoted is None else quoted.e2e_s[1])
    tpot_s = slo_s.get("tpot")
    if e2e_s is None and ttft_s is not None:
        e2e_s = ttft_s + (tpot_s or 0.0) * max(0, output_tokens - 1)
    deadline_s = None if e2e_s is None else since_s + e2e_s
    return RequestTargets(
        None if ttft_s is None else since_s + ttft_s,
        None if tpot_s is None else max(LEAST_S, tpot_s),
        deadline_s,
        expires_s if expires_s is not None and (deadline_s is None or expires_s < deadline_s) else None,
    )


def _least(*seconds: float | None) -> float | None:
    return min((value_s for value_s in seconds if value_s is not None), default=None)
