"""The compose file: valid, closed, with names that Fairgate has; our services of it as processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ops.sandbox.free_port import free_port
from ops.sandbox.services import redis_service, start_on_a_free_port
from ops.settings.settings import Settings, load
from tests.support import services
from tests.support.prometheus import promtool
from tests.support.server_process import ROOT, until

COMPOSE = ROOT / "ops/deploy/compose"
OURS = {"fairgate-gateway", "fairgate-engine"}
ONCE = {"migrate", "ready"}
"""Services that end when their work is done."""
FAIRGATE = [sys.executable, "-P", "-m", "ops.cli.main"]
WITHOUT_TORCH = "import sys\nsys.modules.update(dict.fromkeys(['torch', 'transformers', 'safetensors']))\n"
"""As the gateway's image: what imports one of them fails, and it is not found either."""


def read(environment: dict[str, str]) -> dict[str, Any]:
    """The file as compose reads it with these variables."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else environment.get(match[1], match[2] if match[2] else "")

    text = re.sub(r"\$\$|\$\{(\w+)(?::[-?]([^}]*))?\}", value, (COMPOSE / "compose.yaml").read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    return found


FILE = read({"SECRETS_GROUP": "10001"})
SERVICES: dict[str, dict[str, Any]] = FILE["services"]


def make_secrets(directory: Path) -> None:
    """In a copy of the folder, with this checkout's command."""
    done = subprocess.run(
        ["make", "secrets", f"FAIRGATE=env PYTHONPATH={ROOT} {' '.join(FAIRGATE)}"],
        cwd=directory, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with its secrets."""
    directory = tmp_path_factory.mktemp("compose") / "compose"
    shutil.copytree(COMPOSE, directory, ignore=shutil.ignore_patterns("secrets", ".env"))
    make_secrets(directory)
    return directory


@pytest.mark.skipif(
    shutil.which("check-jsonschema") is None, reason="no check-jsonschema here; `make check-deploy` brings it"
)
def test_it_is_what_the_compose_specification_allows() -> None:
    command = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE / "compose.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_gateways_and_grafana_are_published_and_each_service_is_contained() -> None:
    assert FILE["networks"]["inside"] == {"internal": True}
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {
        "gateway-1": ["127.0.0.1:8000:8000"],
        "gateway-2": ["127.0.0.1:8001:8000"],
        "grafana": ["127.0.0.1:3000:3000"],
    }
    for name, service in SERVICES.items():
        outside = ["outside"] if name in published else []
        assert service["networks"] == ["inside", *outside], name
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"]), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        assert service["logging"]["options"]["max-size"], name
        assert not service.keys() & {"privileged", "cap_add", "devices", "pid", "ipc", "network_mode"}, name
        assert service["image"] in OURS or re.search(r":v?\d+\.\d+\.?\d*", service["image"]), name
        checked = "test" in service.get("healthcheck", {})
        assert checked or name in ONCE | {"collector"}, name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (COMPOSE / source).exists() if source.startswith(".") else source in FILE["volumes"]
        assert set(service.get("depends_on", ())) <= SERVICES.keys()


def test_settings_of_our_services_are_settings_of_fairgate(copy: Path) -> None:
    for name, service in SERVICES.items():
        if service["image"] in OURS:
            settings = settings_of(service, copy)
            assert not settings.database_url or settings.database_url.startswith("postgresql://fairgate:"), (
                name
            )
            if "stop_grace_period" in service and "ports" in service:
                grace_s = int(service["stop_grace_period"].removesuffix("s"))
                assert grace_s > settings.gateway.shutdown_grace_s + 10
    dockerfile = (ROOT / "ops/deploy/images/Dockerfile").read_text()
    for service in SERVICES.values():
        if "build" in service:
            target = service["build"]["target"]
            assert service["image"] == f"fairgate-{target}"
            assert re.search(rf"^FROM running AS {target}$", dockerfile, re.M)
            assert (COMPOSE / service["build"]["context"] / service["build"]["dockerfile"]).resolve().exists()


def settings_of(service: dict[str, Any], copy: Path) -> Settings:
    given = service.get("environment", {})
    said = {name: value.replace("/run/secrets", f"{copy}/secrets") for name, value in given.items()}
    mounted = {f"{copy}/secrets/{secret}" for secret in service.get("secrets", ())}
    assert {value for value in said.values() if value.startswith(f"{copy}/secrets/")} <= mounted
    return load({}, said)


def test_what_a_service_calls_another_by_is_its_name_and_a_port_that_it_has(copy: Path) -> None:
    collector = yaml.safe_load((COMPOSE / "collector.yaml").read_text())
    traces = collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    [reader] = collector["service"]["telemetry"]["metrics"]["readers"]
    exposed = re.search(r"^EXPOSE (\d+)$", (ROOT / "ops/deploy/images/Dockerfile").read_text(), re.M)
    assert exposed is not None
    ports = {
        "collector": {traces.rpartition(":")[2], str(reader["pull"]["exporter"]["prometheus"]["port"])},
        "engine": {SERVICES["engine"]["command"][-1].rpartition(":")[2]},
        "gateway-1": {exposed[1]},
        "gateway-2": {exposed[1]},
        "prometheus": {"9090"},
        "redis": {"6379"},
    }
    texts = [yaml.safe_dump(FILE), (copy / "secrets/redis-url").read_text()]
    texts += [(COMPOSE / name).read_text() for name in ("prometheus.yml", "grafana/source.yml")]
    called = {pair for text in texts for pair in re.findall(r"(?:[/@\"'])([a-z][a-z0-9-]*):(\d{4,5})", text)}
    assert {name for name, _ in called} == ports.keys()
    assert all(port in ports[name] for name, port in called), called


def test_every_secret_is_made_once_for_its_group_alone(copy: Path) -> None:
    named = {secret for service in SERVICES.values() for secret in service.get("secrets", ())}
    made = {path.name: path for path in (copy / "secrets").iterdir()}
    assert made.keys() == FILE["secrets"].keys() == named
    assert all(FILE["secrets"][name] == {"file": f"./secrets/{name}"} for name in named)
    assert stat.S_IMODE((copy / "secrets").stat().st_mode) == 0o700
    group = int((copy / ".env").read_text().removeprefix("SECRETS_GROUP="))
    for path in made.values():
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o640, group)
    texts = {name: path.read_text() for name, path in made.items()}
    random = [texts[name].strip() for name in ("pepper", "postgres-password", "grafana-password")]
    random.append(texts["redis.conf"].removeprefix("requirepass ").strip())
    assert len(set(random)) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", secret) for secret in random)
    make_secrets(copy)
    assert {name: path.read_text() for name, path in made.items()} == texts


def test_prometheus_takes_its_configuration_and_our_rules(tmp_path: Path) -> None:
    for mount in SERVICES["prometheus"]["volumes"][:2]:
        source, target, _ = mount.split(":")
        assert target.startswith("/etc/prometheus/")
        shutil.copy(COMPOSE / source, tmp_path)
    said = promtool("check", "config", str(tmp_path / "prometheus.yml"), silent=False)
    assert "SUCCESS: 1 rule files found" in said, said
    assert "FAILED" not in said, said


@dataclass
class Run:
    """Our services as processes, with the commands, variables and secrets that the file names."""

    directory: Path
    places: dict[str, str]
    """What is elsewhere here."""

    def here(self, text: str) -> str:
        for there, place in self.places.items():
            text = text.replace(there, place)
        return text

    def command(self, words: list[str]) -> list[str]:
        programs = {"fairgate": FAIRGATE, "python3": [sys.executable]}
        return [*programs[words[0]], *(self.here(word) for word in words[1:])]

    def environment(self, name: str, port: int) -> dict[str, str]:
        """The image's variables, and the service's."""
        data = str(self.directory / name / "data")
        hidden = self.directory / "image" if SERVICES[name]["image"] == "fairgate-gateway" else ROOT
        image = {
            "PATH": os.defpath,
            "PYTHONPATH": f"{hidden}:{ROOT}",
            "FAIRGATE_DATA_DIR": data,
            "HOME": data,
        }
        image |= {"FAIRGATE_HOST": "127.0.0.1", "FAIRGATE_PORT": str(port), "FAIRGATE_ENGINE_SERVE": "no"}
        said = image | SERVICES[name].get("environment", {})
        return {variable: self.here(value) for variable, value in said.items()}

    @contextmanager
    def service(self, name: str, port: int = 0) -> Iterator[None]:
        """It runs and is healthy; one that ends when its work is done has ended."""
        said, environment = SERVICES[name], self.environment(name, port)
        data, log = self.directory / name / "data", self.directory / name / "log"
        data.mkdir(parents=True)
        command = self.command(["fairgate", *said["command"]])
        if "entrypoint" in said:
            program, flag, script = said["entrypoint"]
            script = (
                self.here(script)
                .replace("/data/", f"{data}/")
                .replace("exec fairgate", f"exec {shlex.join(FAIRGATE)}")
            )
            command = [program, flag, script, *said["command"]]
        with log.open("w") as out:
            process = subprocess.Popen(command, env=environment, cwd=data, stdout=out, stderr=out)
        try:
            if name in ONCE:
                assert process.wait(60) == 0, log.read_text()
                yield
                return
            probe = self.command(said["healthcheck"]["test"][1:])

            def is_healthy() -> bool:
                assert process.poll() is None, log.read_text()
                return (
                    subprocess.run(probe, env=environment, capture_output=True, check=False).returncode == 0
                )

            until(is_healthy, 120)
            yield
            process.terminate()
            assert process.wait(int(said["stop_grace_period"].removesuffix("s"))) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


@pytest.mark.long
def test_two_gateways_and_an_engine_over_tcp_answer_the_line_that_is_printed(
    copy: Path, tmp_path: Path, empty_postgres_url: str
) -> None:
    """PostgreSQL and Redis are this machine's: Redis with the file's own command and secret."""
    engine, *gateways = (free_port() for _ in range(3))
    secrets = tmp_path / "secrets"
    shutil.copytree(copy / "secrets", secrets)
    for path in secrets.iterdir():
        path.chmod(0o600)  # here the services run as the files' owner, not as a member of their group

    def redis_of_the_file(port: int) -> services.Service:
        made = redis_service(None, port)
        _, secret, *options = SERVICES["redis"]["command"]
        secret = secret.replace("/run/secrets", str(secrets))
        # What the file says comes last.
        made.command[1:] = [secret, *made.command[1:], *options]
        password = Path(secret).read_text().removeprefix("requirepass ").strip()
        made.url = made.url.replace("redis://", f"redis://:{password}@")
        return made

    redis = start_on_a_free_port(redis_of_the_file)
    (tmp_path / "image").mkdir()
    (tmp_path / "image/sitecustomize.py").write_text(WITHOUT_TORCH)
    for name, url in (("database-url", services.libpq_url(empty_postgres_url)), ("redis-url", redis.url)):
        host = re.sub(r".*@", "@", url)
        secret = secrets / name
        secret.write_text(re.sub(r"@(postgres/fairgate|redis:6379/0)$", host, secret.read_text().strip()))
    places = {
        "/run/secrets": str(secrets),
        "engine:5555": f"127.0.0.1:{engine}",
        "0.0.0.0:5555": f"127.0.0.1:{engine}",
        "('127.0.0.1', 5555)": f"('127.0.0.1', {engine})",
        "collector:4318": "127.0.0.1:9",
    }
    run = Run(tmp_path, places)
    with ExitStack() as up:
        up.callback(redis.stop)
        for name, port in (
            ("engine", 0),
            ("migrate", 0),
            ("gateway-1", gateways[0]),
            ("gateway-2", gateways[1]),
        ):
            up.enter_context(run.service(name, port))
        # `docker compose exec` of this run: it reads a service's own files.
        docker = tmp_path / "image/docker"
        docker.write_text(
            '#!/bin/sh\n[ "$1 $2 $3 $5" = "compose exec -T cat" ] && exec cat "$RUN/$4$6"\nexit 1\n'
        )
        docker.chmod(0o755)
        [said] = SERVICES["ready"]["command"]
        line = said[said.index("curl ") :].replace("127.0.0.1:8000", f"127.0.0.1:{gateways[0]}")
        shell = {"PATH": f"{tmp_path}/image:{os.defpath}", "RUN": str(tmp_path)}
        curl = subprocess.run(["sh", "-c", line], env=shell, capture_output=True, timeout=60, check=False)
        assert json.loads(curl.stdout)["usage"]["completion_tokens"] > 0, curl.stdout + curl.stderr
        key = (tmp_path / "gateway-1/data/owner-key").read_text().strip()
        assert not (tmp_path / "gateway-2/data/owner-key").exists()
        assert (tmp_path / "gateway-2/data/set-up-link").read_text().startswith("http://127.0.0.1:8000/")
        body = {"model": "fairgate-demo", "prompt": "3 4", "max_tokens": 4}
        answer = httpx.post(
            f"http://127.0.0.1:{gateways[1]}/v1/completions",
            json=body,
            headers={"authorization": f"Bearer {key}"},
        )
        assert answer.status_code == 200, answer.text
        for name in ("gateway-1", "gateway-2"):
            assert (tmp_path / name / "data/audit-key").read_text() == (secrets / "audit-key").read_text()
        for port in gateways:
            page = httpx.get(f"http://127.0.0.1:{port}/metrics").text
            assert 'fairgate_engine_up{replica="engine-0"} 1.0' in page
