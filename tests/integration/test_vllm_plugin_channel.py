"""The channel of the vLLM plug-in over a UNIX socket and as vLLM's HTTP endpoint calls it, with a stand-in
scheduler that runs on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.vllm_plugin import entry_points
from engine.vllm_plugin.channel.desk import GatewayDesk
from engine.vllm_plugin.channel.http_endpoint import FairgateEndpoint
from engine.vllm_plugin.channel.setup import make_desk
from engine.vllm_plugin.channel.unix_socket import LENGTH, MAX_CONNECTIONS
from engine.vllm_plugin.protocol import ContractClaims, Exchange, PluginReport, PolicyChoice
from engine.vllm_plugin.signature import (
    MAX_FRAME_BYTES,
    SKEW_S,
    ChannelRefused,
    decode_about,
    decode_report,
    encode_exchange,
    sign,
)
from tests.support.engine_process import until
from tests.support.vllm_plugin import FOREIGN_KEY, KEY, StandInScheduler


@dataclass
class Core:
    """A stand-in of vLLM's engine core: a thread that computes steps while there is work."""

    scheduler: StandInScheduler
    socket_path: str

    def __post_init__(self) -> None:
        self.peers: list[Peer] = []
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self._loop, daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        while not self.stop.wait(0.001):
            with self.lock:
                if self.scheduler.live:
                    self.scheduler.now_s = time.monotonic()
                    self.scheduler.run(1, step_s=0.0)

    def peer(self, key: bytes = KEY, gateway_id: str = "gw") -> Peer:
        """A connection that is closed with the core."""
        found = Peer(self.socket_path, key, gateway_id)
        self.peers.append(found)
        return found

    def add(self, sequence_id: str, lease_tokens: int, *, key: bytes = KEY, **fields: Any) -> bool:
        """A request arrives; returns whether its signature was good."""
        claims = ContractClaims("gw", "r1", sequence_id, "acme", lease_tokens, time.time(), **fields)
        with self.lock:
            return self.scheduler.add(sign(claims, key), name=f"cmpl-{sequence_id}").is_verified

    async def call_utility_async(self, method: str, *args: str) -> str:
        """As vLLM's client of the engine core: between two steps."""
        with self.lock:
            found: str = getattr(entry_points, method.removeprefix("fairgate_"))(self, *args)
            return found


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY)
    key_file.chmod(0o600)
    path = str(tmp_path / "socket")
    monkeypatch.setenv("FAIRGATE_VLLM_KEY_FILE", str(key_file))
    monkeypatch.setenv("FAIRGATE_VLLM_SOCKET", path)
    monkeypatch.setenv("FAIRGATE_VLLM_GATEWAY_TIMEOUT_S", "1")
    desk = make_desk(os.environ)
    assert isinstance(desk, GatewayDesk)
    found = Core(StandInScheduler(desk, time.monotonic()), path)
    yield found
    found.stop.set()
    found.thread.join()
    for peer in found.peers:
        peer.socket.close()


@dataclass
class Peer:
    """A gateway's end of the socket."""

    path: str
    key: bytes = KEY
    gateway_id: str = "gw"

    def __post_init__(self) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20)
        self.socket.connect(self.path)

    def frame(self, **fields: Any) -> tuple[bytes, str]:
        """A sealed exchange, and its nonce."""
        given = {"nonce": os.urandom(16).hex(), "issued_at_s": time.time()} | fields
        said = Exchange(gateway_id=self.gateway_id, **given)
        return encode_exchange(said, self.key), said.nonce

    def say(self, **fields: Any) -> PluginReport:
        """An exchange and its report."""
        frame, nonce = self.frame(**fields)
        return decode_report(self.send(frame), self.key, nonce)

    def send(self, frame: bytes) -> bytes:
        """A frame and its answer."""
        self.socket.sendall(LENGTH.pack(len(frame)) + frame)
        return self.read()

    def read(self) -> bytes:
        """The next answer."""
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        parts = b""
        while len(parts) < length:
            part = self.socket.recv(length - len(parts))
            if not part:
                raise EOFError
            parts += part
        return parts


