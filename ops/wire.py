"""Which implementation stands behind each part? The composition root: the only place that chooses.

`Running` holds what one serving process is made of. It is built in the order in which the parts need one
another and closed in the opposite order, whatever fails in between.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

from litestar import Litestar

from engine.client import EngineClient
from engine.server import EngineOptions
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.deps import GatewayDeps
from gateway.prompt import PromptRenderer
from gateway.upstream.local_engine import LocalEngine
from ops import datadir
from ops.settings import Settings
from ops.supervise import EngineSupervisor, engine_address
from tenants.admin import Admin
from tenants.database import open_database
from tenants.directory import Directory
from tenants.errors import Invalid
from tenants.ledger import Ledger
from tenants.pricing import PriceBook
from tenants.quota.memory import MemoryQuotaStore
from tenants.quota.store import QuotaStore
from tenants.types import Tier


@dataclass
class Running:
    """The parts of one serving process."""

    settings: Settings
    admin: Admin
    directory: Directory
    supervisor: EngineSupervisor
    app: Litestar
    control_token: str


def engine_options(settings: Settings) -> EngineOptions:
    """How the engine of these settings is started."""
    engine = settings.engine
    return EngineOptions(
        model_dir=settings.model,
        address=engine_address(settings.data_dir),
        data_dir=settings.data_dir,
        dtype=engine.dtype,
        device=engine.device,
        num_blocks=engine.kv_blocks,
        num_host_blocks=engine.host_kv_blocks,
        kv_memory_bytes=engine.kv_memory,
        block_tokens=engine.block_tokens,
        max_sequences=engine.max_sequences,
        max_batched_tokens=engine.max_batched_tokens,
        policy=settings.policy,
        # Gateway and clients need cores, too: an engine that fights them for the last one crawls.
        threads=engine.threads or max(1, (os.cpu_count() or 2) // 2),
        orphan_s=engine.orphan_s,
    )


def gateway_config(settings: Settings) -> GatewayConfig:
    """The gateway's knobs."""
    gateway = settings.gateway
    return GatewayConfig(
        policy=settings.policy,
        data_dir=settings.data_dir,
        max_body_bytes=gateway.body_limit,
        max_queued=gateway.max_queued,
        max_queued_per_tenant=gateway.max_queued_per_tenant,
        queue_ttl_s={
            Tier.INTERACTIVE: gateway.ttl_interactive,
            Tier.STANDARD: gateway.ttl_standard,
            Tier.BATCH: gateway.ttl_batch,
        },
        shutdown_grace_s=gateway.drain,
    )


async def open_quota_store(settings: Settings, closing: contextlib.AsyncExitStack) -> QuotaStore:
    """In-process, or Redis where a URL is given; a store that does not answer stops the start.

    Raises `QuotaStoreUnavailable`.
    """
    if not settings.redis_url:
        return MemoryQuotaStore()
    try:
        from tenants.quota.redis import RedisQuotaStore
    except ModuleNotFoundError:
        raise Invalid("redis_url", "Redis needs the extra: pip install 'fairgate[redis]'") from None
    store = RedisQuotaStore(settings.redis_url)
    closing.push_async_callback(store.close)
    await store.ping()
    return store


def price_book(settings: Settings) -> PriceBook:
    """Prices from the settings; a price of 0 is a price."""
    multipliers = {Tier(name): thousandths for name, thousandths in settings.tier_prices.items()}
    return PriceBook(settings.model_prices, multipliers)


@contextlib.asynccontextmanager
async def build(settings: Settings, pepper: bytes) -> AsyncIterator[Running]:
    """Builds everything and closes it again. The database must have its schema.

    Raises what the parts raise: `TenancyError`, `QuotaStoreUnavailable`, `TokenizerMissing`, `OSError`.
    """
    async with contextlib.AsyncExitStack() as closing:
        database = open_database(settings.resolved_database_url)
        closing.push_async_callback(database.close)
        directory = Directory(database, pepper)
        await directory.start()
        closing.push_async_callback(directory.close)
        quota_store = await open_quota_store(settings, closing)
        options = engine_options(settings)
        gateway_id = datadir.gateway_id(settings.data_dir)
        client = EngineClient(options.address, gateway_id)
        closing.push_async_callback(client.close)
        supervisor = EngineSupervisor(options, client)
        await supervisor.start()
        closing.push_async_callback(supervisor.stop)
        admin = Admin(database, pepper)
        control_token = secrets.token_urlsafe(32)
        deps = GatewayDeps(
            config=gateway_config(settings),
            gateway_id=gateway_id,
            database=database,
            directory=directory,
            admin=admin,
            ledger=Ledger(database),
            quota_store=quota_store,
            prices=price_book(settings),
            upstreams=(LocalEngine(options.engine_id, client),),
            renderer=PromptRenderer(settings.model),
            model_name=settings.served_model_name,
            control_token=control_token,
            # Also with Redis: the ledger is the truth, and no other gateway serves beside this one yet.
            rebuild_counters=True,
        )
        yield Running(settings, admin, directory, supervisor, create_app(deps), control_token)
