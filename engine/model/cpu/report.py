"""Which short cuts does this engine take, and why not the others?

A short cut is taken where a probe at load found it equal and no slower on this machine; each leaves a line
here, whether taken or not. `fairgate doctor` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PathReport:
    """One short cut's verdict."""

    name: str
    chosen: bool
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {'used' if self.chosen else 'not used'}, {self.reason}"


class Unsupported(Exception):
    """A short cut cannot be taken with this model or on this machine; the message says why."""
