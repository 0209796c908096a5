"""The estimate made on a request's arrival, and the times it is compared with."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from engine.forecast.calibration import Bucket, Calibration, Miss, What
from engine.forecast.wait.forecast import Figures, Forecast

Seconds = tuple[float, float]
"""p50, p90."""
Whole = tuple[int, int]
"""p50, p90."""


_AS_JSON = (
    b'{"wait_s":{"p50":%.4f,"p90":%.4f},"ttft_s":{"p50":%.4f,"p90":%.4f},"tpot_s":{"p50":%.5f,"p90":%.5f},'
    b'"e2e_s":{"p50":%.4f,"p90":%.4f},"output_tokens":{"p50":%d,"p90":%d},'
    b'"cost_nanousd":{"p50":%d,"p90":%d,"max":%d},'
    b'"tokens_ahead":{"own":%d,"others":%d,"higher_tier":%d},"basis":%s,"samples":%d,"saturated":%s}'
)
_encode_basis = lru_cache(maxsize=64)(msgspec.json.Encoder().encode)


class Estimate(msgspec.Struct, frozen=True, gc=False):
    wait_s: Seconds
    ttft_s: Seconds
    tpot_s: Seconds
    e2e_s: Seconds
    output_tokens: Whole
    cost_nanousd: Whole
    max_cost_nanousd: int
    """Of the longest answer: never exceeded."""
    tokens_ahead: dict[str, int]
    """By cause."""
    basis: str
    samples: int
    saturated: bool
    promise: Promise | None = None
    is_measured: bool = True
    """False: no step of its server was timed yet, so it refuses nothing and promises nothing."""

    def as_json(self) -> dict[str, Any]:
        wait_s, ttft_s, tpot_s, e2e_s = self.wait_s, self.ttft_s, self.tpot_s, self.e2e_s
        tokens, cost = self.output_tokens, self.cost_nanousd
        return {
            "wait_s": {"p50": round(wait_s[0], 4), "p90": round(wait_s[1], 4)},
            "ttft_s": {"p50": round(ttft_s[0], 4), "p90": round(ttft_s[1], 4)},
            "tpot_s": {"p50": round(tpot_s[0], 5), "p90": round(tpot_s[1], 5)},
            "e2e_s": {"p50": round(e2e_s[0], 4), "p90": round(e2e_s[1], 4)},
            "output_tokens": {"p50": tokens[0], "p90": tokens[1]},
            "cost_nanousd": {"p50": cost[0], "p90": cost[1], "max": self.max_cost_nanousd},
            "tokens_ahead": self.tokens_ahead,
            "basis": self.basis,
            "samples": self.samples,
            "saturated": self.saturated,
        }

    def encoded(self) -> msgspec.Raw:
        """`as_json` written in one go, at half the cost of dictionaries."""
        (wait_p50_s, wait_p90_s), (ttft_p50_s, ttft_p90_s) = self.wait_s, self.ttft_s
        (tpot_p50_s, tpot_p90_s), (e2e_p50_s, e2e_p90_s) = self.tpot_s, self.e2e_s
        (tokens_p50, tokens_p90), (cost_p50, cost_p90) = self.output_tokens, self.cost_nanousd
        ahead = self.tokens_ahead
        return msgspec.Raw(
            _AS_JSON
            % (
                wait_p50_s, wait_p90_s, ttft_p50_s, ttft_p90_s, tpot_p50_s, tpot_p90_s, e2e_p50_s, e2e_p90_s,
                tokens_p50, tokens_p90, cost_p50, cost_p90, self.max_cost_nanousd,
                ahead.get("own", 0), ahead.get("others", 0), ahead.get("higher_tier", 0),
                _encode_basis(self.basis), self.samples, b"true" if self.saturated else b"false",
            )
        )  # fmt: skip


@dataclass(slots=True)
class Times:
    """Times of one request on the gateway's clock. None: it did not get that far."""

    arrived_s: float
    dispatched_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None

    @property
    def wait_s(self) -> float | None:
        return None if self.dispatched_s is None else self.dispatched_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.arrived_s

    def without(self, to_first_s: float, to_end_s: float) -> Times:
        """The times if it had taken so much less to its first token and to its end; in the same order."""
        arrived_s = self.arrived_s
        first_s = _earlier(self.first_token_s, to_first_s, arrived_s)
        last_s = _earlier(self.last_token_s, to_end_s, first_s or arrived_s)
        return Times(
            arrived_s,
            _earlier(self.dispatched_s, to_first_s, arrived_s),
            first_s,
            last_s,
            _earlier(self.ended_s, to_end_s, last_s or arrived_s),
        )

    def sooner(self, lag_s: float) -> Times:
        """The times if the tokens had been here so much sooner."""
        least_s = self.arrived_s if self.dispatched_s is None else self.dispatched_s
        first_s = _earlier(self.first_token_s, lag_s, least_s)
        last_s = _earlier(self.last_token_s, lag_s, first_s or least_s)
        ended_s = _earlier(self.ended_s, lag_s, last_s or least_s)
        return Times(self.arrived_s, self.dispatched_s, first_s, last_s, ended_s)

    def tpot_s(self, output_tokens: int) -> float | None:
        """Time per output token after the first, as seen here."""
        if self.first_token_s is None or self.last_token_s is None or output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (output_tokens - 1)


def _earlier(at_s: float | None, seconds: float, least_s: float) -> float | None:
    return None if at_s is None else max(least_s, at_s - seconds)


# An estimate against what then happened, for the calibration.


class Promise(msgspec.Struct, frozen=True, gc=False):
    """The uncorrected times behind an estimate, and what they are compared by."""

    bucket: Bucket
    raw: Forecast | Figures
    is_tracked: bool = True
    """Corrections learn from it."""
    is_learned: bool = True
    """It is corrected by earlier requests, and measured; only such a quote binds."""


def calibrate(
    calibration: Calibration,
    estimate: Estimate,
    times: Times,
    output_tokens: int | None,
    *,
    is_counted: bool = True,
    is_learned: bool = True,
    taught: Collection[Miss] = (),
) -> None:
    """Feeds the calibration with actual times. `output_tokens` None: the answer is not complete."""
    promise = estimate.promise
    if promise is None:
        return
    seen = {
        "wait": times.wait_s,
        "ttft": times.ttft_s,
        "tpot": times.tpot_s(output_tokens or 0),
        "e2e": times.e2e_s,
    }
    never: list[What] = []
    if output_tokens is None:
        never = [what for what in ("wait", "ttft", "e2e") if what == "e2e" or seen[what] is None]
        seen |= dict.fromkeys(never, times.e2e_s)
    actual: dict[What, float] = {what: value for what, value in seen.items() if value is not None}  # type: ignore[misc]
    calibration.observe(
        promise.bucket, promise.raw, estimate, actual,
        is_counted=is_counted, is_tracked=is_learned, taught=taught, never=never,
    )  # fmt: skip
