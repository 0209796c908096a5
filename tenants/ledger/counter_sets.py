"""Named sets of counters that requests are charged to.

The counters of a request are the same for a key and tier until a window turns. Ledger rows name such a set by
a digest of its members: one page to write instead of four, and the digest reveals a changed set. Each gateway
writes its own sets, so that an uncommitted set of one never blocks another."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection
from functools import lru_cache

from sqlalchemy import Connection, select

from tenants.directory import queries
from tenants.storage.tables import counter_sets, ledger

DIGEST_BYTES = 12
"""16 characters of base64. Among a billion sets the chance of a collision is about 1 in 10^11."""
MAX_KNOWN = 4_096


@lru_cache(maxsize=MAX_KNOWN)
def set_id(counters: tuple[str, ...]) -> str | None:
    """The name of a set, independent of order and repetitions; None for an empty one."""
    if not counters:
        return None
    packed = json.dumps(sorted(set(counters))).encode()
    return base64.urlsafe_b64encode(hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()).decode()


def counters_of(connection: Connection, set_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The members of each set, in alphabetical order; unknown sets are left out."""
    members: dict[str, list[str]] = {}
    for chunk in queries.chunks(sorted(set_ids)):
        query = select(counter_sets.c.set_id, counter_sets.c.counter).distinct()
        rows = connection.execute(
            query.where(counter_sets.c.set_id.in_(chunk)).order_by(counter_sets.c.counter)
        )
        for name, counter in rows:
            members.setdefault(name, []).append(counter)
    return {name: tuple(counters) for name, counters in members.items()}


def changed_sets(connection: Connection) -> list[str]:
    """Sets named by ledger rows whose members do not match their digest."""
    members: dict[tuple[str, str], list[str]] = {}
    for gateway_id, name, counter in connection.execute(select(counter_sets)):
        members.setdefault((gateway_id, name), []).append(counter)
    named = select(ledger.c.gateway_id, ledger.c.counter_set).where(ledger.c.counter_set.is_not(None))
    return [
        name
        for gateway_id, name in connection.execute(named.distinct())
        if set_id.__wrapped__(tuple(members.get((gateway_id, name), ()))) != name
    ]


class KnownSets:
    """Sets that this process knows to be stored; bounded."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def __contains__(self, named: object) -> bool:
        return named in self._known

    def add(self, named: tuple[str, str]) -> None:
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known.add(named)
