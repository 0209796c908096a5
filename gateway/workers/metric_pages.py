"""The metrics of all workers: asks each, and keeps what a seat's workers counted when they end.

A worker writes its page into the seat's file before it shows it: what was once shown is never lost.
"""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from gateway.workers.metrics_sum import Family, families_of, merged
from gateway.workers.seat import Seat
from gateway.workers.siblings import Siblings

PATH = "/metrics"
_pages = msgspec.msgpack.Decoder(list[Family])


class MetricPages:
    def __init__(self, seat: Seat, siblings: Siblings) -> None:
        self._seat = seat
        self._siblings = siblings
        self._before = self._kept(seat.number)

    def own(self, registry: CollectorRegistry) -> bytes:
        """This worker's, with what the seat's earlier workers counted; packed."""
        page = msgspec.msgpack.encode(merged([families_of(registry)], [self._before]))
        partial = self._seat.directory / f"metrics-{self._seat.number}.partial"
        partial.write_bytes(page)
        partial.replace(partial.with_suffix(""))
        return page

    async def all(self, registry: CollectorRegistry) -> list[Family]:
        heard = {number: answer.body for number, answer in (await self._siblings.ask(PATH)).items()}
        heard[self._seat.number] = self.own(registry)
        silent = [self._kept(number) for number in range(self._seat.count + 1) if number not in heard]
        return merged([_pages.decode(heard[number]) for number in sorted(heard)], silent)

    def _kept(self, number: int) -> list[Family]:
        try:
            return _pages.decode((self._seat.directory / f"metrics-{number}").read_bytes())
        except (FileNotFoundError, msgspec.DecodeError):
            return []
