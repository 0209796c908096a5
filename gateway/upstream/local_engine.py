"""Our own engine as an upstream: adapts `EngineClient` to `Upstream`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from msgspec.structs import replace

from engine.client import client as engine_client
from engine.client.client import EngineClient
from engine.messages import (
    Delta,
    EngineKnobs,
    Explained,
    Inventory,
    Ready,
    SequenceState,
    Snapshot,
    Submit,
)
from gateway.upstream.base import (
    MovableUpstream,
    OnService,
    ReaderTooSlow,
    SequenceRefused,
    Upstream,
    UpstreamLost,
    UpstreamUnavailable,
    Wording,
)
from gateway.upstream.capabilities import PLAIN_TEXT, Capabilities
from gateway.upstream.kv_transfer import takes_kv
from gateway.upstream.openai.request import wanted_of
from gateway.upstream.part_text import Completeness

log = logging.getLogger("fairgate.gateway.upstream")


class LocalEngine(MovableUpstream):
    """Implements `Upstream` over one `EngineClient`, whose `on_ready` and `on_lost` it chains."""

    def __init__(
        self,
        replica_id: str,
        client: EngineClient,
        model_id: str | None = None,
        capabilities: Capabilities = PLAIN_TEXT,
        *,
        name: str = "",
        objection: Callable[[Ready], str] = lambda ready: "",
    ) -> None:
        """`model_id`: the required model (None: any): the gateway counts prompts by its tokenizer. `name`:
        see `Upstream.name`; empty: `replica_id`. `objection`: why an engine may not serve; empty: it may."""
        self.replica_id = replica_id
        self.name = name or replica_id
        self._client = client
        self._model_id = model_id
        self.capabilities = capabilities
        self.running_requests = 0
        self._objection = objection
        self._refused = ""
        self._is_drained = False
        self.is_leaving = False
        """It is no member any more: it gets no turns, and what runs there goes on."""
        self._watchers: list[Callable[[], None]] = []
        client.on_ready = self._chain(client.on_ready, self._look)
        client.on_lost = self._chain(client.on_lost)

    @property
    def address(self) -> str:
        return self._client.address

    @property
    def is_up(self) -> bool:
        return self._client.is_up and not self._refused

    @property
    def is_drained(self) -> bool:
        return self._is_drained or self.is_leaving

    @property
    def runs(self) -> bool:
        return self._client.runs

    @property
    def ready(self) -> Ready | None:
        return self._client.ready

    @property
    def snapshot(self) -> Snapshot | None:
        return self._client.snapshot

    def describe(self) -> dict[str, Any]:
        ready, snapshot, refusal = self._client.ready, self._client.snapshot, self._client.refusal
        return {
            "replica_id": self.replica_id,
            "kind": "engine",
            "capabilities": sorted(self.capabilities.words),
            "url": self._client.address,
            "model": ready.model.model_id if ready is not None else None,
            "is_up": self.is_up,
            "is_drained": self.is_drained,
            "refusal": self._refused or (refusal.message if refusal is not None else ""),
            "refusal_code": "model" if self._refused else (refusal.code if refusal is not None else ""),
            "window": ready.max_sequences if ready is not None else 0,
            "attention": ready.model.attention if ready is not None else "",
            "forward": ready.model.forward if ready is not None else "",
            "running": len(snapshot.running) if snapshot is not None else 0,
        }

    def watch(self, on_change: Callable[[], None]) -> None:
        self._watchers.append(on_change)

    def listen(self, on_service: OnService) -> None:
        self._client.on_service = on_service

    def run(self, submit: Submit, wording: Wording) -> AsyncIterator[Delta]:
        with _raised_as(UpstreamUnavailable):
            stream = self._client.submit(submit)
        return _whole(stream, submit, wording)

    def takes_kv(self, tokens: int, target: Upstream) -> bool:
        here, there, load = self.ready, target.ready, target.snapshot
        if not isinstance(target, LocalEngine) or here is None or there is None or load is None:
            return False
        speeds = (self._client.link_speed.bytes_per_s, target._client.link_speed.bytes_per_s)
        return takes_kv(tokens, here, there, speeds, load.step_time)

    async def export_state(self, sequence_id: str, *, with_kv: bool = True) -> SequenceState | None:
        with _raised_as(UpstreamLost):
            return await self._client.export(sequence_id, with_kv=with_kv)

    def import_state(
        self, state: SequenceState, wording: Wording, after: AsyncIterator[Delta] | None = None
    ) -> AsyncIterator[Delta]:
        with _raised_as(UpstreamUnavailable):
            stream = self._client.import_(state)
        return _whole(stream, state.submit, wording, after)

    def top_up(self, sequence_id: str, lease_tokens: int, lease_gpu_us: int | None) -> None:
        with _raised_as(UpstreamUnavailable):
            self._client.top_up(sequence_id, lease_tokens, lease_gpu_us)

    def cancel(self, sequence_id: str, cause: str) -> None:
        self._client.cancel(sequence_id, cause)

    def acknowledge(self, sequence_ids: Sequence[str], *, is_traced: bool = False) -> None:
        self._client.acknowledge(sequence_ids, is_traced=is_traced)

    async def wait_until_up(self, timeout_s: float) -> bool:
        try:
            await self._client.connect(timeout_s)
        except engine_client.EngineUnavailable:
            return False
        return True

    async def set_policy(self, name: str, options: Mapping[str, str | int | float]) -> None:
        with _raised_as(UpstreamLost):
            await self._client.set_policy(name, options)

    def set_knobs(self, knobs: EngineKnobs) -> None:
        self._client.set_knobs(knobs)

    def set_brakes(self, shares: Mapping[int, float]) -> None:
        self._client.set_brakes(shares)

    def set_drained(self, is_drained: bool) -> None:
        if is_drained != self._is_drained:
            self._is_drained = is_drained
            self._tell()

    def set_leaving(self, is_leaving: bool) -> None:
        if is_leaving != self.is_leaving:
            self.is_leaving = is_leaving
            self._tell()

    def check(self) -> None:
        """Looks again at whether it may serve: what the others have may have changed."""
        before = self.is_up
        if self._client.is_up:
            self._look()
        if self.is_up != before:
            self._tell()

    def open(self) -> None:
        self._client.open()

    async def close(self) -> None:
        await self._client.close()

    async def explain(self, steps: int = 0) -> Explained:
        with _raised_as(UpstreamLost):
            return await self._client.explain(steps)

    async def collect(self, *, adopt: bool = False) -> Inventory:
        with _raised_as(UpstreamLost):
            return await self._client.collect(adopt=adopt)

    def _look(self) -> None:
        before, ready = self._refused, self._client.ready
        if ready is None:
            return
        if self._model_id not in (None, ready.model.model_id):
            self._refused = (
                f"it serves {ready.model.model_id!r}, and this gateway's model is {self._model_id!r}"
            )
        else:
            self._refused = self._objection(ready)
        if self._refused not in ("", before):
            log.error("engine %s is not used: %s", self.replica_id, self._refused)

    def _tell(self) -> None:
        for watcher in self._watchers:
            watcher()

    def _chain(
        self, earlier: Callable[[], None] | None, first: Callable[[], None] | None = None
    ) -> Callable[[], None]:
        def changed() -> None:
            for listener in (first, earlier):
                if listener is not None:
                    listener()
            self._tell()

        return changed


@contextlib.contextmanager
def _raised_as(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except engine_client.EngineUnavailable as error:
        raise kind(str(error)) from None


def _whole(
    stream: engine_client.EngineStream,
    submit: Submit,
    wording: Wording,
    after: AsyncIterator[Delta] | None = None,
) -> AsyncIterator[Delta]:
    deltas = _deltas(stream)
    if submit.grammar is None and not submit.parts:
        return deltas
    begun = after.completeness if isinstance(after, _WithEnds) else Completeness(wanted_of(wording))
    return _WithEnds(deltas, begun)


class _WithEnds:
    """Deltas with what the end cut short, and whether calls were made."""

    def __init__(self, deltas: AsyncIterator[Delta], completeness: Completeness) -> None:
        self._deltas = deltas
        self.completeness = completeness

    def __aiter__(self) -> _WithEnds:
        return self

    async def __anext__(self) -> Delta:
        delta = await anext(self._deltas)
        outcome = delta.outcome
        # What an end adds does not count where the sequence goes on after it.
        completeness = self.completeness if outcome is None else deepcopy(self.completeness)
        completeness.feed(delta.parts, delta.text)
        if outcome is None:
            return delta
        lacking = "" if outcome.closed else completeness.lacking(outcome.finish)
        word = "tool_calls" if outcome.finish == "stop" and completeness.has_calls else ""
        return replace(delta, outcome=replace(outcome, incomplete=lacking, finish_word=word))


async def _deltas(stream: engine_client.EngineStream) -> AsyncIterator[Delta]:
    try:
        async for delta in stream:
            yield delta
    except engine_client.EngineLost as error:
        raise UpstreamLost(error.reason) from None
    except engine_client.SubmitRefused as error:
        raise SequenceRefused(error.code, error.message) from None
    except engine_client.SlowReader as error:
        raise ReaderTooSlow(str(error)) from None
