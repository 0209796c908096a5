"""Resolves a webhook's host, and refuses private addresses."""

from __future__ import annotations

import asyncio
import socket

from tenants.errors import Invalid
from tenants.outbox.address import Target, checked_addresses

LOOK_UP_S = 5.0


async def address_of(target: Target, *, allows_private: bool) -> str:
    """The address to connect to now. Raises `Invalid`."""
    try:
        async with asyncio.timeout(LOOK_UP_S):
            infos = await asyncio.get_running_loop().getaddrinfo(
                target.host, target.port, type=socket.SOCK_STREAM
            )
    except TimeoutError:
        raise Invalid("url", f"the name {target.host} was not found within {LOOK_UP_S:g} s") from None
    except (OSError, UnicodeError):
        raise Invalid("url", f"the name {target.host} is not known") from None
    return checked_addresses(target.host, [str(info[4][0]) for info in infos], allows_private=allows_private)
