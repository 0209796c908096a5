"""Members of a pool, over real connections: engines that join, prove themselves, move, leave and fail.

The engines are stand-ins that speak the protocol and run nothing.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from engine import messages
from engine.client.client import EngineClient
from engine.client.keys import KeysRefused
from gateway.membership import QUIET_S, STEADY_S, NamedEngine, objection
from gateway.pools.members import Members
from gateway.pools.sources import FixedSource, MemberSource, PlacedSource, SourceFailed
from gateway.upstream.base import Upstream, takes_turns
from gateway.upstream.local_engine import LocalEngine
from gateway.upstream.replica_set import ReplicaSet
from tenants.directory.placed_engines import PlacedEngines
from tenants.storage.database import Database
from tests.support.engine_process import until
from tests.support.quota import Clock

MODEL = messages.ModelInfo("m", "none", 1, 8192, 256, [], "float32", "cpu", "none", tokenizer="abc")


class StandIn:
    """An engine on a socket of `directory`; `heard` is what it was sent beside greetings."""

    def __init__(self, directory: Path, name: str, place: str = "", **changes: Any) -> None:
        self.address = f"ipc://{directory}/{place or name}.sock"
        self.ready = replace(messages.Ready(name, MODEL, "vtc", 16, 1024, 8, 512, pid=1), **changes)
        self.heard: list[str] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(self.address)
            greeted: set[bytes] = set()
            while not self._ending.is_set():
                if not socket.poll(10):
                    continue
                identity, payload = socket.recv_multipart()
                command = messages.decode_command(payload)
                if isinstance(command, messages.Hello):
                    if identity not in greeted:
                        socket.send_multipart([identity, messages.encode(self.ready)])
                    greeted.add(identity)
                elif not isinstance(command, messages.Alive):
                    self.heard.append(type(command).__name__)
                if isinstance(command, messages.SetPolicy):
                    socket.send_multipart([identity, messages.encode(messages.PolicySet(command.name))])


@dataclass
class Told:
    """A source that says what the test wants; None: it fails."""

    name: str = "told"
    engines: list[NamedEngine] | None = field(default_factory=list)

    async def said(self) -> Sequence[NamedEngine]:
        if self.engines is None:
            raise SourceFailed("it is away")
        return self.engines

    def tell(self, *engines: tuple[str, str]) -> None:
        self.engines = [NamedEngine(name, address, self.name) for name, address in engines]


class Pool:
    """Members, the clock that they go by, and who was prepared."""

    def __init__(self, *sources: MemberSource) -> None:
        self.clock = Clock()
        self.prepared: list[tuple[str, bool]] = []
        self.replicas = ReplicaSet(may_change=True)
        self.members = Members(self.replicas, sources, self._make, self.clock)

    async def _prepare(self, upstream: Upstream) -> None:
        self.prepared.append((upstream.name, upstream.is_up))
        upstream.set_brakes({2: 0.5})

    def _make(self, said: NamedEngine) -> LocalEngine:
        if said.keys == "missing":
            raise KeysRefused("it needs keys")

        def why(ready: messages.Ready) -> str:
            others = [each.ready for each in self.replicas if each.is_up and each.name != said.name]
            sizes = [other.block_tokens for other in others if other is not None]
            return objection(ready, said.name, "abc", sizes[0] if sizes else None)

        return LocalEngine(said.name, EngineClient(said.address, "gw"), "m", objection=why)

    @property
    def serving(self) -> set[str]:
        return {upstream.name for upstream in self.replicas if takes_turns(upstream)}

    def states(self) -> dict[str, tuple[str, str]]:
        return {row["name"] or row["source"]: (row["state"], row["why"]) for row in self.members.describe()}

    async def after(self, seconds: float) -> None:
        """Two looks: the state at the end of that time is seen by the second."""
        self.clock.advance(seconds)
        await self.members.look(self._prepare)
        await self.members.look(self._prepare)


@asynccontextmanager
async def pool_of(*sources: MemberSource) -> AsyncIterator[Pool]:
    pool = Pool(*sources)
    try:
        await pool.members.look(pool._prepare)
        yield pool
    finally:
        await pool.members.close()


async def test_an_engine_joins_prepared_leaves_without_turns_and_is_kept_if_it_comes_back(
    tmp_path: Path,
) -> None:
    source = Told()
    with closing(StandIn(tmp_path, "one")) as one:
        async with pool_of(source) as pool:
            source.tell(("one", one.address), ("two", f"ipc://{tmp_path}/two.sock"))
            await pool.members.look(pool._prepare)
            assert pool.prepared == [("one", False), ("two", False)]
            await until(lambda: pool.serving == {"one"} and one.heard)
            assert one.heard == ["SetBrakes"]
            assert pool.members.missing() == ["two"]
            assert pool.states()["two"] == ("away", "nothing is heard from it for 0 s")
            [engine, _] = pool.replicas
            source.tell()
            await pool.members.look(pool._prepare)
            assert (pool.serving, pool.states()["one"][0], len(pool.replicas)) == (set(), "leaving", 2)
            source.tell(("one", one.address))
            await pool.after(STEADY_S)
            assert (pool.serving, [*pool.replicas]) == ({"one"}, [engine])
            source.tell()
            await pool.after(0)
            await pool.after(STEADY_S)
            assert (pool.states(), len(pool.replicas)) == ({}, 0)


async def test_a_source_that_fails_changes_nothing_and_says_so(tmp_path: Path) -> None:
    source, other = Told(), Told("other", None)
    with closing(StandIn(tmp_path, "one")) as one:
        source.tell(("one", one.address))
        async with pool_of(source, other) as pool:
            assert not pool.members.is_complete
            other.tell()
            await pool.members.look(pool._prepare)
            assert pool.members.is_complete
            await until(lambda: pool.serving == {"one"})
            source.engines = None
            await pool.after(10 * STEADY_S)
            assert pool.serving == {"one"}
            assert pool.states() == {"one": ("serving", ""), "told": ("failed", "it is away")}


async def test_a_name_moves_to_another_address_once_it_is_not_heard_any_more(tmp_path: Path) -> None:
    source = Told()
    with ExitStack() as ending:
        one = ending.enter_context(closing(StandIn(tmp_path, "one")))
        moved = ending.enter_context(closing(StandIn(tmp_path, "one", "elsewhere")))
        source.tell(("one", one.address))
        async with pool_of(source) as pool:
            await until(lambda: pool.serving == {"one"})
            source.tell(("one", moved.address))
            await pool.after(STEADY_S)
            [engine] = pool.replicas
            assert (engine.address, engine.is_up) == (one.address, True)
            assert "stays at" in pool.states()["one"][1]
            one.close()
            await until(lambda: not engine.is_up)
            await pool.after(0)
            await pool.after(QUIET_S)
            await until(lambda: pool.serving == {"one"})
            assert [each.address for each in pool.replicas] == [moved.address]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"engine_id": "two"}, "the engine there is called 'two'"),
        ({"model": replace(MODEL, model_id="other")}, "it serves 'other'"),
        ({"model": replace(MODEL, tokenizer="def")}, "its tokenizer.json is another one"),
        ({"block_tokens": 32}, "its KV blocks have 32 tokens, and the other engines' 16"),
    ],
)
async def test_who_is_another_gets_no_turn_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], why: str
) -> None:
    source = Told()
    with closing(StandIn(tmp_path, "first")) as first, closing(StandIn(tmp_path, "one", **changes)) as one:
        source.tell(("first", first.address))
        async with pool_of(source) as pool:
            await until(lambda: pool.serving == {"first"})
            source.tell(("first", first.address), ("one", one.address))
            await pool.members.look(pool._prepare)
            await until(lambda: pool.states()["one"][0] == "refused")
            await pool.after(1)
            assert why in pool.states()["one"][1]
            assert pool.serving == {"first"}
            assert len([each for each in caplog.records if why in each.message]) == 1


async def test_who_lacks_keys_is_missing_and_no_replica(tmp_path: Path) -> None:
    lacking = FixedSource("engines", [NamedEngine("one", "tcp://h:1", "engines", keys="missing")])
    async with pool_of(lacking) as pool:
        assert pool.states() == {"one": ("refused", "it needs keys")}
        assert (pool.members.missing(), len(pool.replicas)) == (["one"], 0)


async def test_rows_of_a_placer_name_engines_while_their_lease_holds(database: Database) -> None:
    clock = Clock(1_000.0)
    placed = PlacedEngines(database, clock)
    source = PlacedSource(placed)
    await placed.write("one", "tcp://h:1", 60.0, placed_by="ray", place="node")
    assert await source.said() == [NamedEngine("one", "tcp://h:1", "sql", True)]
    await placed.write("one", "tcp://h:2", -1.0, placed_by="ray", place="node")
    assert await source.said() == [NamedEngine("one", "tcp://h:2", "sql", False)]
    await placed.forget("one")
    assert await source.said() == []
    await database.close()
    with pytest.raises(SourceFailed, match="the database does not answer"):
        await source.said()


async def test_a_dns_name_gives_names_ports_and_addresses_and_an_empty_answer_is_none() -> None:
    pytest.importorskip("dns", reason="the extra dns is not installed")
    from gateway.pools.dns_source import DnsSource
    from tests.support.dns_server import DnsServer

    server = DnsServer("engines.default.svc")
    uri = await server.start()
    try:
        source = DnsSource(uri)
        for empty in (True, False):
            server.is_silent = not empty
            with pytest.raises(SourceFailed, match="it has no answer"):
                await source.said()
        server.is_silent = False
        server.engines = {"engine-1": 5555, "engine-0": 5556}
        assert await source.said() == [
            NamedEngine("engine-1", "tcp://127.0.0.1:5555", uri),
            NamedEngine("engine-0", "tcp://127.0.0.1:5556", uri),
        ]
    finally:
        server.stop()
