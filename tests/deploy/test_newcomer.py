"""The two commands of a newcomer: images as buildah builds and runs them without a registry, and packages in
a new environment; each serves as a user of its own from a tree that it cannot write.

Debian's mirror and pip's index are all that is asked for; torch is of the version that the suite has."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

from ops.locked import LOCKS, ROOT, installed, subset

IMAGES = ROOT / "ops/deploy/images"
BASE_SUITE, BASE_PYTHON = "bookworm", "3.11"
TORCH = version("torch").partition("+")[0]
USER = 10001
IS_ROOT = os.geteuid() == 0
NEEDED = ("buildah", "debootstrap", "unshare", "nsenter", "ip")
ABSENT = [tool for tool in NEEDED if shutil.which(tool) is None] + ([] if IS_ROOT else ["root's rights"])
needs_buildah = pytest.mark.skipif(bool(ABSENT), reason=f"no image is built here without {', '.join(ABSENT)}")
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("FAIRGATE_", "PYTHON"))}


def run(*command: object, env: Mapping[str, str] = CLEAN, cwd: Path = ROOT) -> str:
    done = subprocess.run([str(part) for part in command], env=env, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that every user may read."""
    with tempfile.TemporaryDirectory(prefix="fairgate-newcomer-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def dist(place: Path) -> Path:
    """What `make wheel` makes."""
    directory = place / "dist"
    flags = ("-q", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *flags, "-w", directory, ".")
    lock = "".join((ROOT / file).read_text() for file in LOCKS)
    for root, image in re.findall(r"ops\.locked '(\S+)' > dist/(\w+)\.txt", (ROOT / "Makefile").read_text()):
        (directory / f"{image}.txt").write_text(subset(lock, installed(root)))
    return directory


@dataclass
class Started:
    """A server, as a newcomer's second command starts it."""

    command: subprocess.Popen[str]
    curl: str
    """The line that it printed."""

    def server(self) -> psutil.Process:
        command = psutil.Process(self.command.pid)
        processes = [command, *command.children(recursive=True)]
        return next(each for each in processes if each.cmdline()[-1:] == ["serve"])

    def ends(self, log: Path) -> None:
        """Asked to stop while it answers, it ends the answer, then itself."""
        asked = '"stream": true, "max_tokens": 300, "ignore_eos": true, "messages"'
        line = self.curl.replace("curl", "exec curl -sN", 1).replace('"messages"', asked)
        with subprocess.Popen(self.inside(line), stdout=subprocess.PIPE, text=True) as stream:
            assert stream.stdout is not None
            first = stream.stdout.readline()
            self.server().send_signal(signal.SIGTERM)
            rest = stream.stdout.read()
        assert first.startswith("data: {"), first + rest
        assert rest.endswith("data: [DONE]\n\n"), rest[-500:]
        assert '"finish_reason":"length"' in rest
        assert self.command.wait(60) == 0, log.read_text()

    def inside(self, line: str) -> list[str]:
        """A shell's line, run where the server's network is."""
        if not IS_ROOT:
            return ["sh", "-c", line]
        return ["nsenter", "--net", "--target", str(self.server().pid), "sh", "-c", line]


@contextmanager
def started(log: Path, *command: object, **options: Any) -> Iterator[Started]:
    words = [str(part) for part in command]
    with log.open("w") as errors:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True, **options
        )
    assert process.stdout is not None
    try:
        printed = ""
        for printed_line in process.stdout:
            printed += printed_line
            if "its key" in printed_line:
                break
        found = re.search(r"^ *try it +(curl .*)$", printed, re.M)
        assert found is not None, printed + log.read_text()
        yield Started(process, found[1])
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def images(place: Path, dist: Path) -> dict[str, str]:
    """The environment in which the scripts find both images and their base, which this builds."""
    storage = place / "storage.conf"
    storage.write_text(f'[storage]\ndriver="vfs"\ngraphroot="{place}/images"\nrunroot="{place}/run"\n')
    env = CLEAN | {
        "CONTAINERS_STORAGE_CONF": str(storage),
        "BUILDAH_ISOLATION": "chroot",
        "BUILDER": "buildah",
    }
    env["BUILD_FLAGS"] = f"--volume {place}/wheels:/wheels:ro"
    base = run("buildah", "from", "scratch", env=env).strip()
    packages = "--include=python3,python3-venv,ca-certificates"
    root = run("buildah", "mount", base, env=env).strip()
    run("debootstrap", "--variant=minbase", packages, BASE_SUITE, root, "http://deb.debian.org/debian")
    run("buildah", "config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", base, env=env)
    run("buildah", "commit", "--rm", base, "localhost/base", env=env)
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place / "wheels"]
    pip += ["--only-binary", ":all:", "--python-version", BASE_PYTHON]
    for wanted in (["-r", dist / "gateway.txt"], ["-r", dist / "engine.txt"], [f"torch=={TORCH}"]):
        run(*pip, *wanted)
    for target in ("gateway", "engine"):
        arguments = (
            "BASE=localhost/base",
            f"TORCH_VERSION={TORCH}",
            "PIP_ARGS=--no-index --find-links /wheels",
        )
        run(IMAGES / "build", target, f"fairgate-{target}", *arguments, env=env, cwd=place)
    return env


