"""Settings of the operators' own listener."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from engine.bounds import Bounded

_PORT = r"(6553[0-5]|655[0-2]\d|65[0-4]\d{2}|6[0-4]\d{3}|[1-5]\d{4}|\d{1,4})"


class AdminSettings(Bounded, frozen=True, kw_only=True):
    """Where operators reach the gateway."""

    listen: Annotated[
        str,
        Meta(
            title="an address and a port, such as 127.0.0.1:9000 or [::1]:9000",
            pattern=rf"((\[[0-9A-Fa-f:.]{{2,45}}(%[A-Za-z0-9._-]{{1,32}})?\]|[A-Za-z0-9._-]{{1,253}}):{_PORT})?",
        ),
        "Address and port of a second listener: the admin API, the console and the metrics answer only there,"
        " and are 404 on the public port. Health checks answer on both. The default has no second listener:"
        " everything answers on the public port.",
    ] = ""

    @property
    def host_and_port(self) -> tuple[str, int] | None:
        """Where it listens; None: there is no second listener."""
        host, _, port = self.listen.rpartition(":")
        return (host, int(port)) if self.listen else None
