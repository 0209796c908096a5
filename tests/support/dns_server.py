"""A DNS server for tests: SRV and A records of one name, over UDP on loopback."""

from __future__ import annotations

import asyncio
from typing import Any

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class DnsServer(asyncio.DatagramProtocol):
    """`engines`: name to port, all on 127.0.0.1. While `is_silent` it answers nothing."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.engines: dict[str, int] = {}
        self.is_silent = False
        self._transport: Any = None

    async def start(self) -> str:
        """The URI of its service."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, ("127.0.0.1", 0))
        port = self._transport.get_extra_info("sockname")[1]
        return f"dns://127.0.0.1:{port}/{self.service}"

    def stop(self) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, address: Any) -> None:
        if self.is_silent:
            return
        asked = dns.message.from_wire(data)
        answer = dns.message.make_response(asked)
        answer.flags |= dns.flags.RA
        question = asked.question[0].to_text().split()
        if question[-1] == "SRV" and self.engines:
            targets = [f"0 0 {port} {name}.{self.service}." for name, port in self.engines.items()]
            answer.answer.append(dns.rrset.from_text(f"{self.service}.", 5, "IN", "SRV", *targets))
        elif question[-1] == "A" and question[0].split(".")[0] in self.engines:
            answer.answer.append(dns.rrset.from_text(question[0], 5, "IN", "A", "127.0.0.1"))
        else:
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), address)
