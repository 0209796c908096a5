"""Where keys lie in a Redis Cluster."""

from __future__ import annotations

from redis.crc import key_slot

from tenants.types import Limit
from tests.support.quota import limit
from tests.support.services import Cluster, Service


def node_of(cluster: Cluster, tag: str) -> Service:
    return cluster.master_of(key_slot(tag.encode()))


def one_tenant_each(cluster: Cluster) -> dict[str, Limit]:
    """A budget of a tenant on each master, by the master's URL; the registry's is the first."""
    names = ["registry", *(f"ten_{number}" for number in range(40))]
    urls = [node_of(cluster, name).url for name in names]
    return {
        url: next(limit(tenant_id=name) for name, at in zip(names[1:], urls[1:], strict=True) if at == url)
        for url in dict.fromkeys(urls)
    }
