"""Checks of an installation, each with advice; none of them changes anything or raises."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import ipaddress
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from sqlalchemy import text

from engine.process.capacity import DEFAULTS, CapacityRefused, KvShape, MachineMemory, engine_sizes
from engine.process.free_memory import free_memory_bytes
from engine.telemetry.sender import TelemetryMissing, require_extra
from gateway.cluster import identity
from gateway.requests.fields.own_answer import own_capabilities
from gateway.requests.prompt import PromptRenderer, TokenizerMissing
from migrations import runner
from ops.serving import audit_key, datadir
from ops.serving.composition import engine_sampling
from ops.serving.hub_model import ModelMissing, with_local_model
from ops.serving.listeners import StartFailed
from ops.serving.processes.refusals import explain
from ops.serving.serve import check_model, missing_packages
from ops.serving.upstream_probe import can, plugin_detail, plugin_faults
from ops.settings.settings import Settings
from ops.settings.telemetry import BadTelemetry, span_target
from tenants.admin.admin import Admin
from tenants.admin.transaction import Transactions
from tenants.audit.log import AuditLog
from tenants.directory.gateways import GatewayRegistry, IdentityTaken, Instance
from tenants.errors import Invalid, TenancyError
from tenants.outbox import conditions, figures
from tenants.quota.store import QuotaStoreRecovering, QuotaStoreUnavailable
from tenants.release import this_release
from tenants.storage.database import Database, open_database
from tenants.storage.redis_url import parse_redis_url
from tenants.storage.release import apart, require_new

MAX_CLOCK_SKEW_S = 2.0
CHECKPOINTS_LATE = 3
LEAST_LATE_S = 30.0
"""A checkpoint is late after so many of its intervals, and not before so many seconds."""
COLLECTOR_S = 2.0
"""How long the collector may take to answer."""
SECRETS = (datadir.OWNER_KEY_FILE, datadir.SET_UP_LINK_FILE, "engine-*.keys", "audit-key.next-*")
"""Of the data directory, beside those with a check of their own."""
MOST_APART = 1
"""Releases between the oldest and the newest gateway."""
UNREADABLE = "not looked at: the database cannot be read"
MIN_FREE_BYTES = 512 * 2**20
SYNCHRONISE = "synchronise the clock (for example: timedatectl set-ntp true)"
EARLIEST = datetime(2026, 1, 1, tzinfo=UTC)
"""No clock that is right shows an earlier time."""


@dataclass(frozen=True)
class Finding:
    """Result of one check. `advice` says what to do where it is not ok."""

    check: str
    ok: bool
    detail: str
    advice: str = ""
    took_s: float = 0.0


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Each check as it ends, in order of dependence. A model named by its id is looked for in the local cache
    only."""
    with contextlib.suppress(ModelMissing):  # the model's check says so
        settings = with_local_model(settings, download=False)
    checks: list[tuple[str, Callable[[Settings], Awaitable[Finding]]]] = [
        ("data directory", _data_dir),
        ("database", _database),
        ("identity", _identity),
        ("pepper", _pepper),
        ("audit", _audit),
        ("backup", _backup),
        ("releases", _releases),
        ("redis", _redis),
        ("model", _model),
        ("workers", _workers),
        ("engine", _engine),
        ("sizes", _sizes),
        ("speed", _speed),
        ("other servers", _other_servers),
        ("collector", _collector),
        ("clock", _clock),
    ]
    for name, check in checks:
        begun_s = time.monotonic()
        try:
            found = await check(settings)
        except Exception as error:  # a check that fails is a finding, too
            advice = "run with --log-level debug and look at the log"
            found = Finding(name, False, explain(error, settings), advice)
        yield replace(found, took_s=round(time.monotonic() - begun_s, 1))


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
    for file in (found for pattern in SECRETS for found in sorted(path.glob(pattern))):
        if (mode := file.stat().st_mode & 0o777) & 0o077:
            detail = f"{file} is open to others (mode {mode:o})"
            return Finding("data directory", False, detail, f"chmod 600 {file}; replace it if it was read")
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
        schema = runner.schema(url)
        revision, is_newer = schema.revision, runner.is_newer(schema.revision)
    except TenancyError as error:
        return Finding(
            "database",
            False,
            explain(error, settings),
            "start it, or correct --database-url (FAIRGATE_DATABASE_URL)",
        )
    try:
        require_new(this_release(), schema.oldest_release)
    except Invalid as error:
        return Finding("database", False, explain(error, settings), "install a newer release")
    if not is_newer and revision != runner.head():
        return Finding(
            "database",
            False,
            f"its schema is {revision or 'missing'}, this program needs {runner.head()}",
            "run `fairgate db upgrade`",
        )
    database = open_database(url)
    more = ", of a later release" if is_newer else ""
    more += "".join(f", {each}" for each in schema.backfills if not each.is_done)
    try:
        await database.ping()
        return Finding("database", True, f"{database.description}, schema {revision}{more}")
    except TenancyError as error:
        return Finding(
            "database", False, str(error), "start it, or correct --database-url (FAIRGATE_DATABASE_URL)"
        )
    finally:
        await database.close()


