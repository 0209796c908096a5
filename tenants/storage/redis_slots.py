"""Slots of a Redis Cluster: that of a command, and which node has which, as a node says. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

KEYLESS = frozenset(
    ("CLIENT", "CLUSTER", "CONFIG", "DBSIZE", "INFO", "PING", "PUBLISH", "PUBSUB", "SCRIPT", "TIME")
)


def slot_of(command: Sequence[Any], encode: Callable[[Any], bytes]) -> int | None:
    """None: the command has no key."""
    name = str(command[0]).partition(" ")[0]
    if name in KEYLESS or len(command) < 2:
        return None
    place = {"EVAL": 3, "EVALSHA": 3}.get(name, 1)
    if name == "XREAD":
        place = command.index(b"STREAMS") + 1
    return int(key_slot(encode(command[place])))


def nodes_of_slots(found: Sequence[Any], asked: str) -> tuple[list[str], set[str]]:
    """Of what the node `asked` answers to CLUSTER SLOTS: the master by slot ("": none), and all replicas."""
    masters, replicas = [""] * REDIS_CLUSTER_HASH_SLOTS, set()
    for first, last, *nodes in found:
        master, *others = (node_name(host, port, asked) for host, port, *_ in nodes)
        masters[first : last + 1] = [master] * (last + 1 - first)
        replicas |= {*others}
    return masters, replicas


def node_name(host: Any, port: int, asked: str) -> str:
    """`host:port`. The host is empty where the node that was asked does not know its own."""
    host = host.decode() if isinstance(host, bytes) else host
    if host in (None, "", "?"):
        return f"{asked.rpartition(':')[0]}:{port}"
    return f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"
