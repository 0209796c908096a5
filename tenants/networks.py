"""IP networks that keys are bound to, and addresses in them. IPv4 in IPv6 (`::ffff:192.0.2.7`) is IPv4."""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address

_MAPPED_BITS = 96
"""Of an IPv6 prefix, before the IPv4 address that is mapped into it."""
_WITH_PORT = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::\d{1,5})?|([0-9.]+):\d{1,5}")


def network_of(text: str) -> Network:
    """A network in CIDR notation, or a single address. Raises `ValueError` with what is wrong."""
    try:
        if "%" in text:  # an interface of the machine that the address was seen on
            raise ValueError
        network = ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f"{text[:64]!r} is not a network such as 10.0.0.0/8 or 2001:db8::/32, nor an address"
        ) from None
    if network.network_address != ip_address(text.partition("/")[0]):
        raise ValueError(f"{text!r} has host bits set: did you mean {network}")
    if isinstance(network, IPv6Network) and network.prefixlen >= _MAPPED_BITS:
        mapped = network.network_address.ipv4_mapped
        if mapped is not None:
            return IPv4Network((mapped, network.prefixlen - _MAPPED_BITS))
    return network


def address_of(text: str) -> Address | None:
    """An address, also with a port (`192.0.2.7:5123`, `[2001:db8::1]:443`); None: the text is none."""
    text = text.strip()
    if with_port := _WITH_PORT.fullmatch(text):
        text = with_port[1] or with_port[2]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address


def counted_as(address: Address | None) -> Address | Network | None:
    """What an address counts as where addresses are counted: of IPv6 its /64, which one subscriber has."""
    if not isinstance(address, IPv6Address):
        return address
    return IPv6Network((int(address) >> 64 << 64, 64))


def is_within(address: Address, networks: Iterable[Network]) -> bool:
    return any(address in network for network in networks)