async def _identity(settings: Settings) -> Finding:
    if not (settings.data_dir / "gateway-id").exists():
        return Finding("identity", True, "none yet: the first start makes one")
    gateway_id = datadir.gateway_id(settings.data_dir)
    database = open_database(settings.resolved_database_url)
    try:
        await identity.claim(
            GatewayRegistry(database),
            gateway_id,
            Instance(runs_in=datadir.runs_in(settings.data_dir)),
            settings.gateway.beat_s,
            clock=time.monotonic,
        )
    except IdentityTaken as error:
        return Finding("identity", False, str(error), "stop one of the two, or delete one's file gateway-id")
    except TenancyError:
        return Finding("identity", True, f"{gateway_id}; whether it is its own is not known: no database")
    finally:
        await database.close()
    return Finding("identity", True, f"{gateway_id}, of this data directory only")


@contextlib.asynccontextmanager
async def _readable(settings: Settings) -> AsyncIterator[Database | None]:
    """None: it cannot be read, which `_database` says why."""
    if not (await _database(settings)).ok:
        yield None
        return
    database = open_database(settings.resolved_database_url)
    try:
        yield database
    finally:
        await database.close()


async def _pepper(settings: Settings) -> Finding:
    path = settings.data_dir / datadir.PEPPER_FILE
    where = "FAIRGATE_PEPPER" if settings.pepper else str(path)
    if not settings.pepper and path.exists() and (mode := path.stat().st_mode & 0o777) & 0o077:
        return Finding("pepper", False, f"{path} is open to others (mode {mode:o})", f"chmod 600 {path}")
    try:
        found = datadir.pepper(settings)
    except datadir.DataDirRefused as error:
        return Finding("pepper", False, str(error), "restore the file from a backup")
    async with _readable(settings) as database:
        if database is None:
            return Finding("pepper", True, f"{where}; not compared: the database cannot be read")
        if await Admin(Transactions(database, found)).keys.is_own_pepper():
            is_there = settings.pepper or path.exists()
            return Finding("pepper", True, where if is_there else "none yet: made with the first key")
    is_missing = not (settings.pepper or path.exists())
    made_with = f"need {path}, which is missing" if is_missing else "were made with another pepper"
    return Finding(
        "pepper",
        False,
        f"the API keys in the database {made_with}: none of them is accepted",
        "restore the pepper of the data directory that made them, or give it as FAIRGATE_PEPPER",
    )


