"""Networks and addresses as people, sockets and proxies write them."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network

import pytest

from tenants.networks import address_of, counted_as, is_within, network_of


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("192.0.2.7", "192.0.2.7/32"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("::1", "::1/128"),
        ("::ffff:10.0.0.0/104", "10.0.0.0/8"),
        ("::ffff:192.0.2.7", "192.0.2.7/32"),
        ("0.0.0.0/0", "0.0.0.0/0"),
    ],
)
def test_a_network_is_what_it_says_and_ipv4_inside_ipv6_is_ipv4(text: str, network: str) -> None:
    assert network_of(text) == ip_network(network)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("10.0.0.1/8", "'10.0.0.1/8' has host bits set: did you mean 10.0.0.0/8"),
        ("2001:db8::1/32", "did you mean 2001:db8::/32"),
        ("office", "'office' is not a network such as 10.0.0.0/8"),
        ("", "is not a network"),
        ("10.0.0.0/33", "is not a network"),
        ("fe80::1%eth0", "is not a network"),
        ("9" * 5_000, "is not a network"),
    ],
)
def test_what_is_no_network_is_named_with_the_one_that_was_meant(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as refused:
        network_of(text)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("192.0.2.7", "192.0.2.7"),
        (" 192.0.2.7 ", "192.0.2.7"),
        ("192.0.2.7:5123", "192.0.2.7"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("2001:db8::1", "2001:db8::1"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("fe80::1%eth0", "fe80::1"),
    ],
)
def test_an_address_is_read_as_it_is_written(text: str, address: str) -> None:
    assert address_of(text) == ip_address(address)


@pytest.mark.parametrize("text", ["", "unknown", "192.0.2.7:", "192.0.2", "_hidden", "[1.2.3.4", "1", "é"])
def test_what_is_no_address_is_none(text: str) -> None:
    assert address_of(text) is None


def test_an_address_is_within_networks_of_its_own_kind() -> None:
    networks = [network_of("10.0.0.0/8"), network_of("2001:db8::/32")]
    inside = ["10.255.255.255", "::ffff:10.0.0.1", "2001:db8:ffff::1"]
    outside = ["11.0.0.0", "2001:db9::", "::a00:1"]
    found = {text: is_within(address, networks) for text in inside + outside if (address := address_of(text))}
    assert found == dict.fromkeys(inside, True) | dict.fromkeys(outside, False)


def test_a_64_counts_as_one_address() -> None:
    counted = {str(counted_as(address_of(text))) for text in ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff")}
    assert counted == {"2001:db8::/64"}
    assert counted_as(address_of("2001:db8:0:1::1")) == ip_network("2001:db8:0:1::/64")
    assert counted_as(address_of("::ffff:192.0.2.7")) == ip_address("192.0.2.7")
    assert counted_as(None) is None
