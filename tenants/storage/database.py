"""SQL access: a pool of readers, and one writer thread with group commit.

Synchronous SQLAlchemy in threads. The writer thread executes all queued writes in one transaction, commits
once, then answers all callers. Where a write fails, all are rolled back and run again with a SAVEPOINT each,
so that a failure concerns only its own caller. Small writes of one kind run together (`write_together`) and
can share a statement: each call of a transaction may have to wait for the interpreter's lock that a busy
event loop holds. `write` returns only after COMMIT, and COMMIT is durable: SQLite runs in WAL mode with
synchronous=FULL, PostgreSQL with synchronous_commit=on whatever the server's default."""

from __future__ import annotations

import asyncio
import queue
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, SQLAlchemyError

from tenants.errors import DatabaseUnavailable, Invalid, NotWritten, SchemaMissing
from tenants.storage.latency import latency_histogram
from tenants.storage.loop_idle import LoopIdle

T = TypeVar("T")
Item = TypeVar("Item")
BatchWork = Callable[[Connection, Sequence[Item]], Sequence[T]]
"""Performs several writes of one kind; returns one result for each."""

CONNECT_TIMEOUT_S = 5
STATEMENT_TIMEOUT_S = 15
SIBLINGS = 6
"""After a batch of this many writes more are expected (PostgreSQL's `commit_siblings`)."""
GATHER_S = 0.002
"""Longest wait for more writes (PostgreSQL's `commit_delay`), and only while the event loop is busy: a larger
batch shares the fixed cost of a transaction."""
COMMIT_S = 0.01
"""With commits this slow, enough writes queue up without waiting."""
PAGE_BYTES = 4096
"""Of SQLite: with less free space nothing more can be written."""
BUSY_TIMEOUT_S = 5
"""SQLite: how long to wait for another process (the CLI beside a server) to finish its write."""
ASK_AGAIN_S = 0.01


def parse_url(url: str) -> URL:
    """The URL with our driver. Raises `Invalid` for an unsupported database."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise Invalid(
            "database_url", "not a URL like sqlite:///path or postgresql://user@host/name"
        ) from error
    match parsed.get_backend_name():
        case "sqlite":
            if not parsed.database or parsed.database == ":memory:" or parsed.database.startswith("file:"):
                raise Invalid("database_url", "SQLite needs a file: sqlite:///path/to/fairgate.db")
            return parsed.set(drivername="sqlite+pysqlite")
        case "postgresql" | "postgres":
            return parsed.set(drivername="postgresql+psycopg")
        case other:
            raise Invalid("database_url", f"{other!r} is not supported; use sqlite or postgresql")


def create_sql_engine(
    url: str,
    *,
    writing: bool,
    pool_size: int = 1,
    statement_timeout_s: float = 0.0,
    busy_timeout_s: float = BUSY_TIMEOUT_S,
) -> Engine:
    """`writing`: SQLite's write lock is taken at BEGIN, as upgrading a read lock fails instead of waiting."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        Path(parsed.database or "").absolute().parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(
            parsed,
            pool_size=pool_size,
            max_overflow=0,
            connect_args={"timeout": busy_timeout_s, "check_same_thread": False},
        )
        _configure_sqlite(engine, busy_timeout_s, writing=writing)
        return engine
    # As the code expects them, whatever the server's own defaults are.
    options = r"-c synchronous_commit=on -c default_transaction_isolation=read\ committed"
    if statement_timeout_s:
        milliseconds = round(statement_timeout_s * 1000)
        options += f" -c statement_timeout={milliseconds} -c lock_timeout={milliseconds}"
    try:
        return create_engine(
            parsed,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=CONNECT_TIMEOUT_S,
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "options": options,
                "keepalives_idle": 5,
                "keepalives_interval": 2,
                "keepalives_count": 3,
                "tcp_user_timeout": 10_000,
            },
        )
    except ModuleNotFoundError as error:
        raise Invalid(
            "database_url", "PostgreSQL needs the extra: pip install 'fairgate[postgres]'"
        ) from error


def _configure_sqlite(engine: Engine, busy_timeout_s: float, *, writing: bool) -> None:
    def on_connect(connection: Any, _record: object) -> None:
        # The driver's implicit BEGIN comes too late for SAVEPOINT and DDL: `on_begin` sends it instead.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout={round(busy_timeout_s * 1000)}").close()
        _write_ahead(connection, busy_timeout_s)
        # The writer keeps in memory what undoes one statement: as a file it is made and deleted with each
        # batch of rows. Readers' temporary files are results of any size.
        temporary = "MEMORY" if writing else "DEFAULT"
        for pragma in ("synchronous=FULL", "foreign_keys=ON", f"temp_store={temporary}"):
            connection.execute(f"PRAGMA {pragma}").close()

    def on_begin(connection: Connection) -> None:
        execute_on_driver(connection, "BEGIN IMMEDIATE" if writing else "BEGIN")

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)


