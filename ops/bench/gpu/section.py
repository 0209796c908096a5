"""A section of the GPU's benchmark: device, clock, and the figures that it notes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from engine.model.device import DeviceQueues
from ops.bench.common.report import Progress

NOT_MEASURED = "not measured"
NEEDS_CARD = f"needs a card: {NOT_MEASURED}"


class TimeIsUp(Exception):
    """A section has used its time up."""


@dataclass(slots=True)
class Section:
    """`until_s`: by `time.perf_counter`. `kept`: what sections leave to those after them. `loading`: as in
    `engine.model.loader.prepared`, where not by default. `queues` None: the device's own."""

    name: str
    until_s: float
    device: torch.device
    tell: Progress
    kept: dict[str, Any]
    loading: dict[str, Any]
    queues: DeviceQueues | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def has_card(self) -> bool:
        return bool(self.device.type == "cuda")

    def note(self, name: str, figure: Any, *, is_right: bool = True) -> None:
        """Keeps and shows a figure, which only a card measures. Raises as `check_time`."""
        if not self.has_card and figure != NEEDS_CARD:
            figure = dict.fromkeys(figure, NOT_MEASURED) if isinstance(figure, dict) else NOT_MEASURED
        self.figures[name] = figure
        if not is_right:
            self.figures.setdefault("wrong", []).append(name)
        self.tell(f"{self.name}: {name}: {json.dumps(figure)}{'' if is_right else ' WRONG'}")
        self.check_time()

    def check_time(self) -> None:
        """Raises `TimeIsUp`."""
        if time.perf_counter() > self.until_s:
            raise TimeIsUp

    def seconds(self, call: Callable[[], object]) -> float:
        """That a call takes a card, in a captured graph of many."""
        call()
        if not self.has_card:
            return 1.0
        from triton.testing import do_bench_cudagraph

        return float(do_bench_cudagraph(call, return_mode="median")) / 1e3

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written a second by a copy; measured once."""
        if "copy" not in self.kept:
            source = torch.ones(2**31 if self.has_card else 2**16, dtype=torch.uint8, device=self.device)
            copy = partial(torch.empty_like(source).copy_, source)
            self.kept["copy"] = 2 * source.numel() / self.seconds(copy)
        return float(self.kept["copy"])
