"""Gate that picks the most accurate layer of the length forecast, by tenant and model.

When an answer ends, all layers are judged by the same loss, relative to the layer at the bottom, which always
answers. The layer with the least loss over the last thousand answers is used: by a tenant's own answers,
until there are enough of them by the model's. A change needs a margin both ways (hysteresis), small enough
that staying costs less than 2 %. Follow the leader with a window. Pure; bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

BOTTOM = 0
"""The layer that always answers, and that is used until another has shown to be better."""
DECAY = 0.999
"""Weight of the past per answer: about 1,000 count."""
MARGIN = 0.01
"""By how much of the loss another layer has to be better."""
LEAST_SAMPLES = 12
"""Answers that a layer must have predicted before it may be used."""
OWN_SAMPLES = 32
"""Answers from which on a key decides by itself, not by its group."""
MAX_KEYS = 4096


@dataclass(slots=True)
class _Losses:
    """Decayed sums of a layer's loss, and of the bottom's on the same answers."""

    own: float = 0.0
    bottom: float = 0.0
    samples: int = 0

    @property
    def ratio(self) -> float:
        """Loss in units of the bottom's."""
        if self.bottom <= 0:
            # The bottom was always exactly right.
            return 1.0 if self.own <= 0 else float("inf")
        return self.own / self.bottom


@dataclass(slots=True)
class _LayerChoice:
    """The layers' losses for one key, and which of them is used."""

    losses: list[_Losses]
    used: int = BOTTOM
    samples: int = 0
    changes: int = field(default=0)

    def observe(self, losses: Sequence[float | None]) -> None:
        self.samples += 1
        bottom = losses[BOTTOM]
        assert bottom is not None
        for layer, loss in zip(self.losses, losses, strict=True):
            if loss is not None:
                layer.own = layer.own * DECAY + loss
                layer.bottom = layer.bottom * DECAY + bottom
                layer.samples += 1
        self._choose()

    def best_of(self, layers: Iterable[int]) -> int:
        """The one with the least loss, of those that are known well enough."""
        known = (layer for layer in layers if self.losses[layer].samples >= LEAST_SAMPLES)
        return min(known, key=lambda layer: self.losses[layer].ratio, default=BOTTOM)

    def _choose(self) -> None:
        best = self.best_of(range(len(self.losses)))
        if self.losses[best].ratio < self.losses[self.used].ratio * (1 - MARGIN):
            self.used = best
            self.changes += 1


class LayerGate:
    """Follows the losses of all layers. One writer: the code that sees answers end."""

    def __init__(self, layers: int, *, max_keys: int = MAX_KEYS) -> None:
        """`layers`: how many there are, the bottom one included. Raises ValueError for less than one."""
        if layers < 1 or max_keys < 1:
            raise ValueError(f"layers ({layers}) and max_keys ({max_keys}) must be at least 1")
        self._layers = layers
        self._max_keys = max_keys
        self._choices: dict[Hashable, _LayerChoice] = {}

    def layer(self, key: Hashable, group: Hashable, speaking: Collection[int] | None = None) -> int:
        """The layer to use for `key`, which belongs to `group`; of those `speaking` (None: all), where the
        others have nothing to say."""
        choice = self._choices.get(key)
        if choice is None or choice.samples < OWN_SAMPLES:
            choice = self._choices.get(group)
        if choice is None:
            return BOTTOM
        if speaking is None or choice.used in speaking:
            return choice.used
        return choice.best_of(speaking)

    def observe(self, key: Hashable, group: Hashable, losses: Sequence[float | None]) -> None:
        """An answer of `key` ended; `losses`: what each layer's forecast of it lost, None where it said
        nothing. Raises ValueError unless there is one for each layer, and one of the bottom."""
        if len(losses) != self._layers or losses[BOTTOM] is None:
            raise ValueError(f"expected the losses of {self._layers} layers, the bottom's among them")
        for owner in (key, group):
            # Taken out and put back: the dictionary's order is that of the last observations.
            choice = self._choices.pop(owner, None)
            if choice is None:
                choice = _LayerChoice([_Losses() for _ in range(self._layers)])
            choice.observe(losses)
            self._choices[owner] = choice
        while len(self._choices) > self._max_keys:
            del self._choices[next(iter(self._choices))]

    def report(self, key: Hashable) -> dict[str, Any]:
        """Plain values: the layer in use, how often that changed, each layer's loss relative to the
        bottom's."""
        choice = self._choices.get(key)
        if choice is None:
            return {"used": BOTTOM, "changes": 0, "samples": 0, "relative_loss": [None] * self._layers}
        return {
            "used": choice.used,
            "changes": choice.changes,
            "samples": choice.samples,
            "relative_loss": [layer.ratio if layer.samples else None for layer in choice.losses],
        }
