"""Limits in a simulation: quota store and leases as they serve, on virtual time (`docs/simulating.md`)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from engine.step_time.model import predict_decodes_s
from gateway.budget import lease
from gateway.budget.lease import SequenceLease
from gateway.budget.stream_limiter import StreamLimiter, StreamLimitReached, fed_streams
from ops.simulate.pool import SimulatedPool
from ops.simulate.traffic.requests import MOST_REQUESTS, RequestLimits, SimulatedRequest
from tenants.pricing.pricing import PriceBook, counted
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import Denied, Granted
from tenants.types import Amounts, Limit, Meter, Tier

MODEL = "simulated"
HOLD_WAIT_S = 5.0
"""How long a top-up waits for what others hold: the gateway's default."""
LEASE_TTL_S = 3_600.0
"""Nothing here renews holds or ends overdue ones."""
Result = TypeVar("Result")


@dataclass(slots=True)
class _Held:
    row: int
    request: SimulatedRequest
    limits: tuple[Limit, ...]
    sizes: Callable[..., Amounts]
    """Of the prompt and a number of output tokens, as limits count them; cached input may lower the last."""
    high_tokens: int
    """Quantile of its output that is held ahead."""
    most_tokens: int
    cached_tokens: int
    lease_tokens: int = 0
    denied_since_s: float | None = None
    """Its top-up has found no room since then."""


