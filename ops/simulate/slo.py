"""SLO targets of a simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ops.simulate.records import Records

NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class SloLimits:
    """In seconds; the defaults are MLPerf Inference's for Llama 3.1 8B. Raises ValueError at or below 0."""

    ttft_s: float = 2.0
    tpot_s: float = 0.1
    e2e_s: float = math.inf

    def __post_init__(self) -> None:
        for name in NAMES:
            limit_s = getattr(self, f"{name}_s")
            if not limit_s > 0:
                raise ValueError(f"the SLO's {name} must be above 0 s, not {limit_s:g}")

    @staticmethod
    def of(text: str) -> SloLimits:
        """From `ttft=2,tpot=0.1`; others are not limited. Raises ValueError."""
        limits = {f"{name}_s": math.inf for name in NAMES}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            name = name.strip()
            if name not in NAMES or not equals:
                known = ", ".join(f"{known}=SECONDS" for known in NAMES)
                raise ValueError(f"{part.strip()!r} is no target; targets are {known}")
            try:
                limits[f"{name}_s"] = float(value.removesuffix("s"))
            except ValueError:
                raise ValueError(f"{name} must be a number of seconds, not {value!r}") from None
        return SloLimits(**limits)

    def met(self, records: Records, row: int) -> bool:
        return (
            records.last_s[row] >= 0
            and records.ttft_s(row) <= self.ttft_s
            and records.tpot_s(row) <= self.tpot_s
            and records.e2e_s(row) <= self.e2e_s
        )

    def __str__(self) -> str:
        limits = [(name, getattr(self, f"{name}_s")) for name in NAMES]
        return ", ".join(f"{name} {limit:g} s" for name, limit in limits if limit < math.inf) or "none"
