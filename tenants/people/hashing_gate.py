"""Where passwords are hashed: two threads of their own with a short queue. A hash takes a core and 64 MiB:
unbounded, log-ins would be a way to take a gateway down."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tenants.errors import TooManyLogIns

T = TypeVar("T")
AT_ONCE = 2
MOST_WAITING = 16
HASH_S = 0.2
"""About the time of one hash, for retry times."""


class HashingGate:
    """Runs the hashes of one gateway. `close` it when done."""

    def __init__(self, at_once: int = AT_ONCE, most_waiting: int = MOST_WAITING) -> None:
        self.hashed = 0
        self.most_at_once = 0
        self.on_event_loop = 0
        """Hashes that ran on the thread of the event loop that asked for them."""
        self.refused = 0
        """Callers that found the line full."""
        self._at_once = at_once
        self._most = at_once + most_waiting
        self.inside = 0
        """Hashes that run or wait."""
        self._running = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_workers=at_once, thread_name_prefix="fairgate-hash")

    async def run(self, work: Callable[[], T]) -> T:
        """Raises `TooManyLogIns` where too many wait already."""
        with self._lock:
            if self.inside >= self._most:
                self.refused += 1
                raise TooManyLogIns(self.inside / self._at_once * HASH_S)
            self.inside += 1
        asking = threading.get_ident()
        future = self._threads.submit(self._counted, work, asking)
        # Not at the end of the await: a caller that leaves does not end a hash that has begun.
        future.add_done_callback(self._done)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Ends the threads once what runs is done; what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _counted(self, work: Callable[[], T], asking: int) -> T:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self.on_event_loop += threading.get_ident() == asking
        try:
            return work()
        finally:
            with self._lock:
                self._running -= 1
                self.hashed += 1

    def _done(self, _future: Future[T]) -> None:
        with self._lock:
            self.inside -= 1
