"""Composition root: the only place that chooses the implementation of each part."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from litestar import Litestar
from msgspec.structs import asdict

from engine.messages import SamplingParams
from engine.process.options import EngineOptions
from engine.scheduling.batch_or_wait.table_file import BadTable
from engine.scheduling.options import BadOption, PolicyOptions
from engine.scheduling.policy import (
    NeedsTable,
    UnknownPolicy,
    make_policy,
    refuse_idle_options,
    require_learned_table,
    with_table,
)
from engine.telemetry.sender import SpanTarget, TelemetryMissing, open_sender, require_extra
from gateway.app import create_app
from gateway.cluster import identity
from gateway.config import GatewayConfig
from gateway.deps import GatewayDeps
from gateway.dispatch.queue_sharing import QueueSharing
from gateway.domain.call import OPENAI_DEFAULTS
from gateway.fair_threads import FairThreads
from gateway.flow.shared.mirror import require_shared
from gateway.gateway import Gateway
from gateway.pools.catalogue import Catalogue
from gateway.pools.members import Members
from gateway.pools.pool import PoolSpec
from gateway.requests.fields.own_answer import own_capabilities
from gateway.requests.fields.sampling import model_defaults
from gateway.requests.prompt import PromptRenderer
from gateway.tracing.decision import TraceRule
from gateway.tracing.tracer import Tracer
from gateway.upstream.openai.upstream import OpenAIUpstream
from gateway.upstream.replica_set import ReplicaSet
from gateway.workers.workers import Workers
from migrations import runner
from ops.serving import audit_key, datadir
from ops.serving.members import open_members, run_elsewhere
from ops.serving.post import Post
from ops.serving.supervised import Supervisors, open_supervised
from ops.serving.supervisor import engine_address
from ops.serving.upstream_pools import pools_of
from ops.serving.whatif_runner import WhatIfRunner
from ops.settings.administration import open_admin
from ops.settings.settings import BadSetting, Settings
from ops.settings.shown import shown_settings
from ops.settings.telemetry import BadTelemetry, span_target, trace_ratio
from tenants.admin.admin import Admin
from tenants.admin.audit import Actor
from tenants.audit.log import AuditLog
from tenants.directory.directory import Directory
from tenants.directory.gateways import GatewayRegistry, Instance
from tenants.directory.keys import cache_secret, quote_secret
from tenants.errors import Invalid
from tenants.ledger.ledger import Ledger
from tenants.quota.fallback import FallbackQuotaStore
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import QuotaStore, QuotaStoreRecovering
from tenants.resources.all import RESOURCES
from tenants.resources.resource import Resource
from tenants.storage.database import open_database
from tenants.types import Tier

if TYPE_CHECKING:
    from gateway.pools.peer_requests import PeerRequests

log = logging.getLogger("fairgate.serve")


@dataclass
class Running:
    settings: Settings
    admin: Admin
    directory: Directory
    supervisor: Supervisors | Members | AbsentEngine
    app: Litestar
    gateway: Gateway
    control_token: str


def engine_options(settings: Settings) -> EngineOptions:
    """How the engine of these settings is started. Raises `Invalid`."""
    settings = with_template(settings)
    group = asdict(settings.engine)
    target = spans_to(settings)
    return EngineOptions(
        **group
        | {
            "address": engine_address(settings.data_dir),
            # Gateway and clients need cores, too: an engine that competes for the last one slows to a crawl.
            "threads": settings.engine.threads or max(1, (os.cpu_count() or 2) // 2 // settings.engine.count),
        },
        model_dir=settings.model,
        data_dir=settings.data_dir,
        policy=settings.policy.name,
        policy_options=json.dumps(settings.policy.options.changed()),
        otlp="" if target is None else target.endpoint,
        spans_per_s=settings.telemetry.spans_per_s,
    )


def spans_to(settings: Settings) -> SpanTarget | None:
    """None: nowhere. Raises `Invalid` for a setting, not for variables, which may be for other programs."""
    try:
        target = span_target(settings.telemetry, os.environ)
        if target is not None:
            require_extra()
        return target
    except (BadTelemetry, TelemetryMissing) as error:
        _no_traces(settings, error)
        return None


def open_tracer(settings: Settings, gateway_id: str) -> Tracer | None:
    """Keeps traces; None: they go nowhere. Raises `Invalid`."""
    target = spans_to(settings)
    if target is None:
        return None
    try:
        is_given = "telemetry.trace_ratio" in settings.given
        ratio = trace_ratio(settings.telemetry, os.environ, is_given=is_given)
    except BadTelemetry as error:
        _no_traces(settings, error)
        return None
    resource = {"service.instance.id": gateway_id}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        resource["service.name"] = "fairgate"
    return Tracer(TraceRule(ratio), open_sender(target, resource))


def _no_traces(settings: Settings, why: Exception) -> None:
    if settings.telemetry.otlp:
        raise Invalid("telemetry.otlp", str(why)) from None
    log.warning("no traces are kept: %s", why)


def with_template(settings: Settings) -> Settings:
    """The settings with their template's. Raises `Invalid` for a conflict or a model of unknown length."""
    if not settings.policy.template or not settings.engine.serve:
        return settings
    try:
        config = json.loads((settings.model / "config.json").read_text())
        context_tokens = int(config.get("text_config", config)["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Invalid(
            "template", f"the model {settings.model} does not say its max_position_embeddings in config.json"
        ) from None
    try:
        return settings.templated(context_tokens)
    except BadSetting as error:
        raise Invalid("template", str(error)) from None


def policy_options(settings: Settings) -> PolicyOptions:
    """The policy's options, with the batch-or-wait table. Raises `Invalid` for a bad or missing table."""
    settings = with_template(settings)
    try:
        options = with_table(settings.policy.options)
    except BadTable as error:
        raise Invalid("policy.table", str(error)) from None
    try:
        refuse_idle_options(settings.policy.name, options)
        require_learned_table(settings.policy.name, options)
    except (BadOption, NeedsTable, UnknownPolicy) as error:
        raise Invalid("policy", str(error)) from None
    return options


def gateway_config(settings: Settings) -> GatewayConfig:
    return GatewayConfig(
        **asdict(settings.gateway),
        policy=settings.policy.name,
        policy_options=policy_options(settings),
        data_dir=settings.data_dir,
        audit=settings.audit,
    )


def sharing_of(settings: Settings, gateway_id: str) -> QueueSharing | None:
    """The gateway's part in shared queues; None: not shared. Raises `Invalid` for an order that cannot be."""
    is_shareable = settings.upstreams or (settings.engine.serve and run_elsewhere(settings))
    if not settings.redis_url or settings.gateway.queue == "own" or not is_shareable:
        return None
    try:
        require_shared(make_policy(settings.policy.name, policy_options(settings)).order)
    except UnknownPolicy as error:
        raise Invalid("policy", str(error)) from None
    return QueueSharing(settings.redis_url, gateway_id, settings.gateway.store_failure == "local")


def peer_requests_of(settings: Settings) -> PeerRequests | None:
    """Asks other gateways about their requests; None: not possible without Redis."""
    if not settings.redis_url:
        return None
    # Only here, because Redis is an extra.
    from gateway.pools.peer_requests import PeerRequests

    return PeerRequests(settings.redis_url)


async def open_quota_store(
    settings: Settings, closing: contextlib.AsyncExitStack, sharing: QueueSharing | None = None
) -> QuotaStore:
    """In-process, or Redis, which also carries shared queues' messages. Raises `QuotaStoreUnavailable`."""
    most_users = settings.gateway.max_end_users
    if not settings.redis_url:
        return MemoryQuotaStore(max_end_users=most_users)
    try:
        from tenants.quota.redis import RedisQuotaStore
    except ModuleNotFoundError:
        raise Invalid("redis_url", "Redis needs the extra: pip install 'fairgate[redis]'") from None
    store = RedisQuotaStore(settings.redis_url, max_end_users=most_users)
    if sharing is not None:
        store.board = sharing.board
    closing.push_async_callback(store.close)
    # It answers; where it is empty, the gateway fills it.
    with contextlib.suppress(QuotaStoreRecovering):
        await store.ping()
    if settings.gateway.store_failure == "local":
        return FallbackQuotaStore(store, settings.gateway.local_slice, max_end_users=most_users)
    return store


async def seed_prices(settings: Settings, admin: Admin) -> None:
    """Adds prices of models that the price book lacks; the others change by `fairgate price set` only."""
    await admin.prices.seed(Actor("system", "settings"), settings.model_prices)
    rows = await admin.prices.all()
    known = {row.model: row.entry.price for row in rows if row.tier is Tier.STANDARD}
    for model, price in settings.prices.items():
        if known.get(model, price) != price:
            log.warning("the setting prices says otherwise of %s than the price book, which counts", model)
    for name in settings.model_names:
        if name not in {row.model for row in rows}:
            log.warning(
                "model %s has no price: its requests are refused until there is one "
                "(`fairgate price set %s --input N --output N`, or --free)",
                name,
                name,
            )


class AbsentEngine:
    """Takes the place of a supervisor in a gateway without an engine of its own."""

    async def ready(self, timeout_s: float) -> None:
        """Nothing to wait for."""


def engine_sampling(settings: Settings) -> SamplingParams:
    """Sampling defaults of our own engine. Raises `Invalid`."""
    if settings.gateway.sampling_defaults == "openai":
        return OPENAI_DEFAULTS
    defaults = model_defaults(settings.model)
    if said := msgspec.to_builtins(defaults):
        log.info("what requests do not say of sampling is as generation_config.json says: %s", said)
    return defaults


async def open_upstreams(servers: Sequence[OpenAIUpstream], closing: contextlib.AsyncExitStack) -> None:
    """Probes every server once; a silent one joins when it answers."""
    for server in servers:
        closing.push_async_callback(server.close)
    await asyncio.gather(*(server.start() for server in servers))


@contextlib.asynccontextmanager
async def build(
    settings: Settings,
    pepper: bytes,
    resources: tuple[Resource[Any], ...] = RESOURCES,
    post: Post | None = None,
) -> AsyncIterator[Running]:
    """Builds everything and closes it again; the database must have its schema. `post`: of a worker; None: it
    is the whole server. Raises `TenancyError`, `QuotaStoreUnavailable`, `TokenizerMissing`, `OSError`."""
    whole = settings if post is None else post.server
    Catalogue(settings.pool_names, settings.aliases)  # an alias of no model stops the start
    async with contextlib.AsyncExitStack() as closing:
        database = open_database(settings.resolved_database_url)
        closing.push_async_callback(database.close)
        admin = open_admin(settings, pepper, database)
        if post is None:
            await seed_prices(settings, admin)
        workers = None if post is None else Workers(post.seat)
        if workers is not None:
            closing.callback(workers.close)
        directory = Directory(database, pepper, processes=1 if post is None else post.seat.count)
        await directory.start()
        closing.push_async_callback(directory.close)
        gateway_id = datadir.gateway_id(settings.data_dir)
        instance = Instance(secrets.token_hex(8), datadir.runs_in(settings.data_dir))
        # Before an engine or a queue sees this process: they would take it for the other one.
        await identity.claim(
            GatewayRegistry(database), gateway_id, instance, settings.gateway.beat_s, clock=time.monotonic
        )
        sharing = sharing_of(settings, gateway_id)
        quota_store = await open_quota_store(settings, closing, sharing)
        config = gateway_config(settings)
        supervisor: Supervisors | Members | AbsentEngine = AbsentEngine()
        engines = ReplicaSet()
        members: Members | None = None
        own: PoolSpec | None = None
        if settings.engine.serve:
            renderer = PromptRenderer(settings.model, config.special_tokens_in_text)
            able = own_capabilities(renderer.own_form, renderer.template_reads)
            if run_elsewhere(settings):
                members = await open_members(settings, able, gateway_id, database)
                closing.push_async_callback(members.close)
                supervisor, engines = members, members.replicas
            else:
                supervisor, started = await open_supervised(
                    engine_options(settings), settings.model.resolve().name, gateway_id, able, closing
                )
                engines = ReplicaSet(started)
            own = PoolSpec(
                settings.served_model_name,
                engines,
                renderer,
                sampling=engine_sampling(settings),
            )
        threads = FairThreads(
            config.prompt_threads,
            max_waiting=config.max_queued,
            max_waiting_per_tenant=config.max_queued_per_tenant,
        )
        closing.push_async_callback(threads.close)
        pools, servers = pools_of(
            settings.upstreams,
            os.environ,
            own,
            threads=threads,
            cache_secret=cache_secret(pepper),
            special_tokens_in_text=config.special_tokens_in_text,
            gateway_id=gateway_id,
        )
        plugged = tuple(server for server in servers if server.link.has_plugin)
        await open_upstreams(servers, closing)
        control_token = secrets.token_urlsafe(32) if post is None else post.seat.control_token
        tracer = open_tracer(settings, gateway_id)
        if tracer is not None:
            closing.push_async_callback(asyncio.to_thread, tracer.close)
        what_if = WhatIfRunner(whole)
        closing.push_async_callback(what_if.close)
        deps = GatewayDeps(
            config=config,
            gateway_id=gateway_id,
            instance=instance,
            database=database,
            directory=directory,
            admin=admin,
            ledger=Ledger(database),
            quota_store=quota_store,
            prices=lambda: directory.prices,
            upstreams=engines.beside(plugged),
            renderer=pools[0].renderer,
            model_name=settings.served_model_name,
            pools=pools,
            aliases=settings.aliases,
            control_token=control_token,
            quote_secret=quote_secret(pepper),
            audit_key=await audit_key.own(whole.data_dir, AuditLog(database)),
            read_audit_key=partial(audit_key.read_again, whole.data_dir),
            rebuild_counters=not settings.redis_url,
            address=f"{settings.host}:{settings.port}",
            members=members,
            sharing=sharing,
            peer_requests=peer_requests_of(settings),
            shown_settings=shown_settings(whole, with_template(whole)),
            threads=threads,
            what_if=what_if,
            resources=resources,
            tracer=tracer,
            workers=workers,
            backfill=partial(runner.backfill, settings.resolved_database_url),
        )
        app = create_app(deps)
        yield Running(settings, admin, directory, supervisor, app, app.state.gateway, control_token)
