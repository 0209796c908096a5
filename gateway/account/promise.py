"""Was it as it was told? An estimate against what then happened, for the calibration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from engine.forecast.calibration import Bucket, Calibration, What
from engine.forecast.wait.forecast import Figures, Forecast

if TYPE_CHECKING:
    from gateway.account.estimate import Estimate, Times


class Promise(msgspec.Struct, frozen=True, gc=False):
    """The times behind an estimate, before they were corrected, and where such ones are compared with the
    truth."""

    bucket: Bucket
    raw: Forecast | Figures


def calibrate(calibration: Calibration, estimate: Estimate, times: Times, output_tokens: int) -> None:
    """Tells the calibration what a request that was answered in full really waited and took."""
    promise = estimate.promise
    if promise is None:
        return
    seen = {
        "wait": times.wait_s,
        "ttft": times.ttft_s,
        "tpot": times.tpot_s(output_tokens),
        "e2e": times.e2e_s,
    }
    actual: dict[What, float] = {what: value for what, value in seen.items() if value is not None}  # type: ignore[misc]
    calibration.observe(promise.bucket, promise.raw, estimate, actual)
