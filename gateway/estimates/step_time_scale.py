"""Scale from an engine's modelled to its measured step time.

The model is fitted to typical steps, robustly: it ignores the rare slow ones. A wait is a sum over many
steps, so for waits the mean counts, slow steps and the time between steps included. This measures it from
the snapshots that the engine sends anyway: how much time passed, against what the model says for the steps
taken meanwhile. Pure: snapshots are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.messages import Snapshot, StepTime
from engine.step_time.model import predict_step_s

MEMORY_S = 3.0
"""Busy seconds that count."""
LONGEST_GAP_S = 1.0
SLOWEST, FASTEST = 20.0, 0.5


@dataclass(slots=True)
class StepTimeScale:
    _last: Snapshot | None = None
    _elapsed_s: float = 0.0
    _predicted_s: float = 0.0

    @property
    def factor(self) -> float:
        if self._predicted_s <= 0:
            return 1.0
        return min(SLOWEST, max(FASTEST, self._elapsed_s / self._predicted_s))

    def see(self, snapshot: Snapshot | None) -> None:
        """The same snapshot twice changes nothing."""
        last, self._last = self._last, snapshot
        if last is None or snapshot is None or snapshot.step <= last.step:
            return
        elapsed_s = snapshot.at_s - last.at_s
        if not 0 < elapsed_s <= LONGEST_GAP_S or not _was_busy(last, snapshot):
            return
        predicted_s = _predicted_s(last, snapshot)
        if predicted_s <= 0:
            return
        keep = 0.5 ** (elapsed_s / MEMORY_S)
        self._elapsed_s = self._elapsed_s * keep + elapsed_s
        self._predicted_s = self._predicted_s * keep + predicted_s

    def adjust(self, step_time: StepTime) -> StepTime:
        factor = self.factor
        if factor == 1.0:
            return step_time
        return msgspec.structs.replace(
            step_time,
            base_s=step_time.base_s * factor,
            per_token_s=step_time.per_token_s * factor,
            per_context_token_s=step_time.per_context_token_s * factor,
            per_sequence_s=step_time.per_sequence_s * factor,
        )


def _was_busy(last: Snapshot, now: Snapshot) -> bool:
    """Some sequence ran at both ends: the engine cannot have been idle in between."""
    ran = {running.sequence_id for running in last.running}
    return any(running.sequence_id in ran for running in now.running)


def _predicted_s(last: Snapshot, now: Snapshot) -> float:
    steps = now.step - last.step
    tokens = _tokens(now) - _tokens(last)
    sequences = (len(last.running) + len(now.running)) / 2
    context = (_context(last) + _context(now)) / 2
    one_step_s = predict_step_s(
        now.step_time, round(tokens / steps), round(context), max(1, round(sequences))
    )
    return steps * one_step_s


def _tokens(snapshot: Snapshot) -> int:
    """Tokens that went through the model so far, but for one an answer: it comes with its prompt's last."""
    return sum(had.computed_tokens + had.emitted_tokens for had in snapshot.service.values())


def _context(snapshot: Snapshot) -> int:
    return sum(running.computed_tokens for running in snapshot.running)
