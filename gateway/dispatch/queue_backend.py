"""The queue's interface, and its implementation in this process. Shared queues: `redis_queue.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from engine.messages import TenantShare
from gateway.flow.controller import Dispatch, FlowController, QueueFull, Ticket
from gateway.flow.types import Deadlines
from gateway.flow.window import Replica

OnTurns = Callable[[list[Dispatch]], None]
OnRefused = Callable[[str, QueueFull], None]


class QueueBackend(Protocol):
    """Contract: a queued request has its turn once, or is refused once, or leaves. Turns and late refusals
    come from `pump` or between two calls, never from within another call."""

    @property
    def flow(self) -> FlowController:
        """This gateway's requests, for views and forecasts."""
        ...

    def bind(
        self, replicas: Callable[[], Sequence[Replica]], on_turns: OnTurns, on_refused: OnRefused
    ) -> None:
        """Sets the callbacks, before anything else; `replicas` returns the serving ones."""
        ...

    def start(self) -> None:
        """Connects to other gateways. Needs a running event loop."""
        ...

    async def close(self) -> None:
        """Nothing waits any more afterwards."""
        ...

    def enqueue(self, ticket: Ticket, now_s: float) -> QueueFull | None:
        """Raises `ValueError` for a known id, `QuotaStoreUnavailable` if a shared queue is broken."""
        ...

    def cancel(self, entry_id: str, now_s: float) -> bool:
        """Removes a request; False if it does not wait."""
        ...

    def move(self, entry_id: str, tier: int, now_s: float, deadlines_s: Deadlines | None = None) -> bool:
        """Changes a waiting request's tier and deadlines; its arrival stays. False if it does not wait."""
        ...

    def expire(self, now_s: float) -> list[Ticket]:
        """Removes and returns what has waited too long."""
        ...

    def progress(self, entry_id: str, output_tokens: int, live_sequences: int) -> None:
        """Output tokens of a running request so far, all sequences together."""
        ...

    def foresee(self, entry_id: str, foreseen_tokens: tuple[int, int], now_s: float) -> None:
        """The engine's forecast of a running request's whole output: median and 90th percentile."""
        ...

    def heard(self, replica_id: str, engine_life: str, service: Mapping[str, TenantShare]) -> None:
        """The service of a step at an engine, before its tokens are passed to `progress`."""
        ...

    def finish(self, entry_id: str, input_tokens: int, output_tokens: int, now_s: float) -> None: ...

    def put_back(
        self,
        entry_id: str,
        input_tokens: int,
        output_tokens: int,
        now_s: float,
        expires_s: float | None = None,
    ) -> bool:
        """As `FlowController.put_back`; False if it does not run."""
        ...

    def member(self, replica_id: str, *, is_out: bool) -> None:
        """A replica was drained or has left (`is_out`), or it was resumed or has joined. Idempotent."""
        ...

    @property
    def may_have_turns(self) -> bool: ...

    def pump(self, now_s: float) -> None:
        """Dispatches what may go after a change, now or soon."""
        ...

    def require_order(self, name: str) -> None:
        """Raises `UnknownPolicy` for an order that the backend does not support."""
        ...


class LocalQueue:
    """For a gateway that does not share its queue."""

    def __init__(self, flow: FlowController) -> None:
        self.flow = flow
        self._replicas: Callable[[], Sequence[Replica]] = list
        self._on_turns: OnTurns = lambda turns: None

    def bind(
        self, replicas: Callable[[], Sequence[Replica]], on_turns: OnTurns, on_refused: OnRefused
    ) -> None:
        self._replicas, self._on_turns = replicas, on_turns

    def start(self) -> None:
        """Nothing to connect to."""

    async def close(self) -> None:
        """Nothing to disconnect from."""

    def enqueue(self, ticket: Ticket, now_s: float) -> QueueFull | None:
        return self.flow.enqueue(ticket, now_s)

    def cancel(self, entry_id: str, now_s: float) -> bool:
        return self.flow.cancel(entry_id, now_s)

    def move(self, entry_id: str, tier: int, now_s: float, deadlines_s: Deadlines | None = None) -> bool:
        return self.flow.move(entry_id, tier, now_s, deadlines_s) is not None

    def expire(self, now_s: float) -> list[Ticket]:
        return self.flow.expire(now_s)

    def progress(self, entry_id: str, output_tokens: int, live_sequences: int) -> None:
        self.flow.progress(entry_id, output_tokens, live_sequences)

    def foresee(self, entry_id: str, foreseen_tokens: tuple[int, int], now_s: float) -> None:
        self.flow.foresee(entry_id, foreseen_tokens, now_s)

    def heard(self, replica_id: str, engine_life: str, service: Mapping[str, TenantShare]) -> None:
        self.flow.heard(replica_id, engine_life, service)

    def finish(self, entry_id: str, input_tokens: int, output_tokens: int, now_s: float) -> None:
        self.flow.finish(entry_id, input_tokens, output_tokens, now_s)

    def put_back(
        self,
        entry_id: str,
        input_tokens: int,
        output_tokens: int,
        now_s: float,
        expires_s: float | None = None,
    ) -> bool:
        return self.flow.put_back(entry_id, input_tokens, output_tokens, now_s, expires_s) is not None

    def member(self, replica_id: str, *, is_out: bool) -> None:
        """The replicas that serve are asked for."""

    @property
    def may_have_turns(self) -> bool:
        return len(self.flow) > 0

    def pump(self, now_s: float) -> None:
        if self.may_have_turns:
            self._on_turns(self.flow.dispatch(now_s, self._replicas()))

    def require_order(self, name: str) -> None:
        """Every order works."""
