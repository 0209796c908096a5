"""The sockets that a server listens on: the public one, and the operators' where they have their own."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from ops.serving.open_files import ADMIN_CONNECTIONS
from ops.settings.settings import Settings

PROBE_EVERY_S = 60
"""Of a connection on which nothing moves."""


class StartFailed(Exception):
    """The server cannot start; the message says why and what to do."""


@dataclass(frozen=True)
class Door:
    """What one gateway process listens on."""

    listener: socket.socket
    admin_listener: socket.socket | None
    """None: the settings have none."""

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.listener] if self.admin_listener is None else [self.listener, self.admin_listener]

    @property
    def url(self) -> str:
        return url_of(self.listener)

    @property
    def admin_url(self) -> str | None:
        return None if self.admin_listener is None else url_of(self.admin_listener)


@contextlib.contextmanager
def doors(settings: Settings, backlog: int) -> Iterator[list[Door]]:
    """One for each worker, all on the same port: what waits at one stays there while its worker is replaced.
    Raises `StartFailed`."""
    count, where = settings.workers, settings.admin.host_and_port
    with contextlib.ExitStack() as closing:
        public = _listeners(closing, count, settings.host, settings.port, backlog, ("--host", "--port"))
        admin: list[socket.socket | None] = [None] * count
        if where is not None:
            admin[:] = _listeners(
                closing, count, *where, ADMIN_CONNECTIONS, ("--admin-listen", "--admin-listen")
            )
        yield [Door(*pair) for pair in zip(public, admin, strict=True)]


def _listeners(
    closing: contextlib.ExitStack, count: int, host: str, port: int, backlog: int, flags: tuple[str, str]
) -> list[socket.socket]:
    is_shared = count > 1
    if is_shared:
        # First alone: another server that shares its port would not be noticed.
        with listening(host, port, backlog, flags=flags) as alone:
            port = alone.getsockname()[1]
    listeners = (listening(host, port, backlog, flags=flags, is_shared=is_shared) for _ in range(count))
    return [closing.enter_context(listener) for listener in listeners]


@contextlib.contextmanager
def listening(
    host: str,
    port: int,
    backlog: int,
    *,
    flags: tuple[str, str] = ("--host", "--port"),
    is_shared: bool = False,
) -> Iterator[socket.socket]:
    """The bound socket: taken before the model is loaded, so that a port in use costs no time. `flags`: names
    of the host's and the port's setting, for messages. `is_shared`: with other sockets of this server."""
    where = f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartFailed(f"host {host} is not an address of this machine: {error.strerror}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit these: a batch request may wait in silence for a day, which routers on the way
        # would take for its end, and a client that is gone without a word is noticed.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
            if hasattr(socket, name):  # else the system's own times count
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), PROBE_EVERY_S)
        try:
            listener.bind(address)
            # Only listening shows whether another process listens there.
            listener.listen(backlog)
        except OSError as error:
            match error.errno:
                case errno.EADDRINUSE:
                    other = f"choose another with {flags[1]} (0 takes a free one)"
                    advice = f"is in use; stop what uses it, or {other}"
                case errno.EACCES:
                    advice = f"is not allowed for this user; choose a port above 1023 with {flags[1]}"
                case errno.EADDRNOTAVAIL:
                    advice = f"is not an address of this machine; correct {flags[0]}"
                case _:
                    advice = f"cannot be used: {error.strerror}"
            raise StartFailed(f"{where} {advice}") from None
        yield listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
