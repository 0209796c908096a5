"""Division of the cores between engine and others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.fairness.live import halves, set_apart

SLEEPER = "import threading, sys; threading.Thread(target=sys.stdin.read).start(); print('up', flush=True)"


@pytest.mark.parametrize(
    ("cores", "engine", "others"),
    [({0, 1}, {1}, {0}), ({3, 5, 9}, {9}, {3, 5}), ({0, 1, 2, 3}, {2, 3}, {0, 1})],
)
def test_the_engine_gets_half_of_the_cores(cores: set[int], engine: set[int], others: set[int]) -> None:
    assert halves(cores) == (engine, others)


def test_a_single_core_is_shared() -> None:
    assert halves({4}) is None


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)
def test_all_threads_of_both_are_moved() -> None:
    sleepers = [
        subprocess.Popen([sys.executable, "-c", SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for each in sleepers:
            assert each.stdout is not None
            assert each.stdout.readline() == b"up\n"
        engine, other = sleepers
        parts = halves(os.sched_getaffinity(0))
        assert parts is not None
        assert set_apart(engine.pid, [other.pid]) == (len(parts[0]), len(parts[1]))
        for process, cores in zip(sleepers, parts, strict=True):
            tasks = [int(each.name) for each in Path(f"/proc/{process.pid}/task").iterdir()]
            assert len(tasks) == 2
            assert [os.sched_getaffinity(each) for each in tasks] == [cores, cores]
    finally:
        for each in sleepers:
            each.communicate()
