"""What a Redis URL names: one server, servers behind Sentinels, or a Cluster. No I/O, no client library.

    redis://user:password@host:6379/0, rediss://… (TLS), unix:///socket
    redis+sentinel://user:password@host:26379,host:26379/SERVICE/0, rediss+sentinel://…
    redis+cluster://user:password@host:6379,host:6379, rediss+cluster://…

User and password are those of the servers; Sentinels that have their own get them by `sentinel_username` and
`sentinel_password` after the `?`, where TLS options stand as well (`ssl_ca_certs=/etc/ca.pem`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

SENTINEL, CLUSTER = "sentinel", "cluster"
SCHEMES = (
    "redis",
    "rediss",
    "unix",
    *(f"redis{tls}+{kind}" for kind in (SENTINEL, CLUSTER) for tls in ("", "s")),
)
_PORTS = {SENTINEL: "26379", CLUSTER: "6379"}
_OF_SENTINELS = ("sentinel_username", "sentinel_password")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    kind: str
    """`sentinel`, `cluster`, or "" for one server, which only `url` describes."""
    url: str
    hosts: tuple[str, ...] = ()
    """`host:port`: Sentinels, or nodes of the cluster that are asked first."""
    service: str = ""
    """The Sentinels' name of the master."""
    scheme: str = "redis"
    credentials: str = ""
    sentinel_credentials: str = ""
    database: str = ""
    options: str = ""

    def of_node(self, node: str) -> str:
        """The URL of one server, as the client library takes it."""
        return f"{self.scheme}://{self.credentials}{node}/{self.database}?{self.options}"

    def of_sentinel(self, host: str) -> str:
        return f"{self.scheme}://{self.sentinel_credentials}{host}/?{self.options}"


def parse_redis_url(url: str) -> RedisUrl:
    """Raises `ValueError`, whose text says what is wrong."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if parts.scheme not in SCHEMES:
        raise ValueError(f"its scheme must be one of {', '.join(SCHEMES)}")
    if not kind:
        return RedisUrl("", url)
    credentials, at, names = parts.netloc.rpartition("@")
    hosts = tuple(_with_port(name, _PORTS[kind]) for name in names.split(","))
    service, _, database = parts.path.strip("/").partition("/")
    if kind == CLUSTER:
        service, database = "", service
        if database not in ("", "0"):
            raise ValueError("a Redis Cluster has database 0 only: leave the database out")
    elif not service or not re.fullmatch(r"\d*", database):
        raise ValueError(
            "with Sentinels it ends with the name of the master: …/SERVICE or …/SERVICE/DATABASE"
        )
    options = dict(parse_qsl(parts.query))
    own = [quote(options.pop(name, ""), safe="") for name in _OF_SENTINELS]
    return RedisUrl(
        kind,
        url,
        hosts,
        service,
        scheme,
        credentials + at,
        ":".join(own) + "@" if any(own) else "",
        database,
        urlencode(options),
    )


def _with_port(name: str, port: str) -> str:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+)(?::(\d{1,5}))?", name)
    if match is None:
        raise ValueError(f"{name!r} is not a host:port; several are separated by commas")
    return f"{match[1]}:{match[2] or port}"
