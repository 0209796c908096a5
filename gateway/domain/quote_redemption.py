"""Judges whether a redeemed quote was kept, and computes the credit for a miss.

The quoted p90 of TTFT is the promise for every request. That of the whole answer counts only where the answer
was no longer than the quoted p90 of its length. Not ours: time for which the tenant's own limits held the
request back or its client did not read, time that went to its tenant's own work which the quote did not count
(`gateway/explain/own_work.py`), and what the client ended. Time that our stores took is ours; a fault of ours
breaks the promise whatever the clock says. A quote that does not bind is judged and never credited. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    is_binding: bool = True
    own_s: tuple[float, float] = (0.0, 0.0)
    """Of the time to the first token and of the whole time: what went to its tenant's own later work."""
    is_capped: bool = False
    """Its tenant has had the most that is credited in a day: `credit_nanousd` is less than was due."""

    def capped_at(self, credited_nanousd: int) -> Redemption:
        """Credited with so much only."""
        return replace(self, credit_nanousd=credited_nanousd, is_capped=True)

    def as_json(self) -> dict[str, Any]:
        """As the account shows it."""
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
    """`output_tokens` emitted and `cost_nanousd` charged in all; `limited_s`: how long its tenant's
    limits kept it out of the queue; `rested_s`: how long it rested while decoding, for those limits or for a
    client that did not read; `credit_share` of the charge is credited for a miss of ours, if the quote
    `is_binding`; `own_s`: of the times to its first and its last token, what its tenant's own later work
    took."""
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
