"""Engines that run elsewhere: their sources by the settings, and the connection to each."""

from __future__ import annotations

import asyncio
from pathlib import Path

from engine.client.client import EngineClient
from engine.client.keys import KeysRefused, gateway_keys
from engine.messages import Ready
from engine.process.fingerprint import tokenizer_fingerprint
from gateway.membership import NamedEngine, objection
from gateway.pools.members import Members
from gateway.pools.sources import FixedSource, MemberSource, PlacedSource
from gateway.upstream.capabilities import Capabilities
from gateway.upstream.local_engine import LocalEngine
from gateway.upstream.replica_set import ReplicaSet
from ops.settings.settings import Settings
from tenants.directory.placed_engines import PlacedEngines
from tenants.errors import Invalid
from tenants.storage.database import Database

SHORT_NAME = "engine-0"
"""Of the engine at the setting `engine.address`, whatever its id."""
SHORT_FORM = "engine.address"


def sources_of(settings: Settings, database: Database) -> list[MemberSource]:
    """Raises `Invalid`."""
    named = [NamedEngine(entry.name, entry.address, "engines", keys=entry.keys) for entry in settings.engines]
    if settings.engine.address:
        named.insert(0, NamedEngine(SHORT_NAME, settings.engine.address, SHORT_FORM))
    found: list[MemberSource] = [FixedSource("settings", named)]
    if settings.engine.discover == "sql":
        found.append(PlacedSource(PlacedEngines(database)))
    elif settings.engine.discover:
        found.append(_dns_source(settings.engine.discover))
    return found


def _dns_source(uri: str) -> MemberSource:
    try:
        # Only here, because dnspython is an extra.
        from gateway.pools.dns_source import DnsSource

        return DnsSource(uri)
    except ModuleNotFoundError as error:
        if error.name != "dns":
            raise
        raise Invalid("engine.discover", "DNS needs the extra: pip install 'fairgate[dns]'") from None
    except ValueError as error:
        raise Invalid("engine.discover", str(error)) from None


async def open_members(
    settings: Settings, capabilities: Capabilities, gateway_id: str, database: Database
) -> Members:
    """Begins to connect to those that are named now. Raises `Invalid`."""
    if settings.engine.count > 1:
        raise Invalid(
            "engine.count",
            f"is {settings.engine.count}, but the settings name engines that run elsewhere: leave it out",
        )
    keys_dir = Path(settings.engine.keys_dir or settings.data_dir)
    tokenizer = tokenizer_fingerprint(settings.model)
    sources = sources_of(settings, database)
    replicas = ReplicaSet(may_change=bool(settings.engines or settings.engine.discover))

    def make(said: NamedEngine) -> LocalEngine:
        def why(ready: Ready) -> str:
            others = (each.ready for each in replicas if each.is_up and each.name != said.name)
            block_tokens = next((other.block_tokens for other in others if other is not None), None)
            engine_id = None if said.source == SHORT_FORM else said.name.partition("@")[0]
            return objection(ready, engine_id, tokenizer, block_tokens)

        keys = gateway_keys(said.address, keys_dir, said.name, said.keys)
        client = EngineClient(said.address, gateway_id, keys=keys)
        return LocalEngine(said.name, client, settings.model.resolve().name, capabilities, objection=why)

    if settings.engine.address:
        try:
            gateway_keys(settings.engine.address, keys_dir, SHORT_NAME)
        except KeysRefused as error:
            raise Invalid(SHORT_FORM, str(error)) from None
    members = Members(replicas, sources, make, asyncio.get_running_loop().time)
    await members.look()
    return members


def run_elsewhere(settings: Settings) -> bool:
    """Whether its engines are members; else it starts its own."""
    return bool(settings.engine.address or settings.engines or settings.engine.discover)