async def test_a_lease_over_the_socket(core: Core) -> None:
    peer = core.peer()
    assert core.add("s1", 50)
    await until(lambda: peer.say().sequences["s1"].state == "parked")
    assert peer.say().sequences["s1"].emitted_tokens == 50
    assert peer.say(top_ups={"s1": 120}).sequences["s1"].lease_tokens == 120
    await until(lambda: peer.say().sequences["s1"].emitted_tokens == 120)
    peer.say(cancels={"s1": "budget"})
    await until(lambda: peer.say().sequences["s1"].outcome is not None)
    outcome = peer.say().sequences["s1"].outcome
    assert outcome is not None
    assert (outcome.finish, outcome.emitted_tokens) == ("budget", 120)
    assert peer.say(acknowledges=["s1"]).sequences == {}


async def test_the_policy_reaches_a_busy_server(core: Core) -> None:
    peer = core.peer()
    core.add("s1", 5)
    assert peer.say(policy=PolicyChoice("vtc")).about.policy == "vtc"
    await until(lambda: core.scheduler.policy == "vtc")
    assert "hybrid" in peer.say(policy=PolicyChoice("nonsense")).policy_refusal


async def test_an_idle_server_answers(core: Core) -> None:
    report = core.peer().say()
    assert (report.about.places, report.running, report.sequences) == (8, 0, {})


@pytest.mark.attack
async def test_a_dead_gateways_tokens_are_told_to_the_next_one(core: Core) -> None:
    peer = core.peer()
    core.add("s1", 50)
    peer.say()
    peer.socket.close()
    heir = core.peer(gateway_id="heir")

    def adopted() -> bool:
        return heir.say(adopt=True).sequences.get("s1") is not None

    await until(adopted)
    await until(lambda: heir.say().sequences["s1"].outcome is not None)
    assert heir.say().sequences["s1"].emitted_tokens == 50
    assert core.scheduler.live == {}


