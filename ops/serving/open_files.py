"""How the process's open files are divided: clients' connections, and a reserve for everything else."""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass, replace

from gateway.http.connection_table import ConnectionLimits
from gateway.upstream.openai.upstream import SPARE_CONNECTIONS
from ops.settings.settings import BadSetting, Settings

OWN = 64
"""The process's own, the database's and the engine's: some 30 once it is up."""
REDIS = 96
"""The pools of `tenants/quota/redis.py` and `gateway/pools/peer_requests.py`, and their subscriptions."""
MOST_BACKLOG = 2_048
MOST_CONNECTIONS_BY_ITSELF = 16_384
"""More only where the setting says so: each costs some 10 kB."""
LEAST_CONNECTIONS = 8
ADMIN_CONNECTIONS = 64
"""Of the admin listener, beside a backlog of its own."""


@dataclass(frozen=True)
class OpenFiles:
    connections: ConnectionLimits
    backlog: int
    """Connections that wait in the kernel; part of the reserve, as all are accepted before any is refused."""

    @property
    def admin_connections(self) -> ConnectionLimits:
        """Those of the admin listener, which no flood of the public one takes."""
        return replace(self.connections, max_connections=ADMIN_CONNECTIONS, max_per_address=ADMIN_CONNECTIONS)


def raise_limit() -> int:
    """Raises the limit of open files as far as permitted; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 65_536)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def divided(settings: Settings, open_files: int) -> OpenFiles:
    """Raises `BadSetting` where the settings ask for more than there is."""
    gateway = settings.gateway
    backlog = min(MOST_BACKLOG, open_files // 8)
    left = open_files - backlog - OWN - (REDIS if settings.redis_url else 0)
    if settings.admin.listen:
        left -= ADMIN_CONNECTIONS + backlog
    if settings.workers > 1:
        left -= ADMIN_CONNECTIONS  # what other workers ask this one
    # A request at another server is a client's, too: an upstream that may have any number takes half.
    at_upstreams = sum(upstream.max_concurrent + SPARE_CONNECTIONS for upstream in settings.upstreams)
    left -= min(at_upstreams, left // 2)
    most = gateway.max_connections or min(left, MOST_CONNECTIONS_BY_ITSELF)
    if most > left or most < LEAST_CONNECTIONS:
        raise BadSetting(
            f"the limit of open files is {open_files}, which leaves {max(0, left)} for connections beside"
            " database, Redis, engine and upstreams, and"
            f" {max(most, LEAST_CONNECTIONS)} are wanted: raise the limit (ulimit -n), or lower"
            " gateway.max_connections"
        )
    return OpenFiles(
        ConnectionLimits(
            max_connections=most,
            max_per_address=gateway.max_connections_per_address or max(1, most // 2),
            head_timeout_s=gateway.head_timeout_s,
            idle_timeout_s=gateway.idle_timeout_s,
        ),
        backlog,
    )
