"""Pytest plugin: records what each test file costs, in seconds of wall and of processor time.

`pytest -p tests.support.durations --durations-file tests/durations.txt [FILES]`. Rows of files that did not
run stay; rows of files that no longer exist go. Processor time is this process's and its descendants'. What
several files share (a server, imports) is charged to the first that asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

HEADER = (
    "# Seconds of processor time, of wall time, and tests, by file; `make durations` measures them anew.\n"
)


@dataclass(frozen=True)
class Cost:
    """What one file took."""

    cpu_s: float
    wall_s: float
    tests: int


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the figures go."""
    parser.addoption("--durations-file", type=Path, help="file to which costs by test file are written")


def pytest_configure(config: pytest.Config) -> None:
    """Starts to record where a file is named."""
    path = config.getoption("durations_file")
    if path is not None:
        config.pluginmanager.register(Recorder(path, config.rootpath))


class Recorder:
    """Takes the time at each change of file."""

    def __init__(self, path: Path, root: Path) -> None:
        self._path = path
        self._root = root
        self._costs: dict[str, Cost] = {}
        self._tests = 0
        self._cpu_s, self._wall_s = cpu_of_tree_s(), time.monotonic()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Charges a file when its last test is over, with the teardown of what it does not share."""
        if not self._costs and not self._tests:  # collection is nobody's
            self._cpu_s, self._wall_s = cpu_of_tree_s(), time.monotonic()
        result = yield
        self._tests += 1
        if nextitem is None or nextitem.path != item.path:
            cpu_s, wall_s = cpu_of_tree_s(), time.monotonic()
            name = item.path.relative_to(self._root).as_posix()
            self._costs[name] = Cost(cpu_s - self._cpu_s, wall_s - self._wall_s, self._tests)
            self._cpu_s, self._wall_s, self._tests = cpu_s, wall_s, 0
            self._write()
        return result

    def _write(self) -> None:
        costs = read(self._path) | self._costs
        there = {name: cost for name, cost in costs.items() if (self._root / name).exists()}
        self._path.write_text(text_of(there))


def cpu_of_tree_s() -> float:
    """Processor time of this process, its living descendants, and all of theirs that have ended."""
    process = psutil.Process()
    total_s = 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):
            total_s += sum(one.cpu_times()[:4])  # user, system, and the same of ended children
    return total_s


def read(path: Path) -> dict[str, Cost]:
    """The figures in a file; none where there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: Cost(float(cpu_s), float(wall_s), int(tests)) for cpu_s, wall_s, tests, name in rows}


def text_of(costs: dict[str, Cost]) -> str:
    """The figures as a file, the costliest first."""
    rows = sorted(costs.items(), key=lambda row: (-row[1].cpu_s, row[0]))
    return HEADER + "".join(
        f"{cost.cpu_s:7.1f} {cost.wall_s:7.1f} {cost.tests:5} {name}\n" for name, cost in rows
    )