async def _audit(settings: Settings) -> Finding:
    name, path = "audit", settings.data_dir / audit_key.AUDIT_KEY_FILE
    if path.exists() and (mode := path.stat().st_mode & 0o777) & 0o077:
        advice = f"chmod 600 {path}, and `fairgate audit key rotate`: others may have read it"
        return Finding(name, False, f"{path} is open to others (mode {mode:o})", advice)
    try:
        own = audit_key.read(settings.data_dir)
    except datadir.DataDirRefused as error:
        return Finding(name, False, str(error), "restore the file from a backup")
    async with _readable(settings) as database:
        if database is None:
            return Finding(name, True, UNREADABLE)
        log = AuditLog(database)
        state, oldest_us = await log.state(), await log.oldest_unsigned_us()
    if state.public_key is None:
        return Finding(name, True, "not signed yet: the first server makes the key")
    late = late_signature(oldest_us, time.time(), settings.audit.checkpoint_s)
    if late is not None:
        signs = own is not None and own.public == state.public_key
        how = "start a server, look at the log of the one that runs, or run `fairgate audit checkpoint`"
        return Finding(
            name,
            False,
            f"row {state.signed} of the audit is not signed since {late:.0f} s",
            how if signs else f"no {path.name} of this log is here: start a gateway that has it, and {how}",
        )
    whose = "" if own is not None and own.public == state.public_key else ", by other gateways"
    return Finding(name, True, f"{state.signed} of {state.size} rows are signed{whose}")


def late_signature(oldest_us: int | None, now_s: float, every_s: float) -> float | None:
    """Seconds for which the oldest unsigned row has waited; None: no longer than it may."""
    if oldest_us is None:
        return None
    waited_s = now_s - oldest_us / 1e6
    return waited_s if waited_s > max(LEAST_LATE_S, CHECKPOINTS_LATE * every_s) else None


async def _backup(settings: Settings) -> Finding:
    name, late_s = "backup", settings.gateway.backup_late_s
    if not late_s:
        return Finding(name, True, "not looked at: gateway.backup_late is 0")
    async with _readable(settings) as database:
        if database is None:
            return Finding(name, True, UNREADABLE)
        taken_us = await database.read(figures.backup_us)
    for late in conditions.backup_late(taken_us, round(time.time() * 1e6), late_s):
        advice = "take one (`fairgate backup --help`), and let a timer take the next; docs/operating.md"
        return Finding(name, False, late.summary, advice)
    return Finding(name, True, f"none is late: every {late_s / 3_600:g} hours there should be one")


async def _releases(settings: Settings) -> Finding:
    name = "releases"
    async with _readable(settings) as database:
        if database is None:
            return Finding(name, True, UNREADABLE)
        seen = await GatewayRegistry(database).seen()
    alive = {row.release for row in seen if row.silent_s <= settings.gateway.gateway_stale_s}
    shown = ", ".join(sorted(each or "one that it does not say" for each in alive)) or "none"
    if max((apart(one, other) for one in alive for other in alive), default=0) > MOST_APART:
        advice = "replace the oldest gateways: an upgrade goes from one release to the next"
        return Finding(name, False, f"gateways of releases too far apart serve together: {shown}", advice)
    return Finding(name, True, f"of the gateways that serve: {shown}")


def open_redis(url: str) -> str | None:
    """Why others than the gateways can use a Redis; None: it has a password, or is on this machine only
    (loopback, or a socket in a directory that is closed to other users)."""
    parts = urlsplit(url)
    if parts.password:
        return None
    if parts.scheme == "unix":
        directory = Path(parts.path).parent
        if directory.is_dir() and directory.stat().st_mode & 0o007:
            return f"its socket {parts.path} is open to every user of this machine, without a password"
        return None
    named = [host.rpartition(":")[0].strip("[]") for host in parse_redis_url(url).hosts]
    for host in named or [parts.hostname or "localhost"]:
        is_here = host == "localhost"
        with contextlib.suppress(ValueError):
            is_here = ipaddress.ip_address(host).is_loopback
        if not is_here:
            return f"{host} takes commands without a password: any host can change what tenants have used"
    return None


