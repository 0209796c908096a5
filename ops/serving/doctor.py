"""Checks of an installation, each with advice.

Each check looks at one thing and returns a finding; none of them changes anything or raises.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
from sqlalchemy import text

from engine.process.capacity import CapacityRefused, KvShape, MachineMemory, engine_sizes
from engine.process.free_memory import free_memory_bytes
from gateway.requests.prompt import PromptRenderer, TokenizerMissing
from migrations import runner
from ops.serving import datadir
from ops.serving.hub_model import ModelMissing, with_local_model
from ops.serving.serve import StartFailed, check_model, explain, missing_packages
from ops.settings.settings import Settings
from tenants.errors import TenancyError
from tenants.quota.store import QuotaStoreRecovering, QuotaStoreUnavailable
from tenants.storage.database import open_database

MAX_CLOCK_SKEW_S = 2.0
MIN_FREE_BYTES = 512 * 2**20
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
"""No clock that is right shows an earlier time."""


@dataclass(frozen=True)
class Finding:
    """Result of one check. `advice` says what to do where it is not ok."""

    check: str
    ok: bool
    detail: str
    advice: str = ""


async def examine(settings: Settings) -> list[Finding]:
    """All checks, in the order in which one depends on another. A model that is named by its id is looked for
    in the local cache only."""
    with contextlib.suppress(ModelMissing):  # the model's check says so
        settings = with_local_model(settings, download=False)
    checks: list[tuple[str, Callable[[Settings], Awaitable[Finding]]]] = [
        ("data directory", _data_dir),
        ("database", _database),
        ("redis", _redis),
        ("model", _model),
        ("engine", _engine),
        ("sizes", _sizes),
        ("speed", _speed),
        ("clock", _clock),
    ]
    found = []
    for name, check in checks:
        try:
            found.append(await check(settings))
        except Exception as error:  # a check that fails is a finding, too
            found.append(
                Finding(
                    name, False, explain(error, settings), "run with --log-level debug and look at the log"
                )
            )
    return found


async def _data_dir(settings: Settings) -> Finding:
    path = settings.data_dir
    if not path.exists():
        return Finding(
            "data directory",
            False,
            f"{path} does not exist",
            "run `fairgate serve` once, or name the right --data-dir",
        )
    try:
        datadir.ensure(path)
    except datadir.DataDirRefused as error:
        return Finding(
            "data directory", False, str(error), "give this user access, or name another --data-dir"
        )
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        return Finding(
            "data directory", False, f"{path} is open to others (mode {mode:o})", f"chmod 700 {path}"
        )
    free = shutil.disk_usage(path).free
    if free < MIN_FREE_BYTES:
        return Finding(
            "data directory",
            False,
            f"only {free // 2**20} MiB are free at {path}",
            "make room: the ledger must be written",
        )
    return Finding("data directory", True, f"{path}, {free // 2**30} GiB free")


async def _database(settings: Settings) -> Finding:
    url = settings.resolved_database_url
    if not settings.database_url and not (settings.data_dir / "fairgate.db").exists():
        return Finding(
            "database", False, "there is none yet", "run `fairgate serve` once, or `fairgate db upgrade`"
        )
    try:
        revision = runner.current(url)
    except TenancyError as error:
        return Finding(
            "database",
            False,
            explain(error, settings),
            "start it, or correct --database-url (FAIRGATE_DATABASE_URL)",
        )
    if revision != runner.head():
        return Finding(
            "database",
            False,
            f"its schema is {revision or 'missing'}, this program needs {runner.head()}",
            "run `fairgate db upgrade`",
        )
    database = open_database(url)
    try:
        await database.ping()
        return Finding("database", True, f"{database.description}, schema {revision}")
    except TenancyError as error:
        return Finding(
            "database", False, str(error), "start it, or correct --database-url (FAIRGATE_DATABASE_URL)"
        )
    finally:
        await database.close()


async def _redis(settings: Settings) -> Finding:
    if not settings.redis_url:
        return Finding("redis", True, "not used: counters are kept in the process")
    if importlib.util.find_spec("redis") is None:
        return Finding("redis", False, "the redis client is not installed", "pip install 'fairgate[redis]'")
    from tenants.quota.redis import RedisQuotaStore

    store = RedisQuotaStore(settings.redis_url)
    try:
        await store.ping()
    except QuotaStoreRecovering:
        return Finding("redis", True, "answers; the next gateway fills its counters from the ledger")
    except QuotaStoreUnavailable as error:
        return Finding(
            "redis", False, explain(error, settings), "start it, or correct --redis-url (FAIRGATE_REDIS_URL)"
        )
    finally:
        await store.close()
    return Finding("redis", True, "answers")


async def _model(settings: Settings) -> Finding:
    try:
        check_model(with_local_model(settings, download=False).model)
        renderer = PromptRenderer(settings.model)
    except ModelMissing as error:
        return Finding("model", False, str(error), "`fairgate serve` downloads it where there is a network")
    except (StartFailed, TokenizerMissing) as error:
        return Finding(
            "model", False, str(error), "name a complete model directory with --model (FAIRGATE_MODEL)"
        )
    chat = "chat template" if renderer.has_chat_template else "no chat template: only /v1/completions works"
    return Finding("model", True, f"{settings.served_model_name} in {settings.model} ({chat})")


async def _engine(settings: Settings) -> Finding:
    if not settings.engine.serve:
        return Finding("engine", True, "none of our own (engine.serve=no): other servers do the work")
    missing = missing_packages()
    if missing:
        return Finding(
            "engine", False, f"{', '.join(missing)} not installed", "pip install 'fairgate[engine]'"
        )
    server = datadir.running_server(settings.data_dir)
    if server is None:
        return Finding("engine", True, "installed; no server runs on this data directory")
    try:
        async with httpx.AsyncClient(timeout=5.0) as client:
            response = await client.get(f"{server.url}/readyz")
    except httpx.HTTPError:
        return Finding(
            "engine", False, f"the server at {server.url} does not answer", "look at its log; restart it"
        )
    if response.status_code != 200:
        return Finding(
            "engine",
            False,
            f"the server at {server.url} says that it is not ready",
            f"look at {_engine_log(settings)}",
        )
    return Finding("engine", True, f"serves behind {server.url}")


async def _sizes(settings: Settings) -> Finding:
    """Sizes that an engine would have if it were started now, and why."""
    if not settings.engine.serve:
        return Finding("sizes", True, "none: there is no engine of our own (engine.serve=no)")
    if settings.engine.address:
        return Finding("sizes", True, "those of the engine at engine.address, which other gateways share")
    if missing_packages():
        return Finding("sizes", True, "not known: the engine is not installed")
    if not (await _model(settings)).ok:
        return Finding("sizes", True, "not known: the model cannot be loaded")
    from engine.model.loader import ModelRefused, free_cuda_bytes, outline

    dtype, device = (
        None if name == "auto" else name for name in (settings.engine.dtype, settings.engine.device)
    )
    try:
        found = outline(settings.model, dtype=dtype, device=device)
        host_bytes = free_memory_bytes()
        free_bytes = free_cuda_bytes(device) if found.device == "cuda" else host_bytes
        free_bytes -= found.weight_bytes
        memory = MachineMemory(found.device, free_bytes, host_bytes if found.device == "cuda" else free_bytes)
        sizes = engine_sizes(memory, KvShape(found.context_tokens, found.token_bytes), settings.engine)
    except ModelRefused as error:
        return Finding("sizes", False, str(error), "name another --model (FAIRGATE_MODEL)")
    except CapacityRefused as error:
        return Finding("sizes", False, str(error), "change the sizes; docs/operating.md has a table")
    whose = "with these settings"
    if datadir.is_serving(settings.data_dir):
        whose = (
            "a start now with the settings of this shell would have (those of the engine that runs are in"
            f" {_engine_log(settings)})"
        )
    return Finding("sizes", True, f"{whose}: {'; '.join(sizes.lines())}")


def _engine_log(settings: Settings) -> Path:
    return Path(settings.data_dir) / "logs" / "engine-0.log"


async def _speed(settings: Settings) -> Finding:
    """Fast paths that an engine would take here with this model, probed on random weights of its shapes."""
    if not settings.engine.serve:
        return Finding("speed", True, "not probed: there is no engine of our own (engine.serve=no)")
    if missing_packages():
        return Finding("speed", True, "not probed: the engine is not installed")
    if not (await _model(settings)).ok:
        return Finding("speed", True, "not probed: the model cannot be loaded")
    from engine.model.cpu.doctor import probe_machine

    return Finding("speed", True, "; ".join(str(each) for each in probe_machine(Path(settings.model))))


async def _clock(settings: Settings) -> Finding:
    advice = "synchronise the clock (for example: timedatectl set-ntp true)"
    now = datetime.now(UTC)
    if now < EARLIEST:
        return Finding("clock", False, f"it shows {now:%Y-%m-%d %H:%M}, which is in the past", advice)
    for name, read in (("database", _database_time), ("Redis", _redis_time)):
        before_s = time.time()
        theirs_s = await read(settings)
        after_s = time.time()
        if theirs_s is None:
            continue
        skew_s = max(0.0, before_s - theirs_s, theirs_s - after_s)
        if skew_s > MAX_CLOCK_SKEW_S:
            return Finding("clock", False, f"it differs from the {name}'s by {skew_s:.1f} s", advice)
    return Finding("clock", True, f"{now:%Y-%m-%d %H:%M:%S} UTC")


async def _database_time(settings: Settings) -> float | None:
    """PostgreSQL has a clock of its own; SQLite uses ours."""
    if settings.resolved_database_url.startswith("sqlite"):
        return None
    database = open_database(settings.resolved_database_url)
    try:
        query = text("SELECT extract(epoch FROM clock_timestamp())")
        return float(await database.read(lambda connection: connection.execute(query).scalar_one()))
    except TenancyError:
        return None  # the database check says so
    finally:
        await database.close()


async def _redis_time(settings: Settings) -> float | None:
    if not settings.redis_url or importlib.util.find_spec("redis") is None:
        return None
    from redis.asyncio import Redis
    from redis.exceptions import RedisError

    client = Redis.from_url(settings.redis_url, socket_timeout=3, socket_connect_timeout=3)
    try:
        whole_s, microseconds = await client.time()
        return float(whole_s) + float(microseconds) / 1e6
    except (RedisError, OSError):
        return None  # the Redis check says so
    finally:
        await client.aclose()
