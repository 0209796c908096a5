"""A small file system for one server's database, which a test can fill.

A tmpfs in a mount namespace of the server (`unshare`), which any user may make where user namespaces are
allowed. Writes to it fail with the kernel's own ENOSPC.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.support.server_process import Server

NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount"]
SIZE_MB = 8
PAGE_BYTES = 4096


@cache
def can_mount() -> bool:
    """Whether this machine lets a test mount something of its own."""
    tried = subprocess.run([*NAMESPACES, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    return tried.returncode == 0


@dataclass
class ServerOnSmallDisk(Server):
    """A server whose database lies on a disk of `SIZE_MB` megabytes at `disk`."""

    disk: Path = field(default_factory=Path)

    def start(self) -> None:
        """Starts it with the disk mounted."""
        self.disk.mkdir(exist_ok=True)
        mount = f'mount -t tmpfs -o size={SIZE_MB}m none "$0" && exec "$@"'
        self.under = [*NAMESPACES, "sh", "-c", mount, str(self.disk)]
        self.arguments = ["--database-url", f"sqlite:///{self.disk}/fairgate.db"]
        super().start()

    def fill(self) -> Callable[[], None]:
        """Takes all its space; returns what frees it."""
        assert self.process is not None
        ballast = Path(f"/proc/{self.process.pid}/root{self.disk}/ballast")
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(PAGE_BYTES))
        return ballast.unlink
