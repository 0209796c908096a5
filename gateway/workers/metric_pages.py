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
        answers = await self._siblings.ask(PATH)
        heard = {number: _read(answer.content) for number, answer in answers.items()}
        heard[self._seat.number] = _read(self.own(registry))
        living = [page for _, page in sorted(heard.items()) if page]
        silent = [number for number in range(self._seat.count + 1) if not heard.get(number)]
        return merged(living, [self._kept(number) for number in silent])

    def _kept(self, number: int) -> list[Family]:
        try:
            return _read((self._seat.directory / f"metrics-{number}").read_bytes())
        except FileNotFoundError:
            return []


def _read(page: bytes) -> list[Family]:
    """Nothing of a refusal, or of another version."""
    try:
        return _pages.decode(page)
    except msgspec.DecodeError:
        return []
