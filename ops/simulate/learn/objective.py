"""The sum that a learned table minimises: waits, missed targets and energy of all submitted requests.

    waits x mean of min(wait / its target, `MOST_WAITS`)
  + misses x share that misses the SLO
  + energy x (energy of an output token over hybrid's, less 1)

A wait is the time to the first token. A request that was refused, or that never ended, has waited longest and
missed its SLO: refusing improves nothing by itself. The energy is left out where the machine's power is not
known. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ops.simulate.records import Records
from ops.simulate.slo import SloLimits

MOST_WAITS = 4.0
"""A wait counts as so many targets at most: one that is lost is not waited for any more."""
PLAIN_WAIT_S = 1.0
"""What waits are measured by where the SLO limits neither TTFT nor E2E."""


@dataclass(frozen=True, slots=True)
class LearningObjective:
    """The weights of the sum. Raises ValueError for one that is negative, and for none at all."""

    waits: float = 0.25
    misses: float = 1.0
    energy: float = 0.1

    def __post_init__(self) -> None:
        if min(self.waits, self.misses, self.energy) < 0 or self.waits + self.misses <= 0:
            raise ValueError(
                f"the weights of waits, misses and energy are at least 0, and one of the first two above it,"
                f" not {self.waits:g}, {self.misses:g} and {self.energy:g}"
            )

    def of(self, served: ServedSum, hybrid: ServedSum) -> float:
        """The whole sum; `hybrid`: of the same requests under `hybrid`."""
        energy = served.joules_per_token / hybrid.joules_per_token - 1 if hybrid.joules_per_token else 0.0
        return self.waits * served.waits + self.misses * served.missed + self.energy * energy

    def words(self, slo: SloLimits, *, has_energy: bool) -> str:
        parts = [
            f"{self.waits:g} x mean of min(TTFT / {wait_target_s(slo):g} s, {MOST_WAITS:g})",
            f"{self.misses:g} x share that misses {slo}",
        ]
        if has_energy:
            parts.append(f"{self.energy:g} x (energy of an output token / hybrid's - 1)")
        text = " + ".join(parts) + ", over all submitted (refused: longest wait, and missed)"
        return text if has_energy else text + "; without energy, which this machine has no figure of"


@dataclass(frozen=True, slots=True)
class ServedSum:
    requests: int
    waits: float
    """Mean of the capped waits, in their targets."""
    missed: float
    refused: float
    joules_per_token: float
    """Of output; 0: not known."""


def wait_target_s(slo: SloLimits) -> float:
    return next((limit_s for limit_s in (slo.ttft_s, slo.e2e_s) if math.isfinite(limit_s)), PLAIN_WAIT_S)


def served_sum(records: Records, slo: SloLimits, joules_per_token: float | None) -> ServedSum:
    count, target_s = len(records), wait_target_s(slo)
    rows = range(count)
    return ServedSum(
        count,
        math.fsum(min(MOST_WAITS, records.ttft_s(row) / target_s) for row in rows) / count,
        sum(not slo.met(records, row) for row in rows) / count,
        sum(records.refused) / count,
        joules_per_token or 0.0,
    )
