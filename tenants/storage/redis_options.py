"""Connection options shared by all Redis clients."""

from __future__ import annotations

from typing import Any

from redis.maint_notifications import MaintNotificationsConfig


def redis_options(timeout_s: float) -> dict[str, Any]:
    """Maintenance notifications (of Redis Enterprise only) are off: with them redis-py 8 hands out
    connections that the server has closed, and after a Redis restart one request fails for each."""
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "maint_notifications_config": MaintNotificationsConfig(enabled=False),
    }
