"""A real Fairgate server for tests, to be started and killed.

`fairgate serve` in a process of its own on a free port, with its own data directory, in front of a tiny
model with random weights and a chat template. Keys and limits are made through its admin API.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from migrations import runner
from ops.serving.composition import engine_options
from ops.serving.members import run_elsewhere
from ops.serving.supervised import divided
from ops.settings.settings import SETTINGS, load
from tests.support.tiny_model import save_tiny_model
from tests.support.warm_command import WarmCommand
from tests.support.warm_engine import WarmEngine, engine_to_adopt

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STOP_S = 60.0
MODEL = "tiny"
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}<assistant>"
)
PRICE = "tiny=100/300/50"
"""Nano-dollars a token: input, output, cached input."""
TLS = ssl.create_default_context()
"""Of all clients, though none speaks TLS: a context of its own takes each as long as a request."""


def save_chat_model(model_dir: Path) -> Path:
    """The tiny model, with a chat template."""
    model_dir.mkdir(parents=True, exist_ok=True)
    save_tiny_model(model_dir)
    (model_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return model_dir


@cache
def _database() -> bytes:
    """The file that a server's first start makes, which takes a quarter of that start."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "fairgate.db"
        runner.upgrade(f"sqlite:///{path}")
        return path.read_bytes()


