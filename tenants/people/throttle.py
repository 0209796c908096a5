"""Slows log-ins down, by name and by address. Pure: the time is passed in.

The first few attempts are free; each further one waits twice as long as the one before, up to a minute. An
attempt counts from its start, so that a hundred concurrent ones are not checked before the first has failed.
A name is never locked: that would let strangers lock people out."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

FREE_BY_NAME = 5
FREE_BY_ADDRESS = 20
"""More: an office is one address."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
FORGET_S = 3_600.0
"""After that long without an attempt a name or address starts afresh."""
MAX_ENTRIES = 10_000
"""Of names, and of addresses. Beyond, those with the fewest attempts go."""
MAX_KEY_CHARS = 128
BEGIN, SUCCEEDED, NOT_JUDGED = "begin", "succeeded", "not_judged"
"""What is said to one that several processes share."""


@dataclass(slots=True)
class _Attempts:
    count: int = 0
    last_s: float = 0.0
    free_from_s: float = 0.0


class _Counted:
    def __init__(self, free: int, most: int) -> None:
        self._free = free
        self._most = most
        self._of: dict[str, _Attempts] = {}

    def __len__(self) -> int:
        return len(self._of)

    def wait_s(self, key: str, now_s: float) -> float:
        attempts = self._of.get(key)
        return 0.0 if attempts is None else max(0.0, attempts.free_from_s - now_s)

    def add(self, key: str, now_s: float) -> None:
        attempts = self._of.get(key)
        if attempts is None or now_s - attempts.last_s > FORGET_S:
            if attempts is None and len(self._of) >= self._most:
                self._make_room(now_s)
            attempts = self._of[key] = _Attempts()
        attempts.count += 1
        attempts.last_s = now_s
        if (beyond := attempts.count - self._free) >= 0:
            wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(beyond, 10))
            attempts.free_from_s = now_s + wait_s

    def take_back(self, key: str) -> None:
        attempts = self._of.get(key)
        if attempts is not None:
            attempts.count -= 1
            attempts.free_from_s = 0.0 if attempts.count < self._free else attempts.free_from_s
            if attempts.count <= 0:
                del self._of[key]

    def forget(self, key: str) -> None:
        self._of.pop(key, None)

    def _make_room(self, now_s: float) -> None:
        """Drops expired entries; without any, the tenth with the fewest attempts."""
        kept = {key: entry for key, entry in self._of.items() if now_s - entry.last_s <= FORGET_S}
        if len(kept) >= self._most:
            by_weight = sorted(kept, key=lambda key: (kept[key].count, kept[key].last_s))
            for key in by_weight[: max(1, self._most // 10)]:
                del kept[key]
        self._of = kept


class LogInThrottle:
    def __init__(self, most: int = MAX_ENTRIES) -> None:
        self._names = _Counted(FREE_BY_NAME, most)
        self._addresses = _Counted(FREE_BY_ADDRESS, most)

    @property
    def entries(self) -> int:
        return len(self._names) + len(self._addresses)

    def begin(self, name: str, address: str, now_s: float) -> float:
        """Counts an attempt as failed and returns 0; or returns how long to wait, and counts nothing: refused
        attempts neither prolong the wait nor fill the memory."""
        name, address = name[:MAX_KEY_CHARS], network_of_address(address)
        wait_s = max(self._addresses.wait_s(address, now_s), self._names.wait_s(name, now_s))
        if wait_s <= 0:
            self._addresses.add(address, now_s)
            self._names.add(name, now_s)
        return wait_s

    def succeeded(self, name: str, address: str) -> None:
        """Resets the name; the address regains this attempt only, or an account would open it to guesses."""
        self._names.forget(name[:MAX_KEY_CHARS])
        self._addresses.take_back(network_of_address(address))

    def not_judged(self, name: str, address: str) -> None:
        """The attempt was not checked after all: it does not count."""
        self._names.take_back(name[:MAX_KEY_CHARS])
        self._addresses.take_back(network_of_address(address))


def network_of_address(address: str) -> str:
    """What is slowed as one: an IPv4 address, or the /64 of an IPv6 one, which is what one customer gets."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address[:MAX_KEY_CHARS]
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((int(ip), 64), strict=False))
    return str(ip)