def _write_ahead(connection: sqlite3.Connection, busy_timeout_s: float) -> None:
    """Sets the journal's mode, which stays in the file. In a new one SQLite refuses at once, whatever its
    timeout says, where another process is just doing the same."""
    until_s = time.monotonic() + busy_timeout_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= until_s:
                raise
        time.sleep(ASK_AGAIN_S)


def execute_on_driver(connection: Connection, text: str, parameters: tuple[Any, ...] = ()) -> int:
    """Executes a statement on the DBAPI connection; returns the number of changed rows. Raises `DBAPIError`.
    SQLAlchemy's work for a statement takes longer than a small INSERT. Inside a savepoint it runs through
    SQLAlchemy, which notices a lost connection."""
    if connection.in_nested_transaction():
        return connection.exec_driver_sql(text, parameters).rowcount
    driver: Any = connection.connection.driver_connection
    dbapi: Any = connection.dialect.dbapi
    try:
        cursor = driver.execute(text, parameters)
        rows: int = cursor.rowcount
        cursor.close()
    except dbapi.Error as error:
        raise DBAPIError.instance(text, parameters, error, dbapi.Error, dialect=connection.dialect) from error
    return rows


def is_refused(error: SQLAlchemyError) -> bool:
    """Whether PostgreSQL does not let this role do it."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    return getattr(cause, "sqlstate", None) == "42501"


def translate(error: SQLAlchemyError) -> DatabaseUnavailable:
    """The error for a caller, without the driver's text."""
    cause = error.orig if isinstance(error, DBAPIError) else None
    state = getattr(cause, "sqlstate", None)
    if (
        state in {"42P01", "42703", "3F000"}
        or "no such table" in str(cause)
        or "no such column" in str(cause)
    ):
        return SchemaMissing()
    if is_refused(error):
        return DatabaseUnavailable("the database does not let this role do that: `fairgate db grant` does")
    if state in _NOT_WRITTEN:
        return NotWritten(_NOT_WRITTEN[state])
    # Where SQLite undoes a transaction by itself, the savepoint's end fails in turn.
    at_first: BaseException | None = error
    while at_first is not None:
        code = getattr(at_first, "sqlite_errorcode", 0) & 0xFF  # without what the extended codes add
        if code in _NOT_WRITTEN:
            return NotWritten(_NOT_WRITTEN[code])
        if code == sqlite3.SQLITE_IOERR and isinstance(at_first, sqlite3.Error):
            return NotWritten(f"its disk fails ({at_first.sqlite_errorname})")
        at_first = at_first.__context__
    return DatabaseUnavailable("the database is not available")


_FULL, _READ_ONLY = "no space is left on its disk (ENOSPC)", "its disk is read-only (EROFS)"
_NOT_WRITTEN: dict[str | int | None, str] = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    "53100": _FULL,
    "25006": _READ_ONLY,
}
"""By SQLite's primary result code, and by PostgreSQL's SQLSTATE."""


#: PostgreSQL SQLSTATEs: deadlock, serialization failure, lock not available.
_CONFLICTS = frozenset({"40P01", "40001", "55P03"})


class _Conflict(Exception):
    """A deadlock or serialization failure between two processes' batches."""


class _Job:
    """One queued write."""

    __slots__ = ("error", "future", "item", "loop", "result", "work")

    def __init__(self, work: BatchWork[Any, Any], item: object) -> None:
        self.work = work
        self.item = item
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.result: Any = None
        self.error: Exception | None = None


def _each(connection: Connection, works: Sequence[Callable[[Connection], T]]) -> list[T]:
    return [work(connection) for work in works]


