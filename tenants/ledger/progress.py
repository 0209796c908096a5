"""Progress of the running requests of each gateway: one row, overwritten.

Where a gateway dies together with its engines, it is the last record of what its requests had used;
`gateway/cluster/crash_charge.py` charges by it."""

from __future__ import annotations

import msgspec
from sqlalchemy import Connection, select

from tenants.storage.database import Database
from tenants.storage.tables import progress
from tenants.storage.upserts import insert


class RunningUse(msgspec.Struct, frozen=True, array_like=True):
    """What reached the gateway of one request that was sent to an engine."""

    engine: str
    """The life of the engine that it was sent to; of another server: anything else."""
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    gpu_us: int


class Progress(msgspec.Struct, frozen=True):
    """One gateway's record. The default says that nothing is known."""

    engines: frozenset[str] = frozenset()
    """Lives of the engines that keep the outcomes of this gateway's requests."""
    models: frozenset[str] = frozenset()
    """Models that only such engines run."""
    requests: dict[str, RunningUse] = {}
    """By request id; the others had not been sent when it was written."""

    def after(self, earlier: Progress | None) -> Progress:
        """Merged with an earlier life's, some of whose requests are still open."""
        if earlier is None:
            return self
        return Progress(
            self.engines | earlier.engines, self.models & earlier.models, earlier.requests | self.requests
        )


class ProgressStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def read(self, gateway_id: str) -> Progress:
        """A gateway's last record. Raises `DatabaseUnavailable`."""
        query = select(progress.c.counts).where(progress.c.gateway_id == gateway_id)
        packed = await self._database.read(lambda connection: connection.execute(query).scalar())
        try:
            return Progress() if packed is None else msgspec.msgpack.decode(packed, type=Progress)
        except msgspec.DecodeError:
            return Progress()  # of another version: what it says is not known

    async def write(self, gateway_id: str, packed: bytes, now_us: int) -> None:
        """`packed`: `Progress` as MessagePack. Raises `DatabaseUnavailable`."""

        def write(connection: Connection) -> None:
            new = {"written_us": now_us, "counts": packed}
            connection.execute(
                insert(connection, progress)
                .values(gateway_id=gateway_id, **new)
                .on_conflict_do_update(index_elements=["gateway_id"], set_=new)
            )

        await self._database.write(write)