async def _redis(settings: Settings) -> Finding:
    if not settings.redis_url:
        return Finding("redis", True, "not used: counters are kept in the process")
    if reason := open_redis(settings.redis_url):
        return Finding(
            "redis",
            False,
            reason,
            "set requirepass and redis://:PASSWORD@HOST, or use a socket in a directory of mode 700",
        )
    if importlib.util.find_spec("redis") is None:
        return Finding("redis", False, "the redis client is not installed", "pip install 'fairgate[redis]'")
    from tenants.quota.redis import RedisQuotaStore

    store = RedisQuotaStore(settings.redis_url)
    says = "answers"
    try:
        await store.ping()
    except QuotaStoreRecovering:
        says = "answers; the next gateway fills its counters from the ledger"
    except (QuotaStoreUnavailable, Invalid) as error:
        way_out = "correct --redis-url (FAIRGATE_REDIS_URL)"
        if not isinstance(error, Invalid):
            way_out = f"start it, or {way_out}"
        return Finding("redis", False, explain(error, settings), way_out)
    finally:
        await store.close()
    policies = await _eviction_policies(settings.redis_url)
    for policy in policies - {None, "noeviction"}:
        return Finding(
            "redis",
            False,
            f"{says}, and drops counters and queues where its memory is full (maxmemory-policy {policy})",
            "set maxmemory-policy noeviction (redis.conf, CONFIG SET, or the provider's parameters)",
        )
    return Finding("redis", True, says)


async def _eviction_policies(url: str) -> set[str | None]:
    """Of each server, by INFO (managed ones refuse CONFIG); None: not stated."""
    found = await _ask_redis(url, "INFO", "memory")
    return {each.get("maxmemory_policy") for each in found}


async def _ask_redis(url: str, *command: str) -> list[Any]:
    """The answer of each server; none where one does not answer: the Redis check says so."""
    from redis.exceptions import RedisError

    from tenants.storage.redis_client import ask_servers, open_client

    client = open_client(url, 3.0)
    try:
        return list((await ask_servers(client, *command)).values())
    except (RedisError, OSError, TimeoutError):
        return []
    finally:
        await client.aclose()


async def _model(settings: Settings) -> Finding:
    try:
        check_model(with_local_model(settings, download=False).model)
        renderer = PromptRenderer(settings.model)
        engine_sampling(settings)
    except ModelMissing as error:
        return Finding("model", False, str(error), "`fairgate serve` downloads it where there is a network")
    except (StartFailed, TokenizerMissing, Invalid) as error:
        return Finding(
            "model", False, str(error), "name a complete model directory with --model (FAIRGATE_MODEL)"
        )
    chat = "chat template" if renderer.has_chat_template else "no chat template: only /v1/completions works"
    words = own_capabilities(renderer.own_form, renderer.template_reads).words
    what = f"{chat}; {can({'capabilities': sorted(words)})}"
    return Finding("model", True, f"{settings.served_model_name} in {settings.model} ({what})")


async def _workers(settings: Settings) -> Finding:
    """As the running server says: it may have been started with another number of them."""
    name, server = "workers", datadir.running_server(settings.data_dir)
    if server is None:
        return Finding(name, True, "no server runs on this data directory")
    async with httpx.AsyncClient(timeout=5.0) as client:
        said = (await client.get(f"{server.url}/readyz")).json().get("workers")
    if said is None:
        return Finding(name, True, "one process serves")
    places = (settings.data_dir / "workers").glob("*/gateway-id")
    own = {place.read_text(encoding="ascii").strip() for place in places}
    serving = {worker["gateway_id"] for worker in (await _status(server))["workers"]}
    shown = f"{said['up']} of {said['of']} workers serve"
    if said["up"] < said["of"]:
        return Finding(name, False, shown, "look at the server's log: it says why one does not answer")
    if not serving <= own:
        advice = f"another server answers at {server.url}: stop one of the two"
        return Finding(name, False, f"{shown}, not all from {settings.data_dir / 'workers'}", advice)
    return Finding(name, True, shown)


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
    computes = [
        f"{replica['replica_id']}: {replica['forward']} forward pass, attention {replica['attention']}"
        for replica in await _replicas(server, "engine")
    ]
    return Finding("engine", True, "; ".join([f"serves behind {server.url}", *computes]))


