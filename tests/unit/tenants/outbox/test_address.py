"""Which addresses a webhook may have."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from tenants.errors import Invalid
from tenants.outbox.address import MAX_URL_CHARS, Target, checked_addresses, is_public, target_of

PRIVATE = (
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
    *("224.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fc00::1", "ff02::1"),
    *("2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::1"),
)
PUBLIC = ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::101:101", "::ffff:1.1.1.1"]


@pytest.mark.parametrize("address", PRIVATE)
def test_a_private_address_is_refused_unless_it_is_allowed(address: str) -> None:
    assert not is_public(ip_address(address))
    with pytest.raises(Invalid, match=r"private address; allow it with the setting gateway\.webhook_private"):
        checked_addresses("hooks.example", [address], allows_private=False)
    with pytest.raises(Invalid):  # one of several is enough: which one a connection takes is not known
        checked_addresses("hooks.example", ["1.1.1.1", address], allows_private=False)
    taken = checked_addresses("hooks.example", [address], allows_private=True)
    assert ip_address(taken) == ip_address(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_the_internet_is_taken(address: str) -> None:
    assert is_public(ip_address(address))
    taken = checked_addresses("hooks.example", [address, "1.1.1.1"], allows_private=False)
    assert ip_address(taken) == ip_address(address)


def test_the_parts_of_a_url() -> None:
    taken = target_of("https://hooks.example:8443/a?b=c", allows_private=False)
    assert taken == Target("https", "hooks.example", 8443)
    assert target_of("https://[2606:4700::1111]/", allows_private=False).host == "2606:4700::1111"
    assert target_of("http://localhost/x", allows_private=True) == Target("http", "localhost", 80)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "1 to"),
        ("x" * (MAX_URL_CHARS + 1), "1 to"),
        ("hooks.example", "must be a URL such as"),
        ("ftp://hooks.example/", "must be a URL such as"),
        ("https://", "must be a URL such as"),
        ("https://[::1/", "is not a URL"),
        ("https://hooks.example:99999/", "is not a URL"),
        ("https://user:secret@hooks.example/", "must not hold a password"),
        ("https://hooks.example/#part", "fragment"),
        ("https://hooks.example/a b", "no URL has"),
        ("https://hooks.example/\r\nx: y", "no URL has"),
        ("https://hööks.example/", "no URL has"),
        ("http://hooks.example/", "must be https"),
    ],
)
def test_what_is_no_address_is_refused_in_words(url: str, says: str) -> None:
    with pytest.raises(Invalid, match=says) as refused:
        target_of(url, allows_private=False)
    assert refused.value.field == "url"
    assert "secret" not in str(refused.value)
