"""Engines by DNS: SRV records of a name, such as a headless service of Kubernetes has.

The first label of a record's target is the engine's name, the record's port its port, and the target's IPv4
address its address. Needs the extra `dns` (dnspython).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from dns.asyncresolver import Resolver
from dns.exception import DNSException

from gateway.membership import MOST_MEMBERS, NamedEngine
from gateway.pools.sources import SourceFailed

URI = re.compile(r"dns:(?://(?P<server>[\d.]+)(?::(?P<port>\d+))?/)?(?P<name>.+)")
"""RFC 4501, without a query."""
TIMEOUT_S = 2.0


class DnsSource:
    def __init__(self, uri: str) -> None:
        """`dns:NAME` asks the system's nameservers, `dns://ADDRESS:PORT/NAME` that one. Raises
        `ValueError`."""
        found = URI.fullmatch(uri)
        if found is None:
            raise ValueError(f"{uri!r} is not dns:NAME or dns://ADDRESS[:PORT]/NAME")
        self.name = uri
        self._query = found["name"]
        try:
            self._resolver = Resolver(configure=found["server"] is None)
            if found["server"]:
                self._resolver.nameservers, self._resolver.port = [found["server"]], int(found["port"] or 53)
        except (DNSException, ValueError) as error:
            raise ValueError(f"{uri}: {error}") from None
        self._resolver.lifetime = TIMEOUT_S

    async def said(self) -> Sequence[NamedEngine]:
        """An answer without any engine counts as none: a service that is emptied shows in its engines."""
        try:
            services = await self._resolver.resolve(self._query, "SRV", search=True)
            records = sorted(services, key=str)[: MOST_MEMBERS + 1]
            hosts = await asyncio.gather(*(self._resolver.resolve(each.target, "A") for each in records))
        except DNSException as error:
            raise SourceFailed(f"it has no answer: {error or type(error).__name__}"[:200]) from None
        return [
            NamedEngine(
                record.target.labels[0].decode("ascii", "replace"),
                f"tcp://{host[0].address}:{record.port}",
                self.name,
            )
            for record, host in zip(records, hosts, strict=True)
        ]