class SimulatedBudget:
    """Of one run; implements `PoolBudget`: queues, tops up and cuts the pool's requests."""

    def __init__(self, pool: SimulatedPool, begins_s: float) -> None:
        """`begins_s`: seconds since 1970 at which virtual time begins."""
        self._pool = pool
        self._store = MemoryQuotaStore(lambda: begins_s + pool.now_s, max_holds=MOST_REQUESTS)
        self._share = 0.0
        self._models = {"simulated"}
        """Models whose shares are set; "simulated" stands for limits that apply to all."""
        self._streams = StreamLimiter(
            max_waiting=MOST_REQUESTS,
            max_waiting_in_all=MOST_REQUESTS,
            # No event loop runs here.
            make_future=cast(Callable[[], Any], Future),
        )
        self._held: dict[str, _Held] = {}
        self._held_back: dict[str, None] = {}

    def lend(self, share: float) -> None:
        """From now on buckets with a ceiling refill at this share of the way to it."""
        self._share = share
        for model in sorted(self._models):
            self._store.spare.set(model, share)

    def arrive(self, row: int, request: SimulatedRequest, high_tokens: int, most_tokens: int) -> None:
        assert request.limits is not None
        of = request.limits
        limits = tuple(limit for limit in of.limits if limit.meter is not Meter.GPU_MS)
        if not limits:
            self._pool.queue_up(row, request)
            return
        for name in {limit.model for limit in limits if limit.model is not None} - self._models:
            self._models.add(name)
            self._store.spare.set(name, self._share)
        held = _Held(row, request, limits, _sizes(of, request), high_tokens, most_tokens, of.cached_tokens)
        entry_id = str(row)
        needs = fed_streams(limits, held.sizes, self._stream_tokens_per_s(), self._store.spare.rate_per_s)
        try:
            passing = self._streams.enter(entry_id, needs, 1)
        except StreamLimitReached:
            self._pool.refuse(row)
            return
        self._held[entry_id] = held
        if passing.done():
            self._reserve(entry_id)
        else:
            # Not at once: another request is just leaving.
            passing.add_done_callback(
                lambda _: self._pool.at(self._pool.now_s, lambda: self._reserve(entry_id))
            )

    def lease_of(self, entry_id: str) -> int | None:
        """Covered output tokens; None: no limit counts them."""
        held = self._held.get(entry_id)
        return None if held is None else held.lease_tokens

    def look(self, entry_id: str, emitted_tokens: int) -> None:
        held = self._held[entry_id]
        if held.denied_since_s is None:
            self._look(entry_id, held, emitted_tokens)

    def ended(self, entry_id: str, output_tokens: int) -> None:
        held = self._held.pop(entry_id, None)
        if held is None:
            return
        _now(self._store.settle(entry_id, held.sizes(output_tokens, held.cached_tokens)))
        self._streams.leave(entry_id)
        for waiting in list(self._held_back):
            self._try_again(waiting)

    def _try_again(self, entry_id: str) -> None:
        if entry_id in self._held_back:
            del self._held_back[entry_id]
            self._reserve(entry_id)

    def _reserve(self, entry_id: str) -> None:
        held = self._held[entry_id]
        of = held.request.limits
        assert of is not None
        sizes, most = held.sizes, held.most_tokens
        hold = lease.first_hold(
            held.limits, sizes, lambda tokens: 0, 1, held.high_tokens, most, may_be_cut=of.may_be_cut
        )
        answer = _now(self._store.reserve(entry_id, held.limits, hold, LEASE_TTL_S))
        if isinstance(answer, Granted):
            self._cover(held, answer)
            self._pool.queue_up(held.row, held.request)
        elif answer.retry_after_s is None:
            del self._held[entry_id]
            self._streams.leave(entry_id)
            self._pool.refuse(held.row)
        else:
            self._held_back[entry_id] = None
            self._pool.at(self._pool.now_s + answer.retry_after_s, lambda: self._try_again(entry_id))

    def _look(self, entry_id: str, held: _Held, emitted: int) -> None:
        """As `gateway/budget/top_up.py`: more before the lease ends; else again later, or the end."""
        pool = self._pool
        first_s = pool.records.first_s[held.row]
        elapsed_s = pool.now_s - first_s
        pace = (emitted - 1) / elapsed_s if first_s >= 0 and elapsed_s > 0 else 0.0
        chunk = lease.chunk_tokens(held.limits, held.sizes, 1, pace)
        part = SequenceLease(emitted, held.lease_tokens, held.most_tokens)
        if lease.is_due([part], chunk, pace):
            first, ahead = lease.wanted_tokens([part], chunk, max(emitted + 1, held.high_tokens))
            answer = self._top_up(entry_id, held, emitted, first, ahead)
            if isinstance(answer, Denied):
                since_s = pool.now_s if held.denied_since_s is None else held.denied_since_s
                retry_s = lease.retry_in_s(answer, pool.now_s - since_s, HOLD_WAIT_S)
                if retry_s is not None:
                    held.denied_since_s = since_s
                    pool.at(pool.now_s + retry_s, lambda: self._look_again(entry_id))
                    return
                # Not enough for a whole chunk: the last tokens of the budget.
                answer = self._top_up(entry_id, held, emitted, min(first, held.lease_tokens + 1), ahead)
            held.denied_since_s = None
            if isinstance(answer, Denied):
                pool.cut(entry_id, held.lease_tokens)
                return
            self._cover(held, answer)
            part = SequenceLease(emitted, held.lease_tokens, held.most_tokens)
        pool.top_up(entry_id, held.lease_tokens, lease.next_look(part, chunk, pace))

    def _look_again(self, entry_id: str) -> None:
        held = self._held.get(entry_id)
        if held is not None:
            self._look(entry_id, held, self._pool.emitted_by_now(entry_id))

    def _top_up(self, entry_id: str, held: _Held, emitted: int, first: int, ahead: int) -> Granted | Denied:
        sizes = held.sizes
        return _now(self._store.top_up(entry_id, sizes(emitted), sizes(first), sizes(ahead)))

    @staticmethod
    def _cover(held: _Held, granted: Granted) -> None:
        covered = lease.covered_tokens(granted.covered, held.sizes, held.most_tokens)
        held.lease_tokens = max(held.lease_tokens, 1, covered)

    def _stream_tokens_per_s(self) -> float:
        width = max(1, max(len(member.engine.table.running) for member in self._pool.members))
        return 1 / predict_decodes_s(self._pool.machine.step_time, width, 0)


def _sizes(of: RequestLimits, request: SimulatedRequest) -> Callable[..., Amounts]:
    tier = tuple(Tier)[request.tier]
    book = PriceBook({(MODEL, tier): of.price})
    sized = partial(counted, book, MODEL, tier, input_tokens=request.input_tokens + of.cached_tokens)

    def size(output_tokens: int, cached_tokens: int = 0) -> Amounts:
        return sized(cached_tokens=cached_tokens, output_tokens=output_tokens)

    return size


def _now(answering: Coroutine[Any, Any, Result]) -> Result:
    try:
        answering.send(None)
    except StopIteration as done:
        return cast(Result, done.value)
    raise AssertionError("the in-process store waits for nothing")
