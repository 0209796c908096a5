"""Progress of a waiting request, as comments in its event stream. Pure.

A stream that waits long, or is expected to, gets its headers before its first token and then comments among
its server-sent events: `: fairgate {...}`, which SDKs skip. With `X-Fairgate-Progress: 1` it gets them
immediately, with `0` never. The forecast is of a request that arrives now, without later ones of its tenant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.messages import TIER_RANKS
from gateway import errors
from gateway.domain.call import Call
from gateway.domain.estimate import Estimate
from gateway.flow.controller import Ticket
from gateway.requests.run import Run
from tenants.types import Tier

HEADER = "x-fairgate-progress"
HEADERS_AT_ONCE_S = 0.5
"""Headers wait this long for the budget: a refusal by then has a clean status."""
EVERY_S = 2.0
"""Between two comments."""


@dataclass(frozen=True, slots=True)
class Outlook:
    status: str
    """As `Run.status`."""
    tier: str
    waited_s: float
    tokens_ahead: dict[str, int] | None
    """By cause; None: not queued, or unknown."""
    time_left_s: tuple[float, float] | None
    """Until its turn, p50 and p90."""

    def as_json(self) -> dict[str, Any]:
        """What is before it; both None where no estimate is made."""
        left_s = self.time_left_s
        wait_s = left_s and {"p50": round(left_s[0], 3), "p90": round(left_s[1], 3)}
        return {"tokens_ahead": self.tokens_ahead, "time_left_s": wait_s}

    def comment(self) -> bytes:
        value = {
            "status": self.status,
            "tier": self.tier,
            "waited_s": round(self.waited_s, 3),
        } | self.as_json()
        return b": fairgate " + msgspec.json.encode(value) + b"\n\n"


def wants_progress(header: str | None) -> bool | None:
    """None: the client does not say. Raises `ApiError` (400) for anything but `1` and `0`."""
    if header is None:
        return None
    if header.strip() not in ("0", "1"):
        raise errors.bad_header("X-Fairgate-Progress", header, "It is 1, 0, or left out.")
    return header.strip() == "1"


def told_in_s(call: Call, estimate: Estimate | None, waited_s: float, tell_after_s: float) -> float | None:
    """Seconds in the queue until a stream gets its headers; None: with its first token."""
    if call.progress is not None:
        return 0.0 if call.progress else None
    if estimate is not None and estimate.wait_s[0] > tell_after_s:
        return 0.0
    return max(0.0, tell_after_s - waited_s)


def outlook(
    run: Run, expected: Estimate | None, waiting: Iterable[Ticket], now_s: float, tier: Tier | None = None
) -> Outlook:
    """`expected`: the forecast for one like it that arrives now; `waiting`: all queued requests. `tier`: as
    if it were moved there; it keeps its arrival."""
    call = run.call
    tier = tier or call.tier
    waited_s = now_s - run.times.arrived_s
    if expected is None:
        return Outlook(run.status, tier.value, waited_s, None, None)
    rank = TIER_RANKS[tier]
    of_tenant = [ticket.entry for ticket in waiting if ticket.entry.tenant_id == call.principal.tenant_id]
    itself = next((entry for entry in of_tenant if entry.entry_id == call.request_id), None)
    arrived_s = now_s if itself is None else itself.arrived_s
    behind = sum(
        entry.predicted_cost for entry in of_tenant if entry.tier == rank and entry.arrived_s >= arrived_s
    )
    ahead = dict(expected.tokens_ahead)
    before = sum(ahead.values())
    ahead["own"] = max(0, ahead.get("own", 0) - behind)
    if itself is not None and itself.tier < rank:  # a move down: it does not wait for itself
        ahead["higher_tier"] = max(0, ahead.get("higher_tier", 0) - itself.predicted_cost)
    share = sum(ahead.values()) / before if before else 1.0  # then it waits for a place alone
    left = expected.wait_s[0] * share, expected.wait_s[1] * share
    return Outlook(run.status, tier.value, waited_s, ahead, left)
