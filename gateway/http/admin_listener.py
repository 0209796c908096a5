"""Divides paths between the public listener and the operators' own. Pure.

Admin API, console and metrics are only on the latter, tenants' routes only on the former; else 404.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from gateway.http.unknown_routes import not_found

ADMIN_PATHS = ("/admin/v1", "/console", "/metrics")
TENANT_PATHS = ("/v1",)
"""Everything else (health, documentation) is on both."""
_SLASHES = re.compile(r"/{2,}")


@dataclass(frozen=True, slots=True)
class AdminListener:
    host: str
    port: int

    def accepted(self, local: tuple[str, int | None] | None) -> bool:
        if local is None or local[1] != self.port:
            return False
        bound = _address(self.host)
        return bound is not None and (bound.is_unspecified or bound == _address(local[0]))


def require_listener(path: str, *, is_admin: bool) -> None:
    """Raises `ApiError` (404)."""
    if _is_below(path, TENANT_PATHS if is_admin else ADMIN_PATHS):
        raise not_found(path)


def _is_below(path: str, prefixes: tuple[str, ...]) -> bool:
    # As the router reads it: of several slashes only one counts.
    plain = _SLASHES.sub("/", f"/{path}")
    return any(plain == prefix or plain.startswith(f"{prefix}/") for prefix in prefixes)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return found if mapped is None else mapped
