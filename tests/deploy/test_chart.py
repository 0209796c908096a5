"""The Kubernetes chart: its documents are valid and name only what there is, and what they start answers."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops.settings.settings import load
from tests.support.dns_server import DnsServer
from tests.support.documents import ROOT, command_of, routes
from tests.support.services import free_port, start_postgres, start_redis

helm = pytest.importorskip("helm_python", reason="Helm's SDK is not here; `make check-deploy` brings it")
kubernetes = pytest.importorskip(
    "kubernetes_validate", reason="it is not here; `make check-deploy` brings it"
)

CHART = ROOT / "ops/deploy/chart"
OLDEST = "1.25"
"""Version of Kubernetes that Chart.yaml names."""
VALUES = {"defaults": {}} | {path.stem: yaml.safe_load(path.read_text()) for path in CHART.glob("ci/*.yaml")}
Document = dict[str, Any]

by_values = pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)


def rendered(values: Document) -> tuple[dict[str, Document], str]:
    """The documents by kind and name, and the notes."""
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="fairgate", namespace="ai")
    notes = texts.pop("fairgate/templates/NOTES.txt")
    found = [each for text in texts.values() for each in yaml.safe_load_all(text) if each]
    return {f"{each['kind']} {each['metadata']['name']}": each for each in found}, notes


def pods(documents: dict[str, Document]) -> dict[str, Document]:
    """The pods, by what makes them."""
    specs = {name: each.get("spec", {}) for name, each in documents.items()}
    return {
        name: spec["template"]["spec"] if "template" in spec else spec
        for name, spec in specs.items()
        if "containers" in spec or "template" in spec
    }


def containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


@by_values
def test_helm_and_kubernetes_find_no_fault(values: Document) -> None:
    assert len(VALUES) == 13
    said = helm.lint(CHART, values, strict=True)
    assert [each for each in said["messages"] if each["severity"] > 1] + said["errors"] == []
    for document in rendered(values)[0].values():
        if document["kind"] != "ServiceMonitor":  # it is no kind of Kubernetes's own
            for version in (OLDEST, kubernetes.latest_version()):
                kubernetes.validate(document, version, strict=True)


SECRETS = {"database-url": "postgresql://db/fairgate", "redis-url": "redis://cache", "pepper": "p" * 32}


def environment(container: Document, entries: dict[str, str]) -> dict[str, str]:
    """Its variables, those of secrets from the entries, or as what `SECRETS` has."""
    found = {}
    for row in container.get("env", ()):
        key = row.get("valueFrom", {}).get("secretKeyRef", {}).get("key")
        found[row["name"]] = (
            row.get("value", "a-pod") if key is None else entries.get(key, SECRETS["database-url"])
        )
    return found


@by_values
def test_pods_name_only_what_there_is_and_may_do_little(values: Document, tmp_path: Path) -> None:
    documents, notes = rendered(values)
    toml = tmp_path / "fairgate.toml"
    toml.write_text(documents["ConfigMap fairgate"]["data"]["fairgate.toml"])
    paths = {path for _, path in routes()}
    for pod in pods(documents).values():
        assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
        assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
        for each in containers(pod):
            settings = load(
                {},
                {
                    name: text
                    for name, text in environment(each, SECRETS).items()
                    if name.startswith("FAIRGATE_")
                },
                toml,
            )
            assert each["securityContext"]["readOnlyRootFilesystem"] is True
            if "command" not in each:
                command, rest = command_of(["fairgate", *each["args"]])
                command.make_context("fairgate", rest)
            probes = [
                each[name]["httpGet"] for name in each if name.endswith("Probe") and "httpGet" in each[name]
            ]
            assert {probe["path"] for probe in probes} <= paths
            if each["name"] == "gateway":
                assert {port["name"]: port["containerPort"] for port in each["ports"]}[
                    "http"
                ] == settings.port
                assert pod["terminationGracePeriodSeconds"] >= 5 + settings.gateway.shutdown_grace_s + 10
                stays = settings.engine.discover == "dns:_engine._tcp.fairgate-engine"
                assert stays == settings.engine.serve == ("StatefulSet fairgate-engine" in documents)
    for words in re.findall(r"-- (fairgate .*?)(?: \||$)", notes, re.M):
        command, rest = command_of(words.split())
        command.make_context("fairgate", rest)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"gatewys": {"replicas": 2}}, "gatewys"),
        ({"gateways": {"replicas": "2"}}, "gateways/replicas"),
        ({"gateways": {"workers": 65}}, "gateways/workers"),
        ({"gateways": {"drain": 20}}, "drain"),
        ({"engines": {"disk": {"size": "large"}}}, "engines/disk/size"),
        ({"engines": {"resources": {"limit": {}}}}, "limit"),
        ({"secrets": {"pepper": "a pepper in clear, 32 characters"}}, "secrets/pepper"),
        ({"secrets": {"pepper": {"value": "clear"}}}, "value"),
        ({"service": {"type": "Ingress"}}, "service/type"),
        ({"networkPolicy": {"clients": [{"cidr": "10.0.0.0/8"}]}}, "cidr"),
        ({"engines": {"replicas": 0}}, "[[upstreams]]"),
        ({"config": "pepper = 'a pepper in clear, 32 characters'"}, "config has pepper"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(wrong: Document, named: str) -> None:
    with pytest.raises(helm.HelmError) as refused:
        rendered(wrong)
    assert named in str(refused.value)


def test_the_charts_program_is_this_one() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with helm.Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == project["version"]


class Node:
    """Runs containers as processes: paths below a directory, and no cluster's addresses."""

    def __init__(self, home: Path, entries: dict[str, str], documents: dict[str, Document]) -> None:
        self.home, self.entries, self.documents = home, entries, documents
        (home / "bin").mkdir()
        (home / "bin/fairgate").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m ops.cli.main "$@"\n')
        (home / "bin/fairgate").chmod(0o755)

    async def start(self, pod: str, number: int, place: str, **changed: str) -> asyncio.subprocess.Process:
        spec = pods(self.documents)[pod]
        home, container = self.home / place, containers(spec)[number]
        for volume in spec["volumes"]:
            (home / volume["name"]).mkdir(parents=True, exist_ok=True)
            for item in volume.get("secret", {}).get("items", ()):
                file = home / volume["name"] / item["path"]
                file.touch(mode=0o600)
                file.write_text(self.entries[item["key"]])
            if "configMap" in volume:
                toml = self.documents["ConfigMap fairgate"]["data"]["fairgate.toml"]
                (home / volume["name"] / "fairgate.toml").write_text(toml)
        mounts = {mount["mountPath"]: home / mount["name"] for mount in container["volumeMounts"]}

        def here(text: str) -> str:
            text = changed.get(text, text).replace("$(POD_NAME)", "fairgate-engine-0")
            return re.sub("^" + "|^".join(mounts), lambda found: str(mounts[found[0]]), text)

        variables = {name: here(text) for name, text in environment(container, self.entries).items()}
        path = f"{self.home}/bin:{Path(sys.executable).parent}:{os.defpath}"
        words = (
            [*container.get("command", ["fairgate"]), *container["args"]]
            if "args" in container
            else container["command"]
        )
        with (home / "log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *map(here, words), stdout=log, stderr=log, cwd=home,
                env={"PATH": path, "HOME": str(home), "PYTHONPATH": str(ROOT)} | variables,
            )  # fmt: skip

    async def run(self, pod: str, number: int, place: str, **changed: str) -> str:
        process = await self.start(pod, number, place, **changed)
        assert await process.wait() == 0, (self.home / place / "log").read_text()
        return (self.home / place / "log").read_text()


