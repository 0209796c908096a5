"""A server's address from its URL. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit


class BadUrl(ValueError):
    """The message says why."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    host: str
    port: int
    is_tls: bool
    prefix: str
    """Empty or `/something`."""
    authority: str
    """The `Host` header."""


def target_of(url: str) -> ServerAddress:
    """The address of a URL with or without its `/v1`. Raises `BadUrl`."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadUrl(str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BadUrl("it must begin with http:// or https:// and name a host")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise BadUrl("it must hold no credentials, query or fragment; name the key's variable in api_key_env")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise BadUrl("it must be plain ASCII without spaces")
    is_tls = parts.scheme == "https"
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return ServerAddress(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix, parts.netloc)
