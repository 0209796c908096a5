"""Free memory: the machine's, and no more than the least of the control groups leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.process.free_memory import free_memory_bytes

MIB = 2**20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """1,000 MiB are available; no groups."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {2000 * 1024} kB\nMemAvailable: {1000 * 1024} kB\n")
    return tmp_path


def free(machine: Path) -> int:
    return free_memory_bytes(machine / "proc", machine / "cgroup") // MIB


def test_without_groups_it_is_what_the_kernel_says(machine: Path) -> None:
    assert free(machine) == 1000


def test_a_group_or_its_parent_may_leave_less(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/parent/own\n")
    write(machine / "cgroup/parent/own/memory.max", "max\n")
    write(machine / "cgroup/parent/memory.max", f"{500 * MIB}\n")
    write(machine / "cgroup/parent/memory.current", f"{300 * MIB}\n")
    assert free(machine) == 200
    # The group's file cache makes room.
    write(machine / "cgroup/parent/memory.stat", f"anon 5\ninactive_file {50 * MIB}\n")
    assert free(machine) == 250
    write(machine / "cgroup/parent/own/memory.max", f"{10 * MIB}\n")
    write(machine / "cgroup/parent/own/memory.current", f"{30 * MIB}\n")
    assert free(machine) == 0


def test_groups_of_the_first_version_count_too(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "5:cpu:/x\n4:memory:/job\n")
    write(machine / "cgroup/memory/memory.limit_in_bytes", f"{2**63 - 4096}\n")
    write(machine / "cgroup/memory/job/memory.limit_in_bytes", f"{400 * MIB}\n")
    write(machine / "cgroup/memory/job/memory.usage_in_bytes", f"{100 * MIB}\n")
    assert free(machine) == 300


def test_a_group_seen_from_inside_a_container_is_the_root(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/../elsewhere\n")
    write(machine / "cgroup/memory.max", f"{600 * MIB}\n")
    write(machine / "cgroup/memory.current", f"{100 * MIB}\n")
    assert free(machine) == 500


def test_a_system_that_says_nothing_counts_half_of_its_memory(tmp_path: Path) -> None:
    assert free(tmp_path) > 0
