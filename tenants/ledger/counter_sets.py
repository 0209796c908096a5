"""Which counters is a request charged to, written down once for all requests that are charged to the same?

A request is held on one counter for each limit on its path, and all requests of a key and tier on the same
ones until a window turns. So the set has a name, a digest of what is in it, and a ledger row has that name:
one page to write instead of four, and whoever changes a set is found out by its digest.

Each gateway has sets of its own: what one has begun to write, and not committed, keeps no other waiting.
"""

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
"""16 characters of base64. That any two of a billion sets have the same is as likely as 1 in 10^11."""
MAX_KNOWN = 4_096


@lru_cache(maxsize=MAX_KNOWN)
def set_id(counters: tuple[str, ...]) -> str | None:
    """The name of a set of counters, in whatever order and however often they are given; None for an empty
    one."""
    if not counters:
        return None
    packed = json.dumps(sorted(set(counters))).encode()
    return base64.urlsafe_b64encode(hashlib.blake2b(packed, digest_size=DIGEST_BYTES).digest()).decode()


def counters_of(connection: Connection, set_ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """What is in each of these sets, in alphabetical order; those that are not there are left out."""
    found: dict[str, list[str]] = {}
    for chunk in queries.chunks(sorted(set_ids)):
        query = select(counter_sets.c.set_id, counter_sets.c.counter).distinct()
        rows = connection.execute(
            query.where(counter_sets.c.set_id.in_(chunk)).order_by(counter_sets.c.counter)
        )
        for name, counter in rows:
            found.setdefault(name, []).append(counter)
    return {name: tuple(counters) for name, counters in found.items()}


def changed_sets(connection: Connection) -> list[str]:
    """Those that ledger rows name, and that are not what their names say: somebody added a counter, or took
    one or all away."""
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
    """Of which gateway's sets this process knows that they are in the database: these need not be written
    again."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str]] = set()

    def __contains__(self, named: object) -> bool:
        return named in self._known

    def add(self, named: tuple[str, str]) -> None:
        """It has been committed: gateway, and name of the set."""
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known.add(named)
