"""How does every client of ours talk to Redis?"""

from __future__ import annotations

from typing import Any

from redis.maint_notifications import MaintNotificationsConfig


def redis_options(timeout_s: float) -> dict[str, Any]:
    """Arguments of each client and pool of connections.

    Without notifications of maintenance (which only Redis Enterprise sends): as long as it expects them,
    redis-py 8 hands out pooled connections that the server has closed, and a restarted Redis would fail one
    more request for each of them.
    """
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
