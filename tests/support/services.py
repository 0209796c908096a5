"""A real PostgreSQL and a real Redis for tests.

From `FAIRGATE_TEST_DATABASE_URL` and `FAIRGATE_TEST_REDIS_URL` where they are set (databases of our own are
created and dropped there, and keys that begin with `fairgate` deleted); else private servers are started, as
`ops/sandbox/services.py` finds them.

Suites that want a server to kill start their own with `start_postgres()` and `start_redis()`.
"""

from __future__ import annotations

import re
import uuid
from typing import Any

import psycopg
import redis
from psycopg import sql
from redis.cluster import ClusterNode

from ops.sandbox.free_port import free_port
from ops.sandbox.redis_cluster import RedisNodes as Cluster
from ops.sandbox.redis_cluster import start_cluster, start_sentinel
from ops.sandbox.services import (
    NoServer,
    Service,
    postgres_binaries,
    redis_binaries,
    start_postgres,
    start_redis,
    valkey_binaries,
)
from tenants.storage.redis_url import CLUSTER, parse_redis_url

__all__ = [
    "Cluster", "NoServer", "Service", "create_database", "database_name", "delete_keys", "drop_database",
    "free_port", "libpq_url", "open_redis", "postgres_binaries", "redis_binaries", "start_cluster",
    "start_postgres", "start_redis", "start_sentinel", "valkey_binaries",
]  # fmt: skip


def create_database(server_url: str, *, template: str = "template1") -> str:
    """A new database with a name of its own on the server; returns its URL."""
    name = f"fairgate_test_{uuid.uuid4().hex[:16]}"
    with psycopg.connect(libpq_url(server_url), autocommit=True, connect_timeout=10) as connection:
        # What PostgreSQL 15 does unasked, to log the copy, takes twice as long.
        how = sql.SQL(" STRATEGY FILE_COPY" if connection.info.server_version >= 150_000 else "")
        names = sql.Identifier(name), sql.Identifier(template)
        connection.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(*names) + how)
    return re.sub(r"/[^/?]*(\?|$)", rf"/{name}\1", server_url)


def drop_database(server_url: str, url: str) -> None:
    """Drops what `create_database` made, also with open connections."""
    statement = sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database_name(url)))
    with psycopg.connect(libpq_url(server_url), autocommit=True, connect_timeout=10) as connection:
        connection.execute(statement)


def database_name(url: str) -> str:
    """The name in a PostgreSQL URL."""
    return url.partition("?")[0].rpartition("/")[2]


def libpq_url(url: str) -> str:
    """The URL without SQLAlchemy's driver name."""
    return re.sub(r"^postgres(ql)?(\+\w+)?://", "postgresql://", url)


def open_redis(url: str) -> Any:
    """A client that does not wait for an event loop, of one server or of a cluster."""
    place = parse_redis_url(url)
    if place.kind != CLUSTER:
        return redis.Redis.from_url(url)
    nodes = [ClusterNode(host, int(port)) for host, _, port in (each.rpartition(":") for each in place.hosts)]
    return redis.RedisCluster(startup_nodes=nodes)


def delete_keys(url: str, prefix: str = "fairgate") -> None:
    """Deletes the keys that begin with `prefix`, and no others."""
    with open_redis(url) as client:
        keys = list(client.scan_iter(match=f"{prefix}*", count=1000))
        for start in range(0, len(keys), 1000):
            client.unlink(*keys[start : start + 1000])
