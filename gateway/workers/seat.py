"""The place of one worker among those that serve one port (`docs/architecture.md`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Seat:
    number: int
    """0 to `count`; one seat more than workers, for the one that takes another's place."""
    count: int
    """Workers that serve."""
    control_token: str = field(repr=False)
    """Of the whole server: every worker takes it."""
    directory: Path
    """Private to the server's user, with a short path: sockets and files that the workers share."""

    @property
    def socket(self) -> Path:
        return self.socket_of(self.number)

    def socket_of(self, number: int) -> Path:
        return self.directory / f"worker-{number}.sock"

    @property
    def keeper(self) -> Path:
        """The supervisor's socket."""
        return self.directory / "keeper.sock"

    @property
    def tally(self) -> Path:
        return self.directory / "tally"