async def test_what_the_chart_starts_answers(tmp_path: Path) -> None:
    """Secrets as docs/deploying.md makes them, the migration, two gateways, an engine; then `helm test`."""
    database, redis, dns = start_postgres(), start_redis(), DnsServer("_engine._tcp.fairgate-engine")
    node = Node(
        tmp_path, {"database-url": database.url, "redis-url": redis.url, "pepper": "p" * 32}, rendered({})[0]
    )
    for words in ("engine keys", "audit key make"):
        made = await asyncio.create_subprocess_exec(
            tmp_path / "bin/fairgate",
            *words.split(),
            "--data-dir",
            tmp_path / "made",
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert await made.wait() == 0
    node.entries |= {path.name: path.read_text() for path in (tmp_path / "made").glob("*-*")}
    dns.engines = {"fairgate-engine-0": free_port()}
    server = (await dns.start()).removesuffix(dns.service)
    address = {"tcp://0.0.0.0:5555": f"tcp://127.0.0.1:{dns.engines['fairgate-engine-0']}"}
    running = []
    try:
        await node.run("Job fairgate-migration", 0, "migration")
        ports = [str(free_port()), str(free_port())]
        for port in ports:
            await node.run("Deployment fairgate", 0, port)
            moved = {"8000": port, "0.0.0.0": "127.0.0.1", f"dns:{dns.service}": server + dns.service}
            running.append(await node.start("Deployment fairgate", 1, port, **moved))
        running.append(await node.start("StatefulSet fairgate-engine", 0, "engine", **address))
        for port in ports:
            said = await node.run(
                "Pod fairgate-test", 0, f"test-{port}", **{"http://fairgate:8000": f"http://127.0.0.1:{port}"}
            )
            assert "fairgate-demo at" in said
        assert "does not sign" not in "".join((tmp_path / port / "log").read_text() for port in ports)
    finally:
        for process in running:
            process.terminate()
        codes = [await process.wait() for process in running]
        dns.stop()
        database.stop()
        redis.stop()
    assert codes == [0, 0, 0]
