"""`StepBudget`: tokens that a step may compute, fewer than configured once the device's memory ran out."""

from __future__ import annotations

RECOVERS_AFTER_STEPS = 1000
"""Steps without a failure after which a lowered bound doubles."""


class StepBudget:
    def __init__(self, configured: int) -> None:
        self.wanted = configured
        """What knobs leave of the configured number; its owner changes it."""
        self._configured = configured
        self._fits = configured
        self._steps = 0

    @property
    def tokens(self) -> int:
        return min(self.wanted, self._fits)

    def shrink(self, step_tokens: int, least: int) -> bool:
        """A step of `step_tokens` did not fit: halves what a step may have. False: it has `least` already."""
        fits = max(1, least, step_tokens // 2)
        if fits >= step_tokens:
            return False
        self._fits, self._steps = fits, 0
        return True

    def computed(self) -> None:
        """Counts a step that succeeded."""
        if self._fits >= self._configured:
            return
        self._steps += 1
        if self._steps == RECOVERS_AFTER_STEPS:
            self._fits, self._steps = 2 * self._fits, 0