@needs_buildah
def test_the_engines_image_serves_its_model_without_a_network_or_a_root_it_could_write(
    images: dict[str, str], place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, alone = place / "engine.log", 'ip link set lo up && exec "$0"'
    env = images | {"DATA": str(place / "data")}
    with started(log, "unshare", "--net", "sh", "-c", alone, IMAGES / "run", env=env) as it:
        answer = json.loads(run(*it.inside(it.curl.replace("curl", "curl -sS", 1))))
        assert answer["choices"][0]["message"]["content"].strip()
        server = it.server()
        assert set(server.uids()) == set(server.gids()) == {USER}
        assert re.search(r"^NSpid:.*\t1$", Path(f"/proc/{server.pid}/status").read_text(), re.M)
        inside = ("nsenter", "--all", "--root", "--target", server.pid)
        for path in ("/opt/fairgate/new", "/etc/new", "/var/tmp/new"):
            with pytest.raises(AssertionError, match="Read-only file system"):
                run(*inside, "/usr/bin/touch", path)
        config = json.loads(run("buildah", "inspect", "--type", "image", "fairgate-engine", env=images))
        health = config["Docker"]["config"]["Healthcheck"]["Test"][1:]
        as_user = ("--setuid", USER, "--setgid", USER)
        data = "FAIRGATE_DATA_DIR=/data"
        run(*inside, *as_user, "/usr/bin/env", data, f"/opt/fairgate/bin/{health[0]}", *health[1:])
        [interface] = run("nsenter", "--net", "--target", server.pid, "ip", "-o", "link").splitlines()
        assert ": lo:" in interface
        it.ends(log)
    listed = json.loads(run("buildah", "images", "--json", env=images))
    sizes = [(name, each["size"]) for each in listed for name in each["names"] or () if "fairgate" in name]
    assert len(sizes) == 2
    with capsys.disabled():
        print("\nsizes:", *(f"{name} {size}" for name, size in sizes), sep="\n  ")


@needs_buildah
def test_the_gateways_image_has_no_torch(images: dict[str, str], place: Path) -> None:
    container = run("buildah", "from", "--pull-never", "fairgate-gateway", env=images).strip()
    listed = ("buildah", "run", container, "--", "/opt/fairgate/bin/pip", "list", "--format=json")
    packages = {each["name"].lower() for each in json.loads(run(*listed, env=images))}
    run("buildah", "rm", container, env=images)
    assert {"fairgate", "litestar", "dnspython"} <= packages
    assert not packages & {"torch", "numba", "transformers"}
    env = images | {"DATA": str(place / "gateway-data"), "IMAGE": "fairgate-gateway"}
    with pytest.raises(AssertionError, match=r"engine\.serve is no, and there is no other server: name one"):
        run(IMAGES / "run", env=env)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def interpreter(who: Mapping[str, Any]) -> str:
    """A Python that the user of the server may run: one below the home of root is not."""
    for python in (os.path.realpath(sys.executable), "/usr/bin/python3"):
        if os.path.exists(python):
            words = ["sh", "-c", '"$0" -c "import ensurepip, venv"', python]
            if subprocess.run(words, capture_output=True, cwd="/", **who).returncode == 0:
                return python
    pytest.skip("no Python here that another user may run has venv and ensurepip")


@pytest.mark.parametrize("form", ["package", "image"])
def test_what_pip_installs_serves_as_a_user_who_cannot_write_it(form: str, place: Path, dist: Path) -> None:
    """`image`: by the commands of the engine's image, hashes and all."""
    tree, home, log = place / form / "fairgate", place / form / "home", place / f"{form}.log"
    who: dict[str, Any] = {"user": USER, "group": USER, "extra_groups": []} if IS_ROOT else {}
    run(interpreter(who), "-m", "venv", tree)
    [wheel] = dist.glob("*.whl")
    if form == "package":
        (place / "torch.txt").write_text(f"torch=={TORCH}\n")
        run(tree / "bin/pip", "install", "-q", "-c", place / "torch.txt", f"{wheel}[engine]")
    else:
        stage = (IMAGES / "Dockerfile").read_text().partition("AS engine-packages")[2]
        commands = stage.partition("RUN ")[2].partition("\n\n")[0]
        commands = commands.replace("/opt/fairgate", str(tree)).replace("/tmp/dist", str(dist))
        run("sh", "-ec", commands, env=CLEAN | {"TORCH_VERSION": TORCH, "PIP_ARGS": "-q", "TORCH_INDEX": ""})
    run("chmod", "-R", "a-w,a+rX", tree)
    home.mkdir()
    if IS_ROOT:
        shutil.chown(home, USER, USER)
    env = {"HOME": str(home), "PATH": f"{tree}/bin:/usr/bin:/bin", "FAIRGATE_PORT": str(free_port())}
    with started(log, "fairgate", "serve", env=env, cwd=home, **who) as it:
        assert subprocess.run(["touch", tree / "new"], capture_output=True, **who).returncode != 0
        answer = json.loads(run(*it.inside(it.curl.replace("curl", "curl -sS", 1))))
        assert answer["choices"][0]["message"]["content"].strip()
        it.ends(log)
