"""Attacks on the connection between gateways and an engine: strangers on tcp, gateways that reach for what is
another's, bytes that are no messages, sequences that vanish, two processes under one id."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from engine import messages
from tests.support.engine_process import engine_options, sequence
from tests.support.server_process import MODEL, Server, server_process, until
from tests.support.services import free_port
from tests.support.warm_command import fairgate
from tests.support.warm_engine import WarmEngine

pytestmark = pytest.mark.attack

DEADLINE_MS = 20_000
TURNED_AWAY = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
NESTED = b"\x83\xa1t\xabacknowledge\xa1x" + b"\x91" * 100_000
NO_UTF8 = b"\x82\xa1t\xabacknowledge\xacsequence_ids\x91\xa2\xff\xfe"
Keys = dict[str, str]


def command_line(*arguments: str, timeout_s: float = 30.0) -> subprocess.CompletedProcess[str]:
    return fairgate(*arguments, timeout=timeout_s)


@dataclass
class Link:
    """An engine on tcp, its data directory, and a gateway on another address."""

    address: str
    data_dir: Path
    engine: WarmEngine
    gateway: Server

    @property
    def keys(self) -> Keys:
        """The gateways' file."""
        found: Keys = json.loads((self.data_dir / "engine-gateway.keys").read_text())
        return found


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Link]:
    data_dir, other = tmp_path_factory.mktemp("engine"), tmp_path_factory.mktemp("gateway")
    made = command_line("engine", "keys", "--data-dir", str(data_dir))
    assert made.returncode == 0, made.stderr
    shutil.copy(data_dir / "engine-gateway.keys", other)
    address = f"tcp://127.0.0.2:{free_port()}"
    engine = WarmEngine(engine_options(chat_model, data_dir, address=address), data_dir / "stderr")
    try:
        with server_process(other, chat_model, "--engine-address", address) as gateway:
            yield Link(address, data_dir, engine, gateway)
    finally:
        engine.kill()
        engine.wait()


class Peer:
    """A ZeroMQ peer of an engine, with or without keys."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: Keys | None = None
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, DEADLINE_MS)
        if keys is not None:
            self.socket.curve_publickey = keys["public"].encode()
            self.socket.curve_secretkey = keys["secret"].encode()
            self.socket.curve_serverkey = keys["engine_public"].encode()
        self.monitor = self.socket.get_monitor_socket(TURNED_AWAY)
        self.socket.connect(address)

    def say(self, *commands: messages.Tagged) -> None:
        for command in commands:
            self.socket.send(messages.encode(command))

    def hear(self, kind: type[messages.Tagged]) -> Any:
        """The next event of this kind."""
        while True:
            event = messages.decode_event(self.socket.recv())
            if isinstance(event, kind):
                return event

    def is_turned_away(self) -> bool:
        """Whether the connection ended, rather than anything coming."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self.monitor, zmq.POLLIN)
        found = dict(poller.poll(DEADLINE_MS))
        assert found, "neither a word nor the end of the connection"
        if self.socket in found:
            return False
        return bool(parse_monitor_message(self.monitor.recv_multipart())["event"] & TURNED_AWAY)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()


