"""The programs in the documentation run, as they stand there, against one live server.

Blocks whose fence says `bash run` or `python run`: those of a page one after the other, in its order. The
variables that pages speak of are set: `URL`, `KEY`, and ids of things that are there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.support import warm_command
from tests.support.documents import PAGES, Block, blocks
from tests.support.server_process import ROOT, Server, server_process

MODEL = "fairgate-demo"
"""Pages speak of the model that is shipped; here the tiny one goes by its name."""
AWAY = "http://127.0.0.1:9"
"""A collector that does not answer: pages name the metrics of traces, too."""
RUN_S = 120
RUNNERS = {"bash": ["bash", "-euxo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
RUNNING = [page for page in PAGES if any(block.is_run for block in blocks(page))]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[Server]:
    arguments = ["--model-name", MODEL, "--prices", f"{MODEL}=150/600/75", "--engine-max-sequences", "16"]
    arguments += ["--telemetry-otlp", AWAY]
    with server_process(tmp_path_factory.mktemp("live"), chat_model, *arguments) as running:
        yield running


@pytest.fixture(scope="module")
def environment(live: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the programs find: the command `fairgate`, the server, and a tenant that has used it."""
    tenant = {"name": "acme", "tier": "interactive", "tiers": ["interactive", "standard", "batch"]}
    live.admin("POST", "/tenants", tenant)
    live.admin("PATCH", "/tenants/acme", {"labels": {"team": ["search"]}})
    key = live.admin("POST", "/keys", {"tenant": "acme"})
    with live.http(key["key"]) as client:
        done = client.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 4})
    commands = tmp_path_factory.mktemp("bin")
    warm = warm_command.install(commands)
    own = {name: value for name, value in os.environ.items() if not name.startswith("FAIRGATE_")}
    return (
        own
        | warm
        | {
            "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "FAIRGATE_DATA_DIR": str(live.data_dir),
            "URL": live.url,
            "KEY": key["key"],
            "KEY_ID": key["id"],
            "LIMIT_ID": live.limit("acme", "total_tokens", 10_000_000, window="day"),
            "BUCKET_ID": live.limit("acme", "output_tokens", 1_000_000, rate_per_s=100_000),
            "REQUEST_ID": done.headers["x-request-id"],
        }
    )


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.name)
def test_what_a_page_shows_runs(page: Path, environment: dict[str, str], tmp_path: Path) -> None:
    marked = [block for block in blocks(page) if block.is_run]
    for language, group in groupby(marked, key=lambda block: block.language):
        run(language, list(group), environment, tmp_path)


def run(language: str, group: list[Block], environment: dict[str, str], where: Path) -> None:
    """Blocks of one language that follow one another are one program."""
    done = subprocess.run(
        [*RUNNERS[language], "".join(block.code for block in group)],
        capture_output=True, text=True, timeout=RUN_S, cwd=where, env=environment,
    )  # fmt: skip
    where_it_stands = ", ".join(f"{block.page}:{block.line}" for block in group)
    assert done.returncode == 0, f"{where_it_stands}\n{done.stdout}{done.stderr}"


def test_each_metric_that_a_page_names_is_there(live: Server, environment: dict[str, str]) -> None:
    with live.http() as client:
        metrics = client.get("/metrics").text
    named = {name for page in PAGES for name in re.findall(r"`(fairgate_[a-z_]+)", page.read_text())}
    assert len(named) > 10
    missing = {name for name in named if f"# TYPE {name.removesuffix('_total')}" not in metrics}
    assert missing == {"fairgate_redis_seconds"}, "the one that is there only with Redis"
