"""Which figures of its estimate a request kept, read off its timeline. Pure.

Compares what its client was told (on arrival, or by its quote) with what it saw; unlike for credits, own
later requests are not taken out. Only requests that were answered in full in their tier count.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.forecast.calibration import load_of
from engine.messages import TIER_RANKS
from gateway.domain.timeline import FIELDS, OUTCOMES, Event, TimelineKind, number
from tenants.counts.calibration import HOUR_S, KINDS, CalibrationKey, KeptCount
from tenants.outcomes import RequestOutcome

HOUR_US = HOUR_S * 1_000_000
_TIERS = {rank: tier for tier, rank in TIER_RANKS.items()}
_P50, _P90, _IS_BINDING = slice(4), slice(4, 8), 8
"""Places in the numbers of `QUOTED`; of each figure in the order of `happened`."""
assert FIELDS[TimelineKind.QUOTED][_IS_BINDING] == "is_binding"


def kept_figures(events: Sequence[Event], model: str, ended_us: int) -> dict[CalibrationKey, KeptCount]:
    """The figures that a request was told, each counted once; empty: none, or an old timeline."""
    firsts = {event.kind: event for event in reversed(events)}
    quoted, ended = firsts.get(TimelineKind.QUOTED), firsts.get(TimelineKind.ENDED)
    if (
        quoted is None
        or ended is None
        or len(quoted.numbers) < len(FIELDS[TimelineKind.QUOTED])
        or number(ended, "outcome") != OUTCOMES.index(RequestOutcome.COMPLETED)
        or TimelineKind.MOVED in firsts
    ):
        return {}
    dispatched, first_token = firsts.get(TimelineKind.DISPATCHED), firsts.get(TimelineKind.FIRST_TOKEN)
    happened = {
        "wait": None if dispatched is None else dispatched.at_us,
        "ttft": None if first_token is None else first_token.at_us,
        "e2e": ended.at_us,
        # Vectors have no output tokens.
        "output": None
        if first_token is None
        else number(firsts.get(TimelineKind.SETTLED), "charged_output_tokens"),
    }
    tier = _TIERS[number(firsts.get(TimelineKind.RECEIVED), "tier")]
    told = quoted.numbers
    bucket = load_of(told[0] / 1e6)
    kind = KINDS[told[_IS_BINDING]]
    hour_s = ended_us // HOUR_US * HOUR_S
    return {
        CalibrationKey(hour_s, model, tier, figure, bucket, kind): KeptCount(
            1, int(actual <= p50), int(actual <= p90)
        )
        for (figure, actual), p50, p90 in zip(happened.items(), told[_P50], told[_P90], strict=True)
        if actual is not None
    }
