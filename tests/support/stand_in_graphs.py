"""Graphs of the stand-in device: launches that were captured with their memory, and are repeated together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support.stand_in_operators import each_tensor, spoil


class Graph:
    """What was launched while it was captured: nothing of it ran then. No Python but the operators' runs when
    it is replayed."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._memory: list[torch.Tensor] = []

    def put(self, work: Callable[[], object], takes_ms: float = 0.0) -> None:
        self._work.append(work)

    def own(self, results: Any) -> Any:
        """Memory that was allocated while it was captured; the results themselves."""
        return each_tensor(results, lambda memory: self._memory.append(memory) or memory)

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def spoil(self) -> None:
        """Fills its memory with garbage: what one launch leaves for the next has to be written anew."""
        with torch.inference_mode():
            for memory in self._memory:
                spoil(memory)

    def run(self) -> None:
        with torch.inference_mode():
            for work in self._work:
                work()