@dataclass
class Server:
    """One server process and what is needed to talk to it."""

    data_dir: Path
    model_dir: Path
    arguments: list[str] = field(default_factory=list)
    under: list[str] = field(default_factory=list)
    """The command that runs it; none: it is run directly."""
    url: str = ""
    admin_url: str = ""
    """Where its admin API answers."""
    owner_key: str = ""
    announced: str = ""
    """What it said on stdout when it was up."""
    process: subprocess.Popen[bytes] | WarmCommand | None = None
    open_files: int | None = None
    """Its limit of open files; None: this process's own."""
    adopted: list[WarmEngine] = field(default_factory=list)
    """What was there for the server to adopt when it started last."""

    def start(self) -> None:
        """Starts it, or starts it again on the same data directory, and waits until it is up."""
        self.data_dir.mkdir(parents=True, exist_ok=True)
        database = self.data_dir / "fairgate.db"
        if "--database-url" not in self.arguments and not database.exists():
            database.touch(mode=0o600)
            database.write_bytes(_database())
        flags = ["--data-dir", str(self.data_dir), "--model", str(self.model_dir), "--model-name", MODEL]
        flags += ["--prices", PRICE, "--engine-threads", "1", *self.arguments]
        arguments = ["serve", "--json", "--port", "0", *flags]
        self._start_engine(flags)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
        environment["PYTHONPATH"] = str(ROOT)
        reader, writer = os.pipe()
        with (self.data_dir / "stderr").open("a") as log, open(writer, "w") as out:
            if self.under:
                self.process = subprocess.Popen(
                    [*self.under, sys.executable, "-m", "ops.cli.main", *arguments],
                    stdout=out, stderr=log, stdin=subprocess.DEVNULL, env=environment, process_group=0,
                )  # fmt: skip
            else:
                self.process = WarmCommand(
                    arguments, stdout=writer, stderr=log.fileno(), env=environment, own_group=True,
                    open_files=self.open_files,
                )  # fmt: skip
        with open(reader) as stdout:
            line = stdout.readline()  # all that it ever says there
        assert line, f"the server did not start:\n{self.log()}"
        self.announced = line
        started = json.loads(line)
        self.url = started["url"]
        self.admin_url = started["admin_url"] or self.url
        if started["owner_key_file"]:
            self.owner_key = Path(started["owner_key_file"]).read_text().strip()

    def log(self) -> str:
        """What it said on stderr."""
        return (self.data_dir / "stderr").read_text(errors="replace")

    def kill(self) -> None:
        """`kill -9` of the gateway; its engine lives on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def engine(self, number: int = 0) -> psutil.Process:
        """The engine's process."""
        return psutil.Process(self.status()["engines"][number]["pid"])

    def _start_engine(self, flags: list[str]) -> None:
        """The engine that a server with these flags starts, where it starts one, is there before it."""
        named = {row.flag: row.name for row in SETTINGS}
        file, chosen = None, {}
        for flag, value in zip(flags[::2], flags[1::2], strict=True):
            if flag == "--config":
                file = Path(value)
            elif flag == "--policy-option":
                name, _, value = value.partition("=")
                chosen[f"policy.{name}"] = value
            else:
                chosen[named[flag]] = value
        settings = load(chosen, config_file=file)
        if settings.engine.serve and not run_elsewhere(settings):
            found = [engine_to_adopt(options) for options in divided(engine_options(settings))]
            self.adopted = [engine for engine in found if engine is not None]

    def stop(self) -> None:
        """Ends it in order, and checks that it went well."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(STOP_S) == 0, self.log()
        finally:
            self.process.kill()
            self.process.wait()

    def http(self, key: str | None = None, timeout_s: float = 60.0) -> httpx.Client:
        """A plain HTTP client with a key (None: the owner's)."""
        headers = {"authorization": f"Bearer {key or self.owner_key}"}
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, verify=TLS, trust_env=False
        )

    def admin(self, method: str, path: str, body: object = None) -> Any:
        """One call of the admin API, which must succeed."""
        with self.http() as client:
            response = client.request(method, f"{self.admin_url}/admin/v1{path}", json=body)
        assert response.is_success, f"{method} {path}: {response.status_code} {response.text}"
        return response.json()

    def status(self) -> Any:
        """The status page."""
        return self.admin("GET", "/status")

    def tenant(self, name: str, **fields: Any) -> str:
        """A tenant with a key; returns the key."""
        self.admin("POST", "/tenants", {"name": name} | fields)
        return self.key(name)

    def key(self, tenant: str, **fields: Any) -> str:
        """One more key of a tenant."""
        created: str = self.admin("POST", "/keys", {"tenant": tenant} | fields)["key"]
        return created

    def limit(self, tenant: str, meter: str, amount: int, **fields: Any) -> str:
        """Sets a limit; returns its id."""
        body = {"tenant": tenant, "meter": meter, "amount": amount} | fields
        created: str = self.admin("POST", "/limits", body)["id"]
        return created

    def limit_state(self, tenant: str, meter: str) -> dict[str, Any]:
        """Counters of a tenant's limit, as the status page shows them."""
        for shown in self.status()["tenants"]:
            if shown["name"] == tenant:
                for limit in shown["limits"]:
                    if limit["meter"] == meter:
                        found: dict[str, Any] = limit
                        return found
        raise AssertionError(f"tenant {tenant} has no limit on {meter}")

    def verify(self) -> Any:
        """The ledger's own audit against the counters."""
        return self.admin("POST", "/ledger/verify")

    def is_idle(self) -> bool:
        """Nothing queued, running, settling, or left in the engine."""
        status = self.status()
        engines = status["engines"]
        return bool(
            status["running"] == 0
            and not any(status["queued"].values())
            and status["settlements_pending"] == 0
            and all(
                each.get("running") == 0 and each.get("waiting") == 0 and each["kv_blocks"]["referenced"] == 0
                for each in engines
            )
        )


AnyServer = TypeVar("AnyServer", bound=Server)


@contextmanager
def server_process(
    data_dir: Path, model_dir: Path, *arguments: str, open_files: int | None = None
) -> Iterator[Server]:
    """A server that is up, and ended at the end, whatever happened to it."""
    with running(Server(data_dir, model_dir, list(arguments), open_files=open_files)) as server:
        yield server


@contextmanager
def running(server: AnyServer) -> Iterator[AnyServer]:
    """The same for a server that is not started yet."""
    try:
        server.start()
        yield server
        server.stop()
    finally:
        _kill_all(server)


def _kill_all(server: Server) -> None:
    """Only what this server started: its process, and the engine of its data directory."""
    if server.process is not None and server.process.poll() is None:
        server.process.kill()
        server.process.wait()
    for engine in server.adopted:
        engine.kill()
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "engine.process.server" in command and str(server.data_dir) in command:
            process.kill()


def until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    """Waits for something that another process brings about (no event of ours tells), the longer it takes the
    less often it looks."""
    never = threading.Event()
    begun_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - begun_s
        assert waited_s < deadline_s, "it did not happen in time"
        never.wait(min(max(0.02, waited_s / 10), 0.1))
