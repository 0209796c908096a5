"""A private Redis Cluster, and Sentinels with a master and its replica, for a program."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from ops.sandbox.free_port import free_port
from ops.sandbox.services import (
    NoServer,
    Service,
    binary_version,
    redis_binaries,
    redis_service,
    start_on_a_free_port,
    start_redis,
)

SLOTS = 16_384
NODE_TIMEOUT_MS = 1_000
"""A master that is silent for so long is replaced by its replica."""
FORMED_S = 60.0
AT_ONCE = ("--repl-diskless-sync-delay", "0")


@dataclass
class RedisNodes:
    """The nodes: first the masters, then their replicas. Killed ones start empty, in their old place."""

    nodes: list[Service]
    masters: int

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(_place(node) for node in self.nodes[:2])}"

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def master_of(self, slot: int) -> Service:
        """As the nodes that run say."""
        for node in self.nodes:
            with contextlib.suppress(redis.ConnectionError), _client(node) as client:
                for first, last, master, *_ in client.execute_command("CLUSTER SLOTS"):
                    if first <= slot <= last:
                        return next(each for each in self.nodes if _port(each) == master[1])
        raise NoServer(f"no node has slot {slot}")

    @contextlib.contextmanager
    def moving(self, slot: int, target: Service) -> Iterator[None]:
        """Until the end a slot is on its way: new keys are made at `target`; then its keys move there."""
        source = self.master_of(slot)
        with _client(source) as old, _client(target) as new:
            of_old, of_new = (client.execute_command("CLUSTER MYID") for client in (old, new))
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", of_old)
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", of_new)
            yield
            while keys := old.execute_command("CLUSTER GETKEYSINSLOT", slot, 100):
                port = _port(target)
                old.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
            for client in (new, old):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", of_new)


def start_cluster(masters: int = 3, replicas: int = 1, binary: Path | None = None) -> RedisNodes:
    """An empty cluster without persistence that ends with this process. Raises `NoServer`."""
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
    options += ["--cluster-require-full-coverage", "no", "--cluster-replica-validity-factor", "0"]
    buses: dict[int, int] = {}

    def node(port: int) -> Service:
        # Without it the bus of a node listens 10,000 ports above; Redis 6.2 knows no other.
        has_port = binary_version(binary or redis_binaries()[0]) >= (7,)
        buses[port] = free_port() if has_port else port + 10_000
        own = ["--cluster-port", str(buses[port])] if has_port else []
        return redis_service(binary, port, *options, *AT_ONCE, *own)

    nodes = [start_on_a_free_port(node) for _ in range(masters * (1 + replicas))]
    with contextlib.ExitStack() as closing:
        clients = [closing.enter_context(_client(each)) for each in nodes]
        for number, (each, client) in enumerate(zip(nodes, clients, strict=True)):
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            clients[0].execute_command("CLUSTER MEET", "127.0.0.1", _port(each), buses[_port(each)])
            if number < masters:
                first, end = (SLOTS * part // masters for part in (number, number + 1))
                client.execute_command("CLUSTER ADDSLOTS", *range(first, end))
        _wait(lambda: all(_info(each)["cluster_known_nodes"] == str(len(nodes)) for each in clients))
        for number, client in enumerate(clients[masters:]):
            master = clients[number % masters].execute_command("CLUSTER MYID")
            client.execute_command("CLUSTER REPLICATE", master)
        _wait(lambda: all(_info(each)["cluster_state"] == "ok" for each in clients))
        _wait(lambda: all(map(_follows, clients[masters:])))
    return RedisNodes(nodes, masters)


@dataclass
class Watched:
    """A master with a replica, and Sentinels that replace one by the other."""

    nodes: list[Service]
    sentinels: list[Service]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(map(_place, self.sentinels))}/fairgate/0"

    def master_of(self, slot: int) -> Service:
        """Before the first one died."""
        return self.nodes[0]

    def stop(self) -> None:
        for each in (*self.sentinels, *self.nodes):
            each.stop()


def start_sentinel(sentinels: int = 3, binary: Path | None = None) -> Watched:
    """A master, its replica, and Sentinels that call the master `fairgate`. Raises `NoServer`."""
    master = start_redis(binary)
    follows = ["--replicaof", f"127.0.0.1 {_port(master)}", *AT_ONCE]
    replica = start_on_a_free_port(lambda port: redis_service(binary, port, *follows))

    def watch(port: int) -> Service:
        service = redis_service(binary, port)
        rules = [f"port {port}", "bind 127.0.0.1", f"sentinel monitor fairgate 127.0.0.1 {_port(master)} 2"]
        rules += ["sentinel down-after-milliseconds fairgate 1000", "sentinel failover-timeout fairgate 5000"]
        file = service.directory / "sentinel.conf"
        file.write_text("\n".join(rules))
        service.command = [service.command[0], str(file), "--sentinel"]
        return service

    watching = [start_on_a_free_port(watch) for _ in range(sentinels)]
    with _client(replica) as client:
        _wait(lambda: _follows(client))
    for each in watching:
        with _client(each) as client:
            _wait(lambda: _knows_all(client.execute_command("SENTINEL MASTER", "fairgate"), sentinels))
    return Watched([master, replica], watching)


def _client(node: Service) -> redis.Redis:
    return redis.Redis(port=_port(node), socket_timeout=10)


def _place(node: Service) -> str:
    return f"127.0.0.1:{_port(node)}"


def _port(node: Service) -> int:
    return int(node.url.rpartition(":")[2].partition("/")[0])


def _info(client: redis.Redis) -> dict[str, str]:
    return dict(client.cluster("INFO"))


def _follows(client: redis.Redis) -> bool:
    return bool(client.info("replication").get("master_link_status") == "up")


def _knows_all(master: object, sentinels: int) -> bool:
    assert isinstance(master, dict)
    return (master["num-other-sentinels"], master["num-slaves"]) == (sentinels - 1, 1)


def _wait(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + FORMED_S
    while not is_so():
        if time.monotonic() > deadline:
            raise NoServer("the servers did not find one another in time")
        time.sleep(0.05)
