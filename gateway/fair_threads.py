"""A few threads for work that would stall the event loop, shared fairly by tenants."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

INLINE_BYTES = 4 * 1024
"""Up to this size text is tokenised on the event loop: at most 3 ms, about a switch to a thread."""


class TooManyWaiting(Exception):
    def __init__(self, most: int, *, of_tenant: bool) -> None:
        super().__init__(f"{most} pieces of work wait for a thread already")
        self.most = most
        self.of_tenant = of_tenant


@dataclass(slots=True, eq=False)
class _Work:
    tenant_id: str
    call: Callable[[], Any]
    result: asyncio.Future[Any]


class FairThreads:
    """Runs work in threads. Tenants take turns; of several threads none has all. Use from one event loop."""

    def __init__(
        self, threads: int = 2, *, max_waiting: int = 2_048, max_waiting_per_tenant: int = 512
    ) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="fair")
        self._free = threads
        self._most_of_one = max(1, threads - 1)
        self._max_waiting = max_waiting
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[_Work]] = OrderedDict()
        """By tenant, in the order of their turns."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, tenant_id: str, call: Callable[[], T], *, is_bounded: bool = True) -> T:
        """The result of `call`, run in a thread in the tenant's turn; cancelled before that, it never runs.
        `is_bounded`: False if its number is bounded elsewhere. Raises `TooManyWaiting`."""
        work = _Work(tenant_id, call, asyncio.get_running_loop().create_future())
        if self._may_start(tenant_id):
            self._start(work)
        else:
            if is_bounded:
                self._require_room(tenant_id)
            self._waiting.setdefault(tenant_id, deque()).append(work)
        try:
            result: T = await work.result
            return result
        except asyncio.CancelledError:
            self._remove(work)
            raise

    async def close(self) -> None:
        for line in self._waiting.values():
            for work in line:
                work.result.cancel()
        self._waiting.clear()
        await asyncio.to_thread(self._executor.shutdown)

    def _may_start(self, tenant_id: str) -> bool:
        return self._free > 0 and self._running[tenant_id] < self._most_of_one

    def _require_room(self, tenant_id: str) -> None:
        if len(self._waiting.get(tenant_id, ())) >= self._max_waiting_per_tenant:
            raise TooManyWaiting(self._max_waiting_per_tenant, of_tenant=True)
        if len(self) >= self._max_waiting:
            raise TooManyWaiting(self._max_waiting, of_tenant=False)

    def _remove(self, work: _Work) -> None:
        line = self._waiting.get(work.tenant_id)
        if line is not None:
            with contextlib.suppress(ValueError):  # it runs
                line.remove(work)
            if not line:
                del self._waiting[work.tenant_id]

    def _start(self, work: _Work) -> None:
        self._free -= 1
        self._running[work.tenant_id] += 1
        loop = work.result.get_loop()
        running = self._executor.submit(work.call)
        running.add_done_callback(lambda done: loop.call_soon_threadsafe(self._ended, work, done))

    def _ended(self, work: _Work, done: Future[Any]) -> None:
        self._free += 1
        self._running[work.tenant_id] -= 1
        if not self._running[work.tenant_id]:
            del self._running[work.tenant_id]
        if not work.result.done():
            error = done.exception()
            if error is None:
                work.result.set_result(done.result())
            else:
                work.result.set_exception(error)
        self._start_next()

    def _start_next(self) -> None:
        for tenant_id, line in self._waiting.items():
            if self._may_start(tenant_id):
                work = line.popleft()
                if line:
                    self._waiting.move_to_end(tenant_id)
                else:
                    del self._waiting[tenant_id]
                self._start(work)
                return