async def _replicas(server: datadir.ServerFile, kind: str) -> list[dict[str, Any]]:
    """What a running gateway says of its replicas of this kind."""
    pools = (await _status(server))["models"]["pools"].values()
    return [replica for pool in pools for replica in pool["replicas"] if replica["kind"] == kind]


async def _status(server: datadir.ServerFile) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {server.control_token}"}
    async with httpx.AsyncClient(timeout=5.0, headers=headers) as client:
        response = await client.get(f"{server.url_of_admin}/admin/v1/status")
    status: dict[str, Any] = response.raise_for_status().json()
    return status


async def _other_servers(settings: Settings) -> Finding:
    """The running gateway's view of them: `fairgate model check` asks the servers themselves."""
    name = "other servers"
    if not settings.upstreams:
        return Finding(name, True, "none: the setting upstreams names none")
    server = datadir.running_server(settings.data_dir)
    if server is None:
        return Finding(name, True, "not asked: no server runs on this data directory")
    replicas = await _replicas(server, "openai")
    faults, details = [], []
    for replica in replicas:
        if replica["is_drained"]:
            details.append(f"{replica['replica_id']} is drained (`fairgate upstream resume` ends that)")
        elif not replica["is_up"]:
            faults.append(
                f"{replica['replica_id']} is not used: {replica['refusal'] or 'it failed too often'}"
            )
        kinds = [f"{kind} {number}" for kind, number in replica["contradictions"].items() if number]
        if kinds:
            faults.append(f"{replica['replica_id']} contradicts itself ({', '.join(kinds)} answers)")
        if replica["is_up"] and replica["plugin"] is not None:
            faults += [f"{replica['replica_id']}: {fault}" for fault in plugin_faults(replica)]
            details.append(f"{replica['replica_id']} has {plugin_detail(replica)}")
        details.append(f"{replica['replica_id']} ({replica['server']}) can do {can(replica)}")
    if faults:
        return Finding(name, False, "; ".join(faults), "run `fairgate model check`; docs/upstreams.md")
    return Finding(name, True, "; ".join([f"{len(replicas)} serve, and count what they send", *details]))


async def _collector(settings: Settings) -> Finding:
    """Whether the collector takes an empty export, with the headers of this environment."""
    name, advice = "collector", "start it, or correct telemetry.otlp (FAIRGATE_TELEMETRY_OTLP)"
    try:
        target = span_target(settings.telemetry, os.environ)
        if target is None:
            return Finding(name, True, "none: the setting telemetry.otlp names none, and no traces are kept")
        require_extra()
    except (BadTelemetry, TelemetryMissing) as error:
        return Finding(name, False, str(error), "docs/monitoring.md says what traces need")
    from engine.telemetry.otlp import OtlpExport

    export = OtlpExport(target.endpoint, {}, COLLECTOR_S)
    try:
        problem = await asyncio.to_thread(export.send, ())
    finally:
        export.close()
    if problem:
        return Finding(name, False, f"{target.endpoint}: {problem}; traces are lost, nothing else is", advice)
    return Finding(name, True, f"{target.endpoint} takes spans")


