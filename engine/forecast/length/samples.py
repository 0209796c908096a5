"""Training samples of the length probe: model states and the tokens that followed.

Numbers only, made from prompts: kept as carefully as those. Bounded: the newest, a few readings of each
sequence. Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_SAMPLES = 20_000
MAX_READINGS = 6


@dataclass(frozen=True, slots=True)
class LengthSample:
    """One reading of a sequence that has ended."""

    generated: int
    remaining: int
    """Tokens that came after, the next one included: at least 1."""
    state: bytes
    """float16, as the reader of the model's state has it."""


class LengthSamples:
    """Readings, kept until their sequence has ended, and samples of those that have."""

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self.total = 0
        self._kept: deque[LengthSample] = deque(maxlen=max_samples)
        self._open: dict[str, list[tuple[int, bytes]]] = {}

    def note(self, sequence_id: str, generated: int, state: bytes) -> None:
        """The state of a running sequence after `generated` tokens."""
        readings = self._open.setdefault(sequence_id, [])
        if len(readings) == MAX_READINGS:
            del readings[1]
        readings.append((generated, state))

    def ended(self, sequence_id: str, output_tokens: int | None) -> None:
        """The sequence had `output_tokens` in all; None: it was cut off, and its readings are dropped."""
        readings = self._open.pop(sequence_id, [])
        if output_tokens is None:
            return
        for generated, state in readings:
            if generated < output_tokens:
                self._kept.append(LengthSample(generated, output_tokens - generated, state))
                self.total += 1

    def kept(self) -> list[LengthSample]:
        """The newest samples, oldest first."""
        return list(self._kept)
