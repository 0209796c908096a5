"""URLs of Redis: what they name, which are refused and why, and options that reach each connection."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio.connection import SSLConnection

from ops.serving.serve import explain
from ops.settings import values
from ops.settings.settings import Settings
from tenants.quota.store import QuotaStoreUnavailable
from tenants.storage.redis_client import is_cluster, open_client
from tenants.storage.redis_url import parse_redis_url

SECRET = "ann:s%40cret@"
TLS = "?ssl_ca_certs=/etc/ca.pem"


def test_one_server_is_left_to_the_client_library() -> None:
    for url in ("redis://127.0.0.1:6379/3", "rediss://a:b@cache", "unix:///run/redis.sock?db=2"):
        assert (parse_redis_url(url).kind, parse_redis_url(url).url) == ("", url)
        assert not is_cluster(url)


def test_hosts_have_ports_and_sentinels_a_service() -> None:
    found = parse_redis_url(f"redis+sentinel://{SECRET}one,two:7,[::1]:8/main/3")
    assert found.hosts == ("one:26379", "two:7", "[::1]:8")
    assert found.service == "main"
    assert found.of_node("cache:1").startswith(f"redis://{SECRET}cache:1/3")
    assert found.of_sentinel("one:26379").startswith("redis://one:26379/")
    own = parse_redis_url("redis+sentinel://one/main?sentinel_username=bob&sentinel_password=p%2Fw")
    assert own.of_sentinel("one:1") == "redis://bob:p%2Fw@one:1/?"
    assert is_cluster("redis+cluster://one,two:7")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://cache", "its scheme must be one of redis, rediss, unix, redis\\+sentinel"),
        ("redis+cluster://cache/1", "database 0 only"),
        ("redis+sentinel://cache", "name of the master"),
        ("redis+sentinel://cache/main/x", "name of the master"),
        ("redis+cluster://", "not a host:port"),
        ("redis+cluster://one,,two", "not a host:port"),
        ("redis+cluster://one:x", "'one:x' is not a host:port"),
    ],
)
def test_a_wrong_url_is_refused_with_the_reason(url: str, why: str) -> None:
    with pytest.raises(values.Unaccepted, match=why):
        values.redis_url().parse(url)


def _kwargs(client: Any) -> dict[str, Any]:
    pool = client.connection_pool
    return pool.connection_kwargs | {"tls": issubclass(pool.connection_class, SSLConnection)}


def test_user_and_tls_reach_each_node() -> None:
    expected = {"username": "ann", "password": "s@cret", "ssl_ca_certs": "/etc/ca.pem", "tls": True}
    cluster = open_client(f"rediss+cluster://{SECRET}one,two{TLS}", 2.0)
    sentinel = open_client(f"rediss+sentinel://{SECRET}one/main/4{TLS}", 2.0)
    watches = sentinel.connection_pool.sentinel_manager.sentinels[0]
    for client, host in ((cluster, "one"), (cluster._at("two:6379"), "two"), (sentinel, "master")):
        found = _kwargs(client)
        assert found["host"] == host
        assert {name: found.get(name) for name in expected} == expected
    assert _kwargs(sentinel)["db"] == 4
    assert _kwargs(watches).get("password") is None
    assert (_kwargs(watches)["ssl_ca_certs"], _kwargs(watches)["tls"]) == ("/etc/ca.pem", True)


def test_a_failed_start_shows_no_password() -> None:
    url = f"redis+sentinel://{SECRET}one,two/main?sentinel_password=hidden"
    said = explain(QuotaStoreUnavailable("away"), Settings(redis_url=url))
    assert "redis+sentinel://ann@one,two/main: away" in said
    assert "cret" not in said
    assert "hidden" not in said