@pytest.mark.attack
async def test_two_gateways_with_different_keys(core: Core, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = core.peer(key=FOREIGN_KEY, gateway_id="wrong")
    with pytest.raises(ChannelRefused, match="another key") as refused:
        wrong.say(policy=PolicyChoice("vtc"))
    assert refused.value.code == "signature"
    assert "was refused (signature)" in caplog.text
    with pytest.raises(EOFError):
        wrong.read()
    assert not core.add("forged", 5, key=FOREIGN_KEY, weight=1000.0)
    assert core.add("s1", 5)
    report = core.peer().say()
    assert report.refused_signatures == {"foreign": 1}
    assert core.scheduler.policy == "hybrid"
    for key in (KEY, FOREIGN_KEY):
        assert key.decode() not in caplog.text


@pytest.mark.attack
async def test_what_is_no_exchange_is_answered_with_why(core: Core) -> None:
    cases = [
        (core.peer().frame(issued_at_s=time.time() - SKEW_S - 5)[0], "time"),
        (core.peer().frame(protocol_version=99)[0], "protocol_version"),
        (b"", "signature"),
        (b"GET / HTTP/1.1\r\n\r\n", "signature"),
        (b'{"t":"hello"}', "malformed"),
    ]
    for frame, code in cases:
        answered = core.peer().send(frame)
        assert msgspec.json.decode(answered)["code"] == code
    peer = core.peer()
    frame, nonce = peer.frame()
    decode_report(peer.send(frame), KEY, nonce)
    assert msgspec.json.decode(peer.send(frame))["code"] == "replayed"
    peer = core.peer()
    peer.socket.sendall(LENGTH.pack(MAX_FRAME_BYTES + 1))
    assert msgspec.json.decode(peer.read())["code"] == "too_large"


@pytest.mark.attack
async def test_peers_that_say_nothing_take_no_more_than_their_places(core: Core) -> None:
    silent = [core.peer() for _ in range(MAX_CONNECTIONS)]
    await until(lambda: threading.active_count() >= MAX_CONNECTIONS)
    with pytest.raises((EOFError, OSError)):
        core.peer().say()
    for each in silent:
        each.socket.close()

    def answered() -> bool:
        try:
            return core.peer().say().step > 0
        except (EOFError, OSError):
            return False

    await until(answered)


# ------------------------------------------------------------ vLLM's HTTP


@pytest.fixture
async def endpoint(core: Core) -> FairgateEndpoint:
    found = FairgateEndpoint()
    await found.init_state(SimpleNamespace(engine_core=core), None, None)
    return found


async def until_async(
    say: Callable[[], Awaitable[PluginReport]], is_so: Callable[[PluginReport], bool]
) -> None:
    """Asks until the report says so."""
    async with asyncio.timeout(20):
        while not is_so(await say()):  # noqa: ASYNC110 (the core works on a thread of its own)
            await asyncio.sleep(0.005)


async def parts(frame: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(frame), 1000):
        yield frame[start : start + 1000]


async def test_a_lease_over_http(core: Core, endpoint: FairgateEndpoint) -> None:
    peer = core.peer()

    async def say(**fields: Any) -> PluginReport:
        frame, nonce = peer.frame(**fields)
        status, answered = await endpoint.exchange(parts(frame), str(len(frame)))
        assert status == 200
        return decode_report(answered, KEY, nonce)

    core.add("s1", 50)
    await until_async(say, lambda report: report.sequences["s1"].state == "parked")
    assert (await say(top_ups={"s1": 200})).sequences["s1"].emitted_tokens == 50
    await until_async(say, lambda report: report.sequences["s1"].outcome is not None)
    assert (await say()).sequences["s1"].emitted_tokens == 200


async def test_the_description_over_http_is_sealed(endpoint: FairgateEndpoint) -> None:
    nonce = "0123456789abcdef"
    status, answered = await endpoint.about(nonce)
    assert status == 200
    about = decode_about(answered, KEY, nonce)
    assert (about.policy, about.places) == ("hybrid", 8)
    with pytest.raises(ChannelRefused, match="another key"):
        decode_about(answered, FOREIGN_KEY, nonce)
    assert (await endpoint.about("short"))[0] == 400


@pytest.mark.attack
async def test_an_unsigned_call_does_not_reach_the_core(core: Core, endpoint: FairgateEndpoint) -> None:
    calls: list[str] = []
    found = core.call_utility_async

    async def noted(method: str, *args: str) -> str:
        calls.append(method)
        return await found(method, *args)

    endpoint._client = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=noted))
    good, _ = core.peer().frame()
    foreign, _ = core.peer(key=FOREIGN_KEY).frame()
    assert (await endpoint.exchange(parts(foreign), ""))[0] == 401
    assert (await endpoint.exchange(parts(b"x" * 100), ""))[0] == 401
    assert (await endpoint.exchange(parts(b""), "0"))[0] == 401
    assert (await endpoint.exchange(parts(b""), str(MAX_FRAME_BYTES + 1)))[0] == 413
    assert (await endpoint.exchange(parts(b"x" * (MAX_FRAME_BYTES + 1)), ""))[0] == 413
    assert calls == []
    assert (await endpoint.exchange(parts(good), ""))[0] == 200
    assert (await endpoint.exchange(parts(good), ""))[0] == 401
    assert calls == ["fairgate_exchange"] * 2


async def test_a_server_without_the_scheduler_says_so(core: Core, endpoint: FairgateEndpoint) -> None:
    core.scheduler = SimpleNamespace(live={})  # type: ignore[assignment]
    status, answered = await endpoint.exchange(parts(core.peer().frame()[0]), "")
    assert status == 503
    assert "--scheduler-cls fairgate_vllm.FairScheduler" in answered.decode()
    assert (await endpoint.about("0123456789abcdef"))[0] == 503
