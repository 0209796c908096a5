"""The address of a request's client behind trusted proxies.

The TCP peer; if that is a trusted proxy, the last address in `X-Forwarded-For`, and so on to the left while
they are trusted proxies; the rest is the client's own claim. `Forwarded` (RFC 7239) says the same. A proxy
writes one and may pass on the other unchanged: if they disagree the address is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from litestar.types import Scope

from tenants.networks import Address, Network, address_of, is_within

HEADER = b"x-forwarded-for"
STANDARD_HEADER = b"forwarded"
_PAIR = re.compile(r'[ \t]*([0-9A-Za-z_-]+)=(?:([^ \t",;]+)|"([^"\\]*)")[ \t]*([;,]|$)')
"""Quoted addresses need no escapes; a header with escapes is not read. Some proxies omit the quotes."""


def client_of(scope: Scope, trusted: Iterable[Network]) -> Address | None:
    """None: the peer, or a trusted proxy, names no readable address."""
    peer = scope.get("client")
    # A proxy may add a header of its own to one that it got: all of them are one list.
    said = [
        b",".join(value for name, value in scope["headers"] if name == header).decode("latin-1")
        for header in (HEADER, STANDARD_HEADER)
    ]
    return client_address(peer[0] if peer else "", said[0], tuple(trusted), said[1])


def client_address(
    peer: str, forwarded: str, trusted: tuple[Network, ...], standard: str = ""
) -> Address | None:
    """See `client_of`. `forwarded`: value of `X-Forwarded-For`; `standard`: of `Forwarded`; or empty."""
    found = {
        _outermost(peer, hops, trusted)
        for text, hops in ((forwarded, forwarded.split(",")), (standard, hops_of(standard)))
        if text
    } or {_outermost(peer, (), trusted)}
    return found.pop() if len(found) == 1 else None


def hops_of(standard: str) -> list[str]:
    """The `for=` of a `Forwarded`'s elements; an empty hop, no address, if one is missing or unreadable."""
    hops, at, hop = [], 0, ""
    while found := _PAIR.match(standard, at):
        name, token, quoted, separator = found.groups()
        if name.lower() == "for":
            hop = token or quoted
        if separator != ";":
            hops.append(hop)
            hop = ""
        at = found.end()
        if not separator:
            return hops
    return [""]


def _outermost(peer: str, hops: Sequence[str], trusted: tuple[Network, ...]) -> Address | None:
    found = address_of(peer)
    for hop in reversed(hops):
        if found is None or not is_within(found, trusted):
            break
        found = address_of(hop)
    return found
