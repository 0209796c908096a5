"""Scale from an engine's mean step time to that of the last seconds.

A wait is a sum over many steps, so for waits the engine's mean over the last minutes counts (of a server that
has none, the typical step), and a moment does not: in the middle of a burst what the burst itself costs the
machine is no pace to go on with. This measures what the mean is late to see, from the snapshots that the
engine sends anyway: how much time passed, against what the mean says for the steps taken meanwhile. It begins
with some seconds in which both were alike. Pure: snapshots are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.messages import Snapshot, StepTime
from engine.step_time.model import predict_step_s

MEMORY_S = 10.0
"""Busy seconds after which one counts half."""
FIRST_S = 3.0
"""Those that it begins with."""
LONGEST_GAP_S = 1.0
SLOWEST, FASTEST = 20.0, 0.5


@dataclass(slots=True)
class StepTimeScale:
    _last: Snapshot | None = None
    _elapsed_s: float = FIRST_S
    _predicted_s: float = FIRST_S

    @property
    def factor(self) -> float:
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

    def adjust(self, snapshot: Snapshot) -> StepTime:
        """The step time to reckon waits with."""
        step_time, factor = mean_of(snapshot), self.factor
        if factor == 1.0:
            return step_time
        return msgspec.structs.replace(
            step_time,
            base_s=step_time.base_s * factor,
            per_token_s=step_time.per_token_s * factor,
            per_context_token_s=step_time.per_context_token_s * factor,
            per_sequence_s=step_time.per_sequence_s * factor,
        )


def mean_of(snapshot: Snapshot) -> StepTime:
    return snapshot.mean_step_time or snapshot.step_time


def _was_busy(last: Snapshot, now: Snapshot) -> bool:
    """Some sequence ran at both ends: the engine cannot have been idle in between."""
    ran = {running.sequence_id for running in last.running}
    return any(running.sequence_id in ran for running in now.running)


def _predicted_s(last: Snapshot, now: Snapshot) -> float:
    steps = now.step - last.step
    tokens = _tokens(now) - _tokens(last)
    sequences = (len(last.running) + len(now.running)) / 2
    context = (_context(last) + _context(now)) / 2
    one_step_s = predict_step_s(mean_of(now), round(tokens / steps), round(context), max(1, round(sequences)))
    return steps * one_step_s


def _tokens(snapshot: Snapshot) -> int:
    """Tokens that went through the model so far, but for one an answer: it comes with its prompt's last."""
    return sum(had.computed_tokens + had.emitted_tokens for had in snapshot.service.values())


def _context(snapshot: Snapshot) -> int:
    return sum(running.computed_tokens for running in snapshot.running)
