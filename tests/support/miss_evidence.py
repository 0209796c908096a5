"""Whether a miss's cause agrees with its stored evidence, read as a user of its page would."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from tenants.outcomes import Cause

SLACK_S = 1e-5
"""Evidence is rounded."""


def contradiction(
    cause: Cause, metric: str, target_s: float, actual_s: float | None, evidence: Mapping[str, float | None]
) -> str:
    """What the evidence says against the cause; empty: nothing. Times of a token are not compared with those
    of a whole request."""

    def meets(name: str) -> bool:
        seconds = evidence.get(name)
        return seconds is not None and seconds <= target_s - SLACK_S

    def misses(name: str) -> bool:
        """Also where it would never have been reached; of some counterfactuals None says: not computed."""
        seconds = evidence.get(name)
        return name in evidence and (inf if seconds is None else seconds) > target_s + SLACK_S

    store_s, lag_s = (
        evidence.get(name) or 0.0 for name in ("store_s", "first_lag_s" if metric == "ttft" else "last_lag_s")
    )
    is_whole = metric != "tpot" and actual_s is not None
    without_s = (inf if actual_s is None else actual_s) - store_s - lag_s
    is_late = is_whole and without_s <= target_s - SLACK_S
    found: dict[str, bool] = {}
    if cause is Cause.REQUEST:
        found["alone it would have met the target"] = meets("alone_s")
    elif cause in (Cause.CAPACITY, Cause.SCHEDULING, Cause.GATEWAY):
        found["alone it would have missed, too"] = misses("alone_s")
    if cause in (Cause.CAPACITY, Cause.SCHEDULING):
        found["without the time of gateway and stores it would have met the target"] = is_late
    if cause is Cause.CAPACITY:
        for name in ("fair_s", "fair_unlimited_s", "fair_without_outages_s", "fair_without_own_s"):
            found[f"{name} meets the target"] = meets(name)
    elif cause is Cause.SCHEDULING:
        found["under the fair share it would have missed, too"] = misses("fair_s")
    elif cause is Cause.GATEWAY:
        found["gateway and stores made no difference"] = is_whole and without_s > target_s + SLACK_S
    elif cause is Cause.QUOTA and "fair_s" in evidence:
        found["under the fair share it would have met the target"] = meets("fair_s")
    return "; ".join(words for words, is_so in found.items() if is_so)
