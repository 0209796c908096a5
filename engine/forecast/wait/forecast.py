"""Forecast of a request's times, and the constants of its spread."""

from __future__ import annotations

import msgspec

Seconds = tuple[float, float]
"""p50, p90."""

LENGTH_INFLATION = 2.0
"""Lengths of one tenant are alike, and what arrives later varies too: their sum varies
more than that of independent answers."""
REPLAY_ERROR = 0.2
"""Relative standard error of a replay even with many answers ahead: learned lengths are off a little."""
Z90 = 1.2816


class Figures(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A forecast's times, in seconds."""

    wait_s: Seconds
    ttft_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """What to expect of one request, from now on. Pairs are (p50, p90)."""

    wait_s: Seconds
    """Until it is dispatched to an engine."""
    ttft_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds
    output_tokens: tuple[int, int]
    tokens_ahead: dict[str, int]
    """Cost tokens served before it is dispatched: `own` (of its tenant), `others` (of its tier and
    those below), `higher_tier`. All 0 when it goes at once."""
    basis: str
    samples: int
    """Steps behind the step-time model: the scarcer the samples, the wider the truth."""
    saturated: bool
    """The replay did not reach the request's end: the times are lower bounds."""
    must_serve: int = 0
    """Cost tokens that engines serve before its dispatch, of what is there already; 0: none, or not known."""


def not_before(told: Figures, least_s: float) -> Figures:
    """The figures with a median wait of at least `least_s`; what follows comes so much later."""
    wait, later_s = told.wait_s, least_s - told.wait_s[0]
    if later_s <= 0:
        return told
    (ttft_p50, ttft_p90), (e2e_p50, e2e_p90) = told.ttft_s, told.e2e_s
    return Figures(
        (least_s, max(wait[1], least_s)),
        (ttft_p50 + later_s, max(ttft_p90, ttft_p50 + later_s)),
        told.tpot_s,
        (e2e_p50 + later_s, max(e2e_p90, e2e_p50 + later_s)),
    )