async def _sizes(settings: Settings) -> Finding:
    if not settings.engine.serve:
        return Finding("sizes", True, "none: there is no engine of our own (engine.serve=no)")
    if settings.engine.address:
        return Finding("sizes", True, "those of the engine at engine.address, which other gateways share")
    if missing_packages():
        return Finding("sizes", True, "not known: the engine is not installed")
    if not (await _model(settings)).ok:
        return Finding("sizes", True, "not known: the model cannot be loaded")
    from engine.core.detokenizer import load_texts
    from engine.model.device import device_of
    from engine.model.loader import ModelRefused, load_model, outline
    from engine.process.profiling import measured_sizes

    named, computes = settings.engine.named(), list[str]()
    dtype, device = named["dtype"], named["device"]
    try:
        if device_of(device).type == "cuda":
            if datadir.is_serving(settings.data_dir):
                return Finding("sizes", True, f"measured at the start: they are in {_engine_log(settings)}")
            block_tokens = settings.engine.block_tokens or DEFAULTS["cuda"].block_tokens
            loaded = load_model(settings.model, check_block_tokens=block_tokens, **named)
            computes = list(map(str, loaded.path_reports))
            sizes = measured_sizes(loaded, load_texts(settings.model), settings.engine)
        else:
            found = outline(settings.model, dtype=dtype, device=device)
            free_bytes = free_memory_bytes() - found.weight_bytes
            memory = MachineMemory("cpu", free_bytes, free_bytes)
            sizes = engine_sizes(memory, KvShape(found.context_tokens, found.token_bytes), settings.engine)
    except (ModelRefused, ValueError) as error:
        return Finding("sizes", False, str(error), "change what it names, or name another --model")
    except CapacityRefused as error:
        return Finding("sizes", False, str(error), "change the sizes; docs/operating.md has a table")
    whose = "with these settings"
    if datadir.is_serving(settings.data_dir):
        whose = (
            "a start now with the settings of this shell would have (those of the engine that runs are in"
            f" {_engine_log(settings)})"
        )
    return Finding("sizes", True, f"{whose}: {'; '.join([*sizes.lines(), *computes])}")


def _engine_log(settings: Settings) -> Path:
    return Path(settings.data_dir) / "logs" / "engine-0.log"


async def _speed(settings: Settings) -> Finding:
    if not settings.engine.serve:
        return Finding("speed", True, "not probed: there is no engine of our own (engine.serve=no)")
    if missing_packages():
        return Finding("speed", True, "not probed: the engine is not installed")
    if not (await _model(settings)).ok:
        return Finding("speed", True, "not probed: the model cannot be loaded")
    from engine.model.cpu.doctor import probe_machine
    from engine.model.device import device_of

    named = settings.engine.named()
    if device_of(named["device"]).type != "cpu":
        return Finding("speed", True, "chosen at the start: sizes and engine say what")
    reports = probe_machine(Path(settings.model), named["attention"])
    ok = named["attention"] is None or reports[0].chosen
    advice = "" if ok else "take another engine.attention: with this one no engine starts"
    return Finding("speed", ok, "; ".join(map(str, reports)), advice)


async def _clock(settings: Settings) -> Finding:
    now = datetime.now(UTC)
    if now < EARLIEST:
        return Finding("clock", False, f"it shows {now:%Y-%m-%d %H:%M}, which is in the past", SYNCHRONISE)
    for name, read in (("database", _database_time), ("Redis", _redis_time)):
        before_s = time.time()
        theirs_s = await read(settings)
        after_s = time.time()
        skew_s = max((clock_skew_s(before_s, each_s, after_s) for each_s in theirs_s), default=0.0)
        if skew_s > MAX_CLOCK_SKEW_S:
            return Finding("clock", False, f"it differs from the {name}'s by {skew_s:.1f} s", SYNCHRONISE)
    return Finding("clock", True, f"{now:%Y-%m-%d %H:%M:%S} UTC")


def clock_skew_s(before_s: float, theirs_s: float, after_s: float) -> float:
    """Least offset of another clock, which was read between two readings of ours."""
    return max(0.0, before_s - theirs_s, theirs_s - after_s)


async def _database_time(settings: Settings) -> list[float]:
    """PostgreSQL has a clock of its own; SQLite uses ours."""
    if settings.resolved_database_url.startswith("sqlite"):
        return []
    database = open_database(settings.resolved_database_url)
    try:
        query = text("SELECT extract(epoch FROM clock_timestamp())")
        return [float(await database.read(lambda connection: connection.execute(query).scalar_one()))]
    except TenancyError:
        return []  # the database check says so
    finally:
        await database.close()


async def _redis_time(settings: Settings) -> list[float]:
    """Of each server."""
    if not settings.redis_url or importlib.util.find_spec("redis") is None:
        return []
    times = await _ask_redis(settings.redis_url, "TIME")
    return [float(whole_s) + float(microseconds) / 1e6 for whole_s, microseconds in times]
