"""Our own engine as an upstream: `EngineClient` in the gateway's words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from engine import client as engine_client
from engine.client import EngineClient
from engine.messages import Delta, Explained, Inventory, ModelInfo, Ready, Snapshot, Submit
from gateway.upstream.base import ReaderTooSlow, SequenceRefused, UpstreamLost, UpstreamUnavailable


class LocalEngine:
    """Implements `Upstream` over one `EngineClient`, whose `on_ready` and `on_lost` it chains."""

    def __init__(self, replica_id: str, client: EngineClient) -> None:
        self._replica_id = replica_id
        self._client = client
        self._watchers: list[Callable[[], None]] = []
        client.on_ready = self._chain(client.on_ready)
        client.on_lost = self._chain(client.on_lost)

    @property
    def replica_id(self) -> str:
        return self._replica_id

    @property
    def is_up(self) -> bool:
        return self._client.is_up

    @property
    def ready(self) -> Ready | None:
        return self._client.ready

    @property
    def model(self) -> ModelInfo | None:
        return self._client.ready.model if self._client.ready is not None else None

    @property
    def snapshot(self) -> Snapshot | None:
        return self._client.snapshot

    def watch(self, on_change: Callable[[], None]) -> None:
        self._watchers.append(on_change)

    def run(self, submit: Submit) -> AsyncIterator[Delta]:
        try:
            stream = self._client.submit(submit)
        except engine_client.EngineUnavailable as error:
            raise UpstreamUnavailable(str(error)) from None
        return _deltas(stream)

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        try:
            self._client.top_up(sequence_id, lease_tokens, lease_gpu_us)
        except engine_client.EngineUnavailable as error:
            raise UpstreamUnavailable(str(error)) from None

    def cancel(self, sequence_id: str, cause: str) -> None:
        self._client.cancel(sequence_id, cause)

    def acknowledge(self, sequence_ids: Sequence[str]) -> None:
        self._client.acknowledge(sequence_ids)

    async def wait_until_up(self, timeout_s: float) -> bool:
        try:
            await self._client.connect(timeout_s)
        except engine_client.EngineUnavailable:
            return False
        return True

    async def set_policy(self, name: str) -> None:
        try:
            await self._client.set_policy(name)
        except engine_client.EngineUnavailable as error:
            raise UpstreamLost(str(error)) from None

    async def explain(self) -> Explained:
        try:
            return await self._client.explain()
        except engine_client.EngineUnavailable as error:
            raise UpstreamLost(str(error)) from None

    async def collect(self, *, adopt: bool = False) -> Inventory:
        try:
            return await self._client.collect(adopt=adopt)
        except engine_client.EngineUnavailable as error:
            raise UpstreamLost(str(error)) from None

    def _chain(self, earlier: Callable[[], None] | None) -> Callable[[], None]:
        def changed() -> None:
            if earlier is not None:
                earlier()
            for watcher in self._watchers:
                watcher()

        return changed


async def _deltas(stream: engine_client.EngineStream) -> AsyncIterator[Delta]:
    """The stream with the gateway's exceptions."""
    try:
        async for delta in stream:
            yield delta
    except engine_client.EngineLost as error:
        raise UpstreamLost(error.reason) from None
    except engine_client.SequenceRefused as error:
        raise SequenceRefused(error.code, error.message) from None
    except engine_client.SlowReader as error:
        raise ReaderTooSlow(str(error)) from None
