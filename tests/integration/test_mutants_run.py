"""`make mutants` reports caught and missed mutants in the order of its list, and ends cleanly.

On a tree of small files instead of ours.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.mutants import run
from tests.mutants.mutations import Mutation

CONFTEST = """
import hypothesis, pytest
hypothesis.settings.register_profile("mutants", database=None)

@pytest.fixture
def server():
    raise OSError("there is none")
"""
TESTS = """
import pathlib
from rule import LIMIT

def test_noticed():
    assert LIMIT == 3

def test_not_noticed():
    assert LIMIT > 0

def test_without_a_server(server):
    assert LIMIT == 3

def test_that_waits_for_another():
    with open("../waiting") as fifo:
        fifo.read()
    assert LIMIT == 3

def test_that_lets_it_go():
    with open("../waiting", "w"):
        assert LIMIT == 3
"""
FILES = {"rule.py": "LIMIT = 3\n", "conftest.py": CONFTEST, "test_rule.py": TESTS}
KERNEL = "kernels/gpu/rule.py"
"""No test loads it."""
PLUGIN = "tests/mutants/loaded.py"
FILES |= {"tests/__init__.py": "", "tests/mutants/__init__.py": ""}
FILES |= {KERNEL: FILES["rule.py"], PLUGIN: (run.ROOT / PLUGIN).read_text()}


def mutation(test: str, after: str = "LIMIT = 4", before: str = "LIMIT = 3") -> Mutation:
    return Mutation(test, "rule.py", before, after, f"test_rule.py::{test}")


@pytest.fixture
def workers(tmp_path: Path) -> list[run.Worker]:
    os.mkfifo(tmp_path / "waiting")
    made = []
    for number in range(2):
        tree = tmp_path / f"tree-{number}"
        tree.mkdir()
        for name, text in FILES.items():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text(text)
        made.append(run.Worker(tree, os.environ | {"PYTHONPATH": str(tree)}))
    return made


async def test_what_no_test_notices_survives_and_the_tree_is_restored(workers: list[run.Worker]) -> None:
    worker = workers[0]
    assert not await worker.survives(mutation("test_noticed"))
    assert await worker.survives(mutation("test_not_noticed"))
    assert (worker.tree / "rule.py").read_text() == FILES["rule.py"]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (mutation("test_without_a_server"), "pytest ended with 1"),
        (mutation("test_that_is_not_there"), "pytest ended with 4"),
        (mutation("test_noticed", after="LIMIT ="), "pytest ended with"),
        (mutation("test_noticed", before="LIMIT = 5"), "its place in rule.py is gone"),
        (replace(mutation("test_not_noticed"), path=KERNEL), "pytest ended with 7"),
    ],
)
async def test_what_could_not_be_tried_is_not_called_noticed(
    workers: list[run.Worker], broken: Mutation, why: str
) -> None:
    with pytest.raises(run.CouldNotRun, match=why):
        await workers[0].survives(broken)


async def test_several_at_once_are_told_in_the_order_of_the_list(
    workers: list[run.Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first ends only when the third runs beside it; the second has ended by then."""
    names = ["test_that_waits_for_another", "test_not_noticed", "test_that_lets_it_go"]
    assert await run.run([mutation(name) for name in names], workers) == 1
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[3]) for line in told] == list(
        zip(("caught", "SURVIVED", "caught"), names, strict=True)
    )


async def test_who_interrupts_it_finds_nothing_running(workers: list[run.Worker], tmp_path: Path) -> None:
    running = asyncio.create_task(run.run([mutation("test_that_waits_for_another")], workers))
    # Opening it waits until the test does.
    fifo = await asyncio.to_thread(os.open, tmp_path / "waiting", os.O_WRONLY)
    # Other tests' children may have ended and not been waited for yet.
    children = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    mine = [each for each in children if any("test_that_waits" in word for word in each.cmdline())]
    assert len(mine) == 1
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        await running
    os.close(fifo)
    assert not mine[0].is_running()
    assert (workers[0].tree / "rule.py").read_text() == FILES["rule.py"]


async def test_an_unknown_name_is_refused() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.mutants.run", "no such rule"), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert b"no such mutation: no such rule" in errors