@contextmanager
def peer(address: str, keys: Keys | None = None) -> Iterator[Peer]:
    with zmq.Context() as context:
        made = Peer(context, address, keys)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def engine_address(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[str]:
    """An engine on a socket file, to whose connections any gateway's process of this user may come."""
    data_dir = tmp_path_factory.mktemp("shared-engine")
    options = engine_options(chat_model, data_dir)
    engine = WarmEngine(options, data_dir / "stderr")
    yield options.address
    assert engine.poll() is None, (data_dir / "stderr").read_text()[-2000:]
    engine.kill()
    engine.wait()


# ------------------------------------------------------------------------ strangers


def test_a_stranger_on_tcp_gets_no_word_from_an_engine_that_serves_its_gateway(link: Link) -> None:
    key = link.gateway.tenant("tcp")
    with link.gateway.http(key) as client:
        answer = client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    public, secret = (each.decode() for each in zmq.curve_keypair())
    for keys in (None, link.keys | {"public": public, "secret": secret}):
        with peer(link.address, keys) as stranger:
            stranger.say(messages.Hello("gw_stranger"))
            assert stranger.is_turned_away()
    with peer(link.address, link.keys) as known:
        known.say(messages.Hello("gw_known"))
        assert not known.is_turned_away()
        assert known.hear(messages.Ready).engine_id == "engine-0"


def test_an_engine_takes_no_tcp_address_without_keys_and_says_how_to_get_them(
    tmp_path: Path, chat_model: Path
) -> None:
    flags = ["--data-dir", str(tmp_path / "data"), "--model", str(chat_model)]
    refused = command_line("engine", "--address", f"tcp://127.0.0.1:{free_port()}", *flags)
    assert refused.returncode == 1
    assert "engine-server.keys" in refused.stderr
    assert "fairgate engine keys" in refused.stderr


# --------------------------------------------------------------- what is another's


def test_a_gateway_reaches_no_sequence_and_no_outcome_of_another(engine_address: str) -> None:
    mine = sequence(12, lease_tokens=3, sequence_id="mine")
    with peer(engine_address) as owner, peer(engine_address) as foreign:
        owner.say(messages.Hello("gw_owner"), mine)
        foreign.say(messages.Hello("gw_foreign"))
        foreign.hear(messages.Ready)
        tokens = 0
        while tokens < 3:
            tokens += sum(len(each.token_ids) for each in owner.hear(messages.Step).deltas)
        foreign.say(messages.TopUp("mine", 12), messages.Cancel("mine"), messages.Export("mine"))
        assert foreign.hear(messages.Exported).state is None
        foreign.say(messages.Collect())
        assert foreign.hear(messages.Inventory).running == []
        owner.say(messages.Collect())
        (running,) = owner.hear(messages.Inventory).running
        assert (running.sequence_id, running.emitted_tokens) == ("mine", 3)

        owner.say(messages.TopUp("mine", 12))
        outcome = None
        while outcome is None:
            outcome = next((each.outcome for each in owner.hear(messages.Step).deltas), None)
        assert (outcome.finish, outcome.emitted_tokens) == ("length", 12)
        foreign.say(messages.Acknowledge(["mine"]), messages.Collect())
        assert foreign.hear(messages.Inventory).outcomes == []
        owner.say(messages.Collect())
        assert [each.sequence_id for each in owner.hear(messages.Inventory).outcomes] == ["mine"]
        owner.say(messages.Acknowledge(["mine"]), messages.Collect())
        assert owner.hear(messages.Inventory).outcomes == []


@pytest.mark.parametrize("payload", [NESTED, NO_UTF8], ids=["nested", "not UTF-8"])
def test_bytes_that_are_no_message_do_not_end_the_engine(engine_address: str, payload: bytes) -> None:
    with peer(engine_address) as hostile:
        hostile.say(messages.Hello("gw_hostile"))
        hostile.hear(messages.Ready)
        hostile.socket.send(payload)
        hostile.say(messages.Collect())
        assert hostile.hear(messages.Inventory).engine_id == "engine-0"


# ---------------------------------------------------------------- what is nowhere


def forget_everything(address: str, model_id: str, ending: threading.Event) -> None:
    """Greets gateways, shows its load with every heartbeat, and says that nothing runs and nothing ended;
    sequences it swallows."""
    model = messages.ModelInfo(model_id, "none", 1, 8192, 256, [], "float32", "cpu", "none")
    ready = messages.Ready("engine-0", model, "vtc", 16, 1024, 8, 512, pid=1)
    step_time = messages.StepTime(0.01, 0.0, 0.0, 0.0, 100, 0.1)
    idle = messages.Snapshot("engine-0", 1, 1.0, [], [], 1024, 0, 0, 1024, step_time)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        greeted: set[bytes] = set()
        while not ending.is_set():
            if not socket.poll(50):
                continue
            identity, payload = socket.recv_multipart()
            command = messages.decode_command(payload)
            if isinstance(command, messages.Hello):
                socket.send_multipart([identity, messages.encode(idle if identity in greeted else ready)])
                greeted.add(identity)
            elif isinstance(command, messages.SetPolicy):
                socket.send_multipart([identity, messages.encode(messages.PolicySet(command.name))])
            elif isinstance(command, messages.Collect):
                nothing = messages.Inventory("engine-0", [], [])
                socket.send_multipart([identity, messages.encode(nothing)])


def test_a_request_that_its_engine_does_not_know_ends_and_is_charged_nothing(
    tmp_path: Path, chat_model: Path
) -> None:
    address, ending = f"ipc://{tmp_path}/engine.sock", threading.Event()
    arguments = (address, chat_model.resolve().name, ending)
    engine = threading.Thread(target=forget_everything, args=arguments, daemon=True)
    engine.start()
    try:
        with server_process(tmp_path / "data", chat_model, "--engine-address", address) as server:
            key = server.tenant("forgotten")
            server.limit("forgotten", "output_tokens", 1000, window="lifetime")
            with server.http(key, timeout_s=20) as client:
                body = {"model": MODEL, "prompt": "x", "max_tokens": 9}
                answer = client.post("/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_lost")
            state = server.limit_state("forgotten", "output_tokens")
            assert (state["used"], state["held"]) == (0, 0)
            assert server.verify()["ok"]
    finally:
        ending.set()
        engine.join()


# ------------------------------------------------------------------------- one id


def readiness(server: Server) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/readyz")
    return answer.status_code, answer.json()["checks"]["engine"]


def test_a_second_process_under_its_id_shows_on_readyz_and_the_gateway_comes_back_after_it(
    link: Link,
) -> None:
    gateway_id = (link.gateway.data_dir / "gateway-id").read_text().strip()
    until(lambda: readiness(link.gateway) == (200, "ok"))
    with peer(link.address, link.keys) as twin:
        twin.say(messages.Hello(gateway_id))
        twin.hear(messages.Ready)
        until(lambda: readiness(link.gateway)[1].startswith("superseded: "))
        assert readiness(link.gateway)[0] == 503
        twin.say(messages.Hello(gateway_id), messages.Collect())
        assert twin.hear(messages.Inventory), "the loser does not fight back"
    until(lambda: readiness(link.gateway) == (200, "ok"))
