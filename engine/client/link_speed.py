"""Bandwidth of the link to one engine, measured by exports that carried KV. Pure."""

from __future__ import annotations

PRIOR_BYTES_PER_S = 100e6
"""A network of 1 Gbit/s; counts as one export of a second."""
LEAST_BYTES = 1 << 20
"""Smaller exports measure the step that they wait for, not the link."""
DECAY = 0.5
"""Weight of the past per export."""


class LinkSpeed:
    def __init__(self) -> None:
        self._bytes = PRIOR_BYTES_PER_S
        self._seconds = 1.0

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds

    def note(self, size_bytes: int, seconds: float) -> None:
        """An export of `size_bytes` of KV was answered after `seconds`, the engine's own work included."""
        if size_bytes >= LEAST_BYTES:
            self._bytes = DECAY * self._bytes + size_bytes
            self._seconds = DECAY * self._seconds + seconds
