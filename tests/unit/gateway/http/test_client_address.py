"""Whose address counts behind proxies, and that no client can name another's."""

from __future__ import annotations

from typing import Any, cast

import pytest
from litestar.types import Scope

from gateway.http.client_address import client_address, client_of
from tenants.networks import network_of

TRUSTED = (network_of("10.0.0.0/8"), network_of("::1"))


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        # A peer that is not trusted is the client, whatever it says.
        ("192.0.2.1", "", "192.0.2.1"),
        ("192.0.2.1", "10.0.0.9, 198.51.100.7", "192.0.2.1"),
        ("::ffff:192.0.2.1", "", "192.0.2.1"),
        # What a trusted proxy says, and not what its client said before.
        ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.1, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.1, 198.51.100.7, 10.0.0.2", "198.51.100.7"),
        ("::1", "198.51.100.7:5123,[::1]:80", "198.51.100.7"),
        ("::ffff:10.0.0.1", "198.51.100.7", "198.51.100.7"),
        # Proxies only: the one that is furthest away.
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        # What cannot be read is no address, but only where it counts.
        ("10.0.0.1", "203.0.113.1, unknown", "None"),
        ("10.0.0.1", "203.0.113.1,", "None"),
        ("10.0.0.1", "garbage, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "garbage, 10.0.0.2", "None"),
        ("", "198.51.100.7", "None"),
    ],
)
def test_the_client_is_the_first_from_the_right_that_is_no_trusted_proxy(
    peer: str, forwarded: str, client: str
) -> None:
    assert str(client_address(peer, forwarded, TRUSTED)) == client


def test_without_trusted_proxies_the_header_counts_for_nothing() -> None:
    assert str(client_address("10.0.0.1", "198.51.100.7", ())) == "10.0.0.1"


def test_headers_that_are_there_twice_are_one_list_and_a_connection_without_a_peer_has_no_client() -> None:
    headers = [(b"x-forwarded-for", b"198.51.100.7"), (b"host", b"x"), (b"x-forwarded-for", b"203.0.113.1")]
    scope: dict[str, Any] = {"client": ("10.0.0.1", 5123), "headers": headers}
    assert str(client_of(cast(Scope, scope), TRUSTED)) == "203.0.113.1"
    assert client_of(cast(Scope, scope | {"client": None}), TRUSTED) is None
