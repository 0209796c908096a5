"""Told against happened: which figures of its estimate a request kept, read off its timeline. Pure.

Compared is what its client was told on arrival (or by the quote that it redeemed) with what its client saw;
what its tenant's own later requests took is not taken out, as it is for credits. Requests that were not
answered in full, or that changed their tier, were told something else and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.forecast.calibration import load_of
from engine.messages import TIER_RANKS
from gateway.domain.outcomes import RequestOutcome
from gateway.domain.timeline import FIELDS, OUTCOMES, Event, TimelineKind, first, number
from tenants.counts.calibration import HOUR_S, KINDS, CalibrationKey, KeptCount

HOUR_US = HOUR_S * 1_000_000
_TIERS = {rank: tier for tier, rank in TIER_RANKS.items()}


def kept_figures(events: Sequence[Event], model: str, ended_us: int) -> dict[CalibrationKey, KeptCount]:
    """The figures that a request of `model` was told, each counted once. Empty: it was told none, or they do
    not count, or an older version wrote its timeline."""
    quoted, ended = first(events, TimelineKind.QUOTED), first(events, TimelineKind.ENDED)
    if (
        quoted is None
        or ended is None
        or len(quoted.numbers) < len(FIELDS[TimelineKind.QUOTED])
        or number(ended, "outcome") != OUTCOMES.index(RequestOutcome.COMPLETED)
        or first(events, TimelineKind.MOVED) is not None
    ):
        return {}
    dispatched, first_token = (
        first(events, kind) for kind in (TimelineKind.DISPATCHED, TimelineKind.FIRST_TOKEN)
    )
    happened = {
        "wait": None if dispatched is None else dispatched.at_us,
        "ttft": None if first_token is None else first_token.at_us,
        "e2e": ended.at_us,
        # Vectors have no output tokens.
        "output": None
        if first_token is None
        else number(first(events, TimelineKind.SETTLED), "charged_output_tokens"),
    }
    tier = _TIERS[number(first(events, TimelineKind.RECEIVED), "tier")]
    bucket = load_of(number(quoted, "wait_p50_us") / 1e6)
    kind = KINDS[number(quoted, "is_binding")]
    return {
        CalibrationKey(ended_us // HOUR_US * HOUR_S, model, tier, figure, bucket, kind): KeptCount(
            1, *(int(actual <= number(quoted, f"{figure}_{told}")) for told in _told(figure))
        )
        for figure, actual in happened.items()
        if actual is not None
    }


def _told(figure: str) -> tuple[str, str]:
    unit = "tokens" if figure == "output" else "us"
    return f"p50_{unit}", f"p90_{unit}"
