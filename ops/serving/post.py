"""What a worker has from its supervisor, which sends it as it starts."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

import msgspec

from gateway.workers.seat import Seat
from ops.serving.datadir import worker_dir
from ops.serving.listeners import Door
from ops.serving.open_files import OpenFiles
from ops.settings.settings import Settings
from ops.settings.upstreams import EngineEntry

UP = "up"
"""What a worker says once it serves; anything else is why it does not."""


@dataclass(frozen=True)
class Post:
    seat: Seat
    server: Settings
    """Of the whole server."""
    pepper: bytes
    limits: OpenFiles
    engines: tuple[EngineEntry, ...]
    """That the supervisor runs."""
    listeners: tuple[int, ...]
    """Descriptors: the public one, and the operators' where they have their own."""

    @property
    def settings(self) -> Settings:
        """The worker's own."""
        whole = self.server
        keys_dir = whole.engine.keys_dir or str(whole.data_dir)
        return replace(
            whole,
            data_dir=worker_dir(whole.data_dir, self.seat.number),
            engines=whole.engines + self.engines,
            engine=msgspec.structs.replace(whole.engine, count=1, keys_dir=keys_dir),
        )

    def door(self) -> Door:
        public, *admin = (socket.socket(fileno=descriptor) for descriptor in self.listeners)
        return Door(public, admin[0] if admin else None)
