"""Judges whether a redeemed quote was kept, and computes the credit for a miss. Pure.

The quoted p90 of TTFT always binds; that of the whole answer only up to the quoted p90 of its length. Not
counted: time taken by the tenant's own limits, by a client that did not read, or by own work that the quote
did not include (`gateway/explain/own_work.py`), and ends by the client. Our stores' time counts, and our own
faults break the promise. A quote that does not bind is judged and never credited.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gateway.domain.estimate import Estimate, Times
from tenants.outcomes import RequestOutcome

OURS = frozenset(
    {
        RequestOutcome.ENGINE_LOST,
        RequestOutcome.ENGINE_FAILED,
        RequestOutcome.UPSTREAM_ERROR,
        RequestOutcome.ACCOUNTS_LOST,
        RequestOutcome.SHUTDOWN,
        RequestOutcome.FAILED,
    }
)
JUDGED = frozenset({RequestOutcome.COMPLETED})


@dataclass(frozen=True, slots=True)
class Redemption:
    offer_id: str
    is_kept: bool | None
    """None: its client ended it, or it never ran."""
    missed: tuple[str, ...] = ()
    """`ttft`, `e2e`, or the outcome."""
    credit_nanousd: int = 0
    is_binding: bool = True
    own_s: tuple[float, float] = (0.0, 0.0)
    """Of the time to the first token and the whole time: its tenant's own later work."""
    is_capped: bool = False
    """The tenant's daily maximum of credits was reached."""

    def capped_at(self, credited_nanousd: int) -> Redemption:
        return replace(self, credit_nanousd=credited_nanousd, is_capped=True)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.offer_id,
            "kept": self.is_kept,
            "missed": list(self.missed),
            "credit_nanousd": self.credit_nanousd,
            "credit_capped": self.is_capped,
            "binding": self.is_binding,
            "own_s": {"ttft": round(self.own_s[0], 5), "e2e": round(self.own_s[1], 5)},
        }


def redemption_of(
    offer_id: str,
    quoted: Estimate,
    times: Times,
    outcome: RequestOutcome,
    *,
    output_tokens: int,
    cost_nanousd: int,
    limited_s: float,
    rested_s: float,
    credit_share: float,
    own_s: tuple[float, float] = (0.0, 0.0),
    is_binding: bool = True,
) -> Redemption:
    """`limited_s`: held out of the queue by its tenant's limits; `rested_s`: paused while decoding, for those
    limits or a slow reader; `credit_share`: of the charge, for a miss of ours; `own_s`: its tenant's own
    later work in the times to the first and the last token."""
    if outcome in OURS:
        missed: tuple[str, ...] = (outcome.value,)
    elif outcome in JUDGED:
        missed = tuple(_missed(quoted, times, output_tokens, limited_s, rested_s, own_s))
    else:
        return Redemption(offer_id, None, is_binding=is_binding)
    credit = -(-cost_nanousd * round(credit_share * 1000) // 1000) if missed and is_binding else 0
    return Redemption(offer_id, not missed, missed, min(cost_nanousd, credit), is_binding, own_s)


def _missed(
    quoted: Estimate,
    times: Times,
    output_tokens: int,
    limited_s: float,
    rested_s: float,
    own_s: tuple[float, float],
) -> list[str]:
    missed: list[str] = []
    if times.ttft_s is not None and times.ttft_s - limited_s - own_s[0] > quoted.ttft_s[1]:
        missed.append("ttft")
    if output_tokens > quoted.output_tokens[1] or times.e2e_s is None:
        return missed
    if times.e2e_s - limited_s - rested_s - own_s[1] > quoted.e2e_s[1]:
        missed.append("e2e")
    return missed
