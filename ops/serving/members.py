"""Engines that run elsewhere: their sources by the settings, and the connection to each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from engine.client.client import EngineClient
from engine.client.keys import KeysRefused, gateway_keys
from engine.messages import Ready
from engine.process.fingerprint import tokenizer_fingerprint
from gateway.membership import NamedEngine, objection
from gateway.pools.members import MemberRefused, Members
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
START_WAIT_S = 5.0


class MembersStart:
    """Takes the place of a supervisor: those who keep these engines alive are elsewhere."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def ready(self, timeout_s: float) -> None:
        """Waits a moment for the first one."""
        await self._members.ready(min(timeout_s, START_WAIT_S))


def sources_of(settings: Settings, database: Database) -> list[MemberSource]:
    """Raises `Invalid`."""
    found: list[MemberSource] = []
    if settings.engine.address:
        found.append(
            FixedSource(
                "engine.address", [NamedEngine(SHORT_NAME, settings.engine.address, "engine.address")]
            )
        )
    if settings.engines:
        said = [
            NamedEngine(entry.name, entry.address, "engines", keys=entry.keys) for entry in settings.engines
        ]
        found.append(FixedSource("engines", said))
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
    keys_dir = Path(settings.engine.keys_dir or settings.data_dir)
    tokenizer = tokenizer_fingerprint(settings.model)
    sources = sources_of(settings, database)
    replicas = ReplicaSet(may_change=bool(settings.engines or settings.engine.discover))

    def make(said: NamedEngine) -> LocalEngine:
        try:
            keys = gateway_keys(said.address, keys_dir, said.name, said.keys)
        except KeysRefused as error:
            raise MemberRefused(str(error)) from None
        client = EngineClient(said.address, gateway_id, keys=keys)
        return LocalEngine(
            said.name,
            client,
            settings.model.resolve().name,
            capabilities,
            objection=_objection(None if said.source == "engine.address" else said.name, said.name),
        )

    def _objection(engine_id: str | None, name: str) -> Callable[[Ready], str]:
        def why(ready: Ready) -> str:
            others = (each.ready for each in replicas if each.is_up and each.name != name)
            block_tokens = next((other.block_tokens for other in others if other is not None), None)
            return objection(ready, engine_id, tokenizer, block_tokens)

        return why

    if settings.engine.address:
        try:
            gateway_keys(settings.engine.address, keys_dir, SHORT_NAME)
        except KeysRefused as error:
            raise Invalid("engine.address", str(error)) from None
    members = Members(replicas, sources, make, asyncio.get_running_loop().time)
    await members.look()
    return members


def run_elsewhere(settings: Settings) -> bool:
    """Whether its engines are members; else it starts its own."""
    return bool(settings.engine.address or settings.engines or settings.engine.discover)
