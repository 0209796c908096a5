"""Report of one fast path: used or not, and why. `fairgate doctor` prints them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PathReport:
    """Verdict on one fast path."""

    name: str
    chosen: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {'used' if self.chosen else 'not used'}, {self.reason}"


class Unsupported(Exception):
    """A fast path cannot be used with this model or on this machine; the message says why."""
