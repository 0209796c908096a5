"""The wheel, installed into a fresh environment, serves the console with all of its files, unchanged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.server_process import ROOT

pytestmark = pytest.mark.long
CONSOLE = ROOT / "gateway" / "console"
ASSET = re.compile(r'(?:src|href)="(/console/assets/[^"]+)"')
AWAY = json.dumps([{"name": "away", "url": "http://127.0.0.1:9/v1", "model": "away"}])


def run(*command: str | Path, directory: Path) -> str:
    """What a command says."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with what it depends on: nothing is fetched. Its directory."""
    directory = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", "dist", str(ROOT)]
    run(*build, directory=directory)
    [wheel] = (directory / "dist").iterdir()
    venv.create(directory / "env", with_pip=False, symlinks=True)
    python = directory / "env" / "bin" / "python"
    run(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, directory=directory)
    [packages] = (directory / "env" / "lib").glob("python*/site-packages")
    # A line of a path file adds a folder; path files in that folder, as this checkout's own, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    found = run(
        python, "-I", "-c", "import gateway, ops; print(ops.__path__[0])", directory=directory
    ).strip()
    assert found == str(packages / "ops")
    return directory


@pytest.fixture(scope="module")
def url(installed: Path) -> Iterator[str]:
    """A server in an empty directory, from the wheel alone."""
    empty = installed / "empty"
    empty.mkdir()
    environment = {"PATH": os.defpath, "HOME": str(empty), "FAIRGATE_UPSTREAMS": AWAY}
    fairgate = installed / "env" / "bin" / "fairgate"
    command = [fairgate, "serve", "--json", "--port", "0", "--engine-serve", "no"]
    with (
        (installed / "log").open("w") as log,
        subprocess.Popen(
            command, cwd=empty, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (installed / "log").read_text()
            yield json.loads(line)["url"]
        finally:
            process.terminate()
            assert process.wait(60) == 0, (installed / "log").read_text()


def test_it_serves_the_log_in_and_every_file_that_the_page_names(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        page = client.get("/console/log-in")
        assert page.status_code == 200, page.text
        assert "Log in" in page.text
        named = set(ASSET.findall(page.text))
        assert len(named) >= 8
        served = {path: client.get(path) for path in named}
        assert {path: answer.status_code for path, answer in served.items()} == dict.fromkeys(named, 200)
        digests = {hashlib.sha256(answer.content).hexdigest() for answer in served.values()}
    packages = json.loads((CONSOLE / "assets" / "vendor" / "vendored.json").read_text())
    listed = {each["file"]: each["sha256"] for package in packages for each in package["files"]}
    scripts_and_styles = {name: digest for name, digest in listed.items() if not name.endswith("LICENSE")}
    assert {name: digest for name, digest in scripts_and_styles.items() if digest not in digests} == {}


def test_it_serves_the_runbooks_that_came_with_it(url: str) -> None:
    answer = httpx.get(f"{url}/runbooks/saturation", timeout=60)
    assert answer.text == (ROOT / "docs" / "runbooks" / "saturation.md").read_text()


def test_it_has_every_file_of_the_console_unchanged(installed: Path) -> None:
    [packages] = (installed / "env" / "lib").glob("python*/site-packages")
    ours = {path.relative_to(CONSOLE): path for path in CONSOLE.rglob("*") if path.suffix not in (".pyc", "")}
    assert len(ours) > 100
    there = packages / "gateway" / "console"
    assert {str(name) for name in ours if not (there / name).is_file()} == set()
    changed = {name for name, path in ours.items() if (there / name).read_bytes() != path.read_bytes()}
    assert changed == set()
