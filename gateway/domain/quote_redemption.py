"""Judges whether a redeemed quote was kept, and computes the credit for a miss.

The quoted p90 of TTFT is the promise for every request. That of the whole answer counts only where the answer
was no longer than the quoted p90 of its length. Not ours: time for which the tenant's own limits held the
request back or its client did not read, and what the client ended. Time that our stores took is ours; a fault
of ours breaks the promise whatever the clock says. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gateway.domain.estimate import Estimate, Times
from gateway.domain.outcomes import RequestOutcome

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
"""Ends that break a promise by themselves."""
JUDGED = frozenset({RequestOutcome.COMPLETED})


@dataclass(frozen=True, slots=True)
class Redemption:
    """The verdict on a redeemed quote."""

    offer_id: str
    is_kept: bool | None
    """None: its client ended it, or it had no turn to be judged by."""
    missed: tuple[str, ...] = ()
    """`ttft`, `e2e`, or the outcome."""
    credit_nanousd: int = 0
    """Given back, of what was charged."""

    def as_json(self) -> dict[str, Any]:
        """As the account shows it."""
        return {
            "id": self.offer_id,
            "kept": self.is_kept,
            "missed": list(self.missed),
            "credit_nanousd": self.credit_nanousd,
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
) -> Redemption:
    """`output_tokens` emitted and `cost_nanousd` charged in all; `limited_s`: how long its tenant's
    limits kept it out of the queue; `rested_s`: how long it rested while decoding, for those limits or for a
    client that did not read; `credit_share` of the charge is credited for a miss of ours."""
    if outcome in OURS:
        missed: tuple[str, ...] = (outcome.value,)
    elif outcome in JUDGED:
        missed = tuple(_missed(quoted, times, output_tokens, limited_s, rested_s))
    else:
        return Redemption(offer_id, None)
    credit = -(-cost_nanousd * round(credit_share * 1000) // 1000) if missed else 0
    return Redemption(offer_id, not missed, missed, min(cost_nanousd, credit))


def _missed(
    quoted: Estimate, times: Times, output_tokens: int, limited_s: float, rested_s: float
) -> list[str]:
    missed: list[str] = []
    if times.ttft_s is not None and times.ttft_s - limited_s > quoted.ttft_s[1]:
        missed.append("ttft")
    within_length = output_tokens <= quoted.output_tokens[1]
    if within_length and times.e2e_s is not None and times.e2e_s - limited_s - rested_s > quoted.e2e_s[1]:
        missed.append("e2e")
    return missed