def _answer(jobs: Sequence[_Job]) -> None:
    """Answers all callers of an event loop in one callback: waking the loop is the expensive part."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, answered in by_loop.items():
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(_set_results, answered)


def _set_results(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if job.future.done():
            continue  # the caller was cancelled
        if job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


def _not_written(jobs: Sequence[_Job]) -> NotWritten | None:
    return next((job.error for job in jobs if isinstance(job.error, NotWritten)), None)


def _unavailable(error: Exception) -> DatabaseUnavailable:
    if isinstance(error, DatabaseUnavailable):
        return error
    if isinstance(error, SQLAlchemyError):
        failure = translate(error)
    else:
        failure = DatabaseUnavailable("the database could not store the change")
    failure.__cause__ = error
    return failure


class Database:
    """One database. Safe to use from any thread and event loop; `close` it when done."""

    def __init__(
        self,
        url: str,
        *,
        readers: int = 4,
        max_queued: int = 10_000,
        max_reads: int = 1_000,
        max_batch: int = 256,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
    ) -> None:
        self.url = url
        parsed = parse_url(url)
        self.dialect = parsed.get_backend_name()
        self.description = parsed.render_as_string(hide_password=True)
        """The URL without its password, fit for logs."""
        self.latency = latency_histogram(
            "fairgate_database_seconds",
            "Time of one transaction: of writes, which many callers share, or of a read.",
            ["operation"],
        )
        self._write_latency, self._read_latency = map(self.latency.labels, ("write", "read"))
        self.commits = 0
        self.writes = 0
        """Writes answered so far; `writes / commits` is the mean batch size of group commit."""
        self.write_failure: DatabaseUnavailable | None = None
        """Why the last transaction was not stored; None: it was."""
        self._max_batch = max_batch
        self._max_reads = max_reads
        self._reads_waiting = 0
        self._reads_lock = threading.Lock()
        self._write_engine = create_sql_engine(
            url, writing=True, statement_timeout_s=STATEMENT_TIMEOUT_S, busy_timeout_s=busy_timeout_s
        )
        self._read_engine = create_sql_engine(
            url,
            writing=False,
            pool_size=readers,
            statement_timeout_s=STATEMENT_TIMEOUT_S,
            busy_timeout_s=busy_timeout_s,
        )
        self._readers = ThreadPoolExecutor(max_workers=readers, thread_name_prefix="fairgate-read")
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._max_queued = max_queued
        self._loop_idle = LoopIdle()
        self._expects_more = False
        """More writes are expected to follow the next one."""
        self._connection: Connection | None = None
        """The writer's, kept open between transactions."""
        self._closed = False
        self._writer = threading.Thread(target=self._write_forever, name="fairgate-write", daemon=True)
        self._writer.start()

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` in the writer's next transaction; returns its result after COMMIT. What `work` raises
        is raised here and only its own changes are rolled back. Cancelling the caller does not undo a write
        that has begun. `work` must not commit, must block on nothing but the connection, and may run a second
        time after a rollback. Raises `DatabaseUnavailable`, also when too many writes are queued."""
        return cast(T, await self._queued(_Job(_each, work)))

    async def write_together(self, work: BatchWork[Item, T], item: Item) -> T:
        """As `write`, for small writes of one kind: `work` gets all consecutively queued items in one call.
        If it raises, they are rolled back and run one by one."""
        return cast(T, await self._queued(_Job(work, item)))

    def _queued(self, job: _Job) -> asyncio.Future[Any]:
        if self._closed:
            raise DatabaseUnavailable("the database was closed")
        if self._queue.qsize() >= self._max_queued:
            raise DatabaseUnavailable("too many writes wait for the database")
        self._queue.put(job)
        if self._expects_more:
            self._loop_idle.watch(job.loop)
        return job.future

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` on a consistent snapshot; its writes are rolled back. Raises as `write`."""
        if self._closed:
            raise DatabaseUnavailable("the database was closed")
        with self._reads_lock:
            if self._reads_waiting >= self._max_reads:
                raise DatabaseUnavailable("too many reads wait for the database")
            self._reads_waiting += 1
        future = self._readers.submit(self._read_now, work)
        future.add_done_callback(self._read_done)
        return await asyncio.wrap_future(future)

    async def ping(self) -> None:
        """Raises `DatabaseUnavailable` without an answer, or if the last write was not stored."""
        await self.read(lambda connection: connection.execute(text("SELECT 1")).scalar())
        if (failure := self.write_failure) is not None:
            raise failure.with_traceback(None)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._close_now)

    def _close_now(self) -> None:
        self._queue.put(None)
        self._writer.join()
        self._readers.shutdown(wait=True)
        self._write_engine.dispose()
        self._read_engine.dispose()

    def _read_done(self, _future: Future[Any]) -> None:
        with self._reads_lock:
            self._reads_waiting -= 1

    def _read_now(self, work: Callable[[Connection], T]) -> T:
        try:
            with self._read_latency.time(), self._read_engine.connect() as connection:
                if self.dialect == "postgresql":
                    connection = connection.execution_options(isolation_level="REPEATABLE READ")
                return work(connection)
        except SQLAlchemyError as error:
            raise translate(error) from error

    def _write_forever(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._expects_more:
                self._loop_idle.wait(GATHER_S)
            batch, last = [job], False
            while len(batch) < self._max_batch:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    break
                if following is None:
                    last = True
                    break
                batch.append(following)
            begun_s = time.monotonic()
            self._commit([job for job in batch if not job.future.cancelled()])
            took_s = time.monotonic() - begun_s
            self._write_latency.observe(took_s)
            self._expects_more = len(batch) >= SIBLINGS and took_s < COMMIT_S
            if last:
                break
        self._disconnect()
        # Writes queued while closing are answered with an error.
        while True:
            try:
                late = self._queue.get_nowait()
            except queue.Empty:
                return
            if late is not None:
                late.error = DatabaseUnavailable("the database was closed")
                _answer([late])

    def _commit(self, jobs: list[_Job]) -> None:
        if not jobs:
            return
        try:
            if not self._commit_together(jobs):
                with self._write_engine.connect() as connection, connection.begin():
                    for job in jobs:
                        self._run(job, connection)
                        self._assert_in_transaction(connection)
            self.commits += 1
            self.writes += len(jobs)
            self.write_failure = _not_written(jobs)
        except _Conflict as conflict:
            if len(jobs) > 1:
                # One by one, none holds a row while waiting for another.
                for job in jobs:
                    job.error = None
                    self._commit([job])
                return
            jobs[0].error = self.write_failure = _unavailable(conflict)
        except Exception as error:
            # Whether any of this batch was committed is unknown, whatever a single job returned.
            self.write_failure = failure = _not_written(jobs) or self._named(_unavailable(error))
            # One that was opened while the disk was read-only never writes again.
            self._write_engine.dispose()
            for job in jobs:
                job.error = job.error or failure
        _answer(jobs)

    def _named(self, failure: DatabaseUnavailable) -> DatabaseUnavailable:
        """Names a full disk where SQLite only says that a write failed."""
        if self.dialect != "sqlite" or isinstance(failure, SchemaMissing):
            return failure
        path = Path(make_url(self.url).database or "")
        with suppress(OSError):
            if shutil.disk_usage(path.parent).free < PAGE_BYTES:
                named = NotWritten(_FULL)
                named.__cause__ = failure.__cause__
                return named
        return failure

    def _commit_together(self, jobs: list[_Job]) -> bool:
        """Runs one transaction without savepoints, which cost as much as the writes. False: one failed, all
        were rolled back and need savepoints. Raises what COMMIT raises: it may have been committed."""
        is_committing = False
        try:
            connection = self._connect()
            with connection.begin():
                for work, alike in groupby(jobs, key=attrgetter("work")):
                    some = list(alike)
                    results = work(connection, [job.item for job in some])
                    for job, result in zip(some, results, strict=True):
                        job.result = result
                    self._assert_in_transaction(connection)
                is_committing = True
        except Exception:
            # The connection may be broken: open a new one for the next transaction.
            self._disconnect()
            if is_committing:
                raise
            return False
        return True

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = self._write_engine.connect()
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(SQLAlchemyError):
                self._connection.close()
            self._connection = None

    def _run(self, job: _Job, connection: Connection) -> None:
        try:
            with connection.begin_nested():
                [job.result] = job.work(connection, [job.item])
        except IntegrityError as error:
            job.error = error
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            if getattr(error.orig, "sqlstate", None) in _CONFLICTS:
                raise _Conflict from error
            job.error = translate(error)
            job.error.__cause__ = error
        except Exception as error:
            job.error = error

    def _assert_in_transaction(self, connection: Connection) -> None:
        # On some errors (disk full, I/O error) SQLite rolls the whole transaction back by itself. COMMIT
        # would then do nothing though earlier writes of the batch had succeeded, and later ones would commit
        # one by one (a SAVEPOINT outside a transaction begins one).
        if self.dialect == "sqlite" and not cast(Any, connection.connection.dbapi_connection).in_transaction:
            raise DatabaseUnavailable("the database could not store the change")


def open_database(url: str) -> Database:
    """Opens `sqlite:///path` or `postgresql://user@host/name`. Connects at first use; tables are created by
    `migrations.runner.upgrade(url)`. Raises `Invalid` for an unusable URL."""
    return Database(url)
