"""May the event loop commit a write itself, when nobody else is waiting for the loop?

To hand a write to another thread and to be woken again takes nearly as long as a fast disk takes to commit
it. So a caller that knows itself alone commits where it stands, on a connection of its own. That holds the
loop up, so it waits for nobody: where somebody else writes, the write goes to the writer's thread. Where
commits take long the next ones do so, too.
"""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from tenants import driver

T = TypeVar("T")
Item = TypeVar("Item")
AtOnce = Callable[[Connection, Sequence[Item]], Sequence[T] | None]
"""Does writes in one statement, outside of a transaction, so that it commits itself. None: not so many.
Raises `IntegrityError` where it changed nothing."""

LONG_S = 0.002
"""Commits that usually take longer are the thread's."""
SMOOTHING = 0.25
"""How much of what is usual is the latest commit."""
MOST_COUNTED_S = 2 * LONG_S
"""One commit counts as no longer than this, so that one pause of the machine does not make it usual."""
REST_S = 2.0
"""After so long it is tried again."""
THREAD_EVERY = 100
"""One of so many is the thread's in any case: its commits also move the log of writes into the database."""


class LoneWriter:
    """SQLite's. Safe to use from any thread: who finds it in use is not alone."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        """`engine`: of its own; its connections wait for no lock."""
        self.commits = 0
        self._engine = engine
        self._clock = clock
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._rests_until_s = -math.inf
        self._usual_s = 0.0
        self._turns = 0

    def write(self, at_once: AtOnce[Item, T], item: Item) -> Sequence[T] | None:
        """The result, in a list, of one write that commits itself, durable; None where the thread must do it,
        and nothing was changed. Raises `SQLAlchemyError`, after which nobody knows whether it was done."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            self._turns += 1
            if self._turns % THREAD_EVERY == 0 or self._clock() < self._rests_until_s:
                return None
            return self._write(at_once, item)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Closes its connection; a later write opens another."""
        with self._lock:
            self._drop()

    def _write(self, at_once: AtOnce[Item, T], item: Item) -> Sequence[T] | None:
        try:
            connection = self._open()
            begun_s = self._clock()
            results = at_once(connection, [item])
        except IntegrityError:
            return None
        except SQLAlchemyError as error:
            if _is_busy(error):
                return None
            self._drop()
            raise
        self._look_at(begun_s, self._clock())
        if results is not None:
            self.commits += 1
        return results

    def _look_at(self, begun_s: float, ended_s: float) -> None:
        taken_s = min(ended_s - begun_s, MOST_COUNTED_S)
        self._usual_s += SMOOTHING * (taken_s - self._usual_s)
        if self._usual_s > LONG_S:
            self._rests_until_s, self._usual_s = ended_s + REST_S, 0.0

    def _open(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
            driver.execute(self._connection, "PRAGMA wal_autocheckpoint=0")
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(SQLAlchemyError):
                self._connection.close()
            self._connection = None
        self._engine.dispose()


def _is_busy(error: SQLAlchemyError) -> bool:
    """Somebody else writes; nothing was changed."""
    code = getattr(getattr(error, "orig", None), "sqlite_errorcode", 0)
    return code & 0xFF == sqlite3.SQLITE_BUSY
