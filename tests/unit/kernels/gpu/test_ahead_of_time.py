"""What dispatch can choose compiles for cards that are not there, and nothing spills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.kernels.gpu import ahead_of_time

pytest.importorskip("triton", reason="triton is not installed: it is for Linux only")


def run(cache: Path, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", ahead_of_time.__name__, *words]
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    ended = subprocess.run(
        command, env=environment, cwd=ahead_of_time.PAGE.parents[1], capture_output=True, text=True
    )
    assert ended.stdout, ended.stderr
    rows: list[dict[str, Any]] = json.loads(ended.stdout)
    assert ended.returncode == any("fails" in row for row in rows)
    return rows


def test_one_of_each_kernel_fits_what_spills_does_not_pass_and_a_second_start_compiles_nothing_again(
    tmp_path: Path,
) -> None:
    rows = run(tmp_path, "one-each", "sm90")
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}

    folder = ahead_of_time.PAGE.parents[1] / "kernels" / "gpu"
    kernels = re.findall(r"^def (\w+_kernel)\(", "".join(map(Path.read_text, folder.glob("*.py"))), re.M)
    assert len(rows) == len(kernels) + 1, "attention's has two operators"
    assert [row for row in rows if "fails" in row] == []
    again = run(tmp_path, "one-each", "sm90", "spilling")
    assert [row["kernel"] for row in again if "fails" in row] == ["varlen_attention: attention"]
    now = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert len(now) == len(kept) + 1
    assert kept.items() <= now.items()


def test_every_configuration_stands_in_the_table() -> None:
    """On a difference: `python -m tests.unit.kernels.gpu.ahead_of_time page`."""
    page = ahead_of_time.PAGE.read_text()
    chosen = {f"| {kernel} | {case} | " for kernel, case, _ in ahead_of_time.chosen().values()}
    assert len(chosen) <= 60
    assert [line for line in chosen if f"{line}80 |" not in page or f"{line}90 |" not in page] == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("card", ahead_of_time.SHARED_KIB)
def test_every_configuration_fits_and_the_table_is_the_one_that_is_generated(
    tmp_path: Path, card: int
) -> None:
    rows = run(tmp_path, f"sm{card}")
    assert [row for row in rows if "fails" in row] == []
    lines = [
        line for line in ahead_of_time.PAGE.read_text().splitlines() if line.split(" | ")[2:3] == [str(card)]
    ]
    assert ahead_of_time.table_of(rows).splitlines()[2:] == lines
