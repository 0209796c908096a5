"""Which addresses a webhook may have. Pure; the name is resolved when it is added, and before each attempt.

Webhooks must be https, to a public address, unless `gateway.webhook_private` is set: those who add them may
not reach the server's own network. As DNS may change, each attempt resolves the name and checks what it
uses."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from tenants.errors import Invalid

MAX_URL_CHARS = 2_000
PORTS = {"https": 443, "http": 80}
TRANSLATED = IPv6Network("64:ff9b::/96")
"""IPv4 addresses behind a translator (RFC 6052)."""
SETTING = "allow it with the setting gateway.webhook_private"


class Target(NamedTuple):
    scheme: str
    host: str
    port: int


def target_of(url: str, *, allows_private: bool) -> Target:
    """Raises `Invalid`."""
    if not isinstance(url, str) or not 0 < len(url) <= MAX_URL_CHARS:
        raise Invalid("url", f"needs 1 to {MAX_URL_CHARS} characters")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise Invalid("url", "has characters that no URL has: encode them (%20, xn--…)")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise Invalid("url", "is not a URL such as https://example.org/hooks/fairgate") from None
    if parts.scheme not in PORTS or not host:
        raise Invalid("url", "must be a URL such as https://example.org/hooks/fairgate")
    if parts.username is not None or parts.password is not None:
        raise Invalid("url", "must not hold a password: receivers check the signature")
    if parts.fragment:
        raise Invalid("url", "must not hold a fragment (#…): it is never sent")
    if parts.scheme == "http" and not allows_private:
        raise Invalid("url", f"must be https; to use http inside your own network, {SETTING}")
    return Target(parts.scheme, host, PORTS[parts.scheme] if port is None else port)


def checked_addresses(host: str, texts: Iterable[str], *, allows_private: bool) -> str:
    """The first of the addresses that a name resolves to. Raises `Invalid` where any of them is private."""
    addresses = [ip_address(text.partition("%")[0]) for text in texts]
    if not addresses:
        raise Invalid("url", f"the name {host} stands for no address")
    if not allows_private and not all(map(is_public, addresses)):
        raise Invalid("url", f"{host} stands for a private address; {SETTING}")
    return str(addresses[0])


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is public, also one wrapped into another."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in TRANSLATED:
            inner = IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved
