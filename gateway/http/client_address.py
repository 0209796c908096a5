"""The address of a request's client, behind proxies that are trusted.

The TCP peer; where that is a trusted proxy, the last address in `X-Forwarded-For`, and so on to the left as
long as the address found is a trusted proxy's itself. What stands further left is the client's own word and
counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from litestar.types import Scope

from tenants.networks import Address, Network, address_of, is_within

HEADER = b"x-forwarded-for"


def client_of(scope: Scope, trusted: Iterable[Network]) -> Address | None:
    """The client's address; None: the peer, or a trusted proxy, names none that can be read."""
    peer = scope.get("client")
    # A proxy may add a header of its own to one that it got: all of them are one list.
    forwarded = b",".join(value for name, value in scope["headers"] if name == HEADER)
    return client_address(peer[0] if peer else "", forwarded.decode("latin-1"), tuple(trusted))


def client_address(peer: str, forwarded: str, trusted: tuple[Network, ...]) -> Address | None:
    """See `client_of`. `forwarded`: the header's addresses, separated by commas; empty: no header."""
    found = address_of(peer)
    for hop in reversed(forwarded.split(",") if forwarded else []):
        if found is None or not is_within(found, trusted):
            break
        found = address_of(hop)
    return found
