"""The systemd units, as systemd reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNITS = sorted((Path(__file__).parents[2] / "ops/deploy/systemd").glob("*.service"))
MOST_EXPOSURE = 2.0
"""Of 10, by `systemd-analyze security`; below 2.5 it says OK."""

pytestmark = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")


def analyzed(*arguments: str) -> str:
    done = subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr.strip()
    return done.stdout


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_no_fault_in_a_unit(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace("/opt/fairgate/bin/fairgate", sys.executable))
    analyzed("verify", "--man=no", str(copy))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_is_hardened(unit: Path) -> None:
    said = analyzed("security", "--offline=yes", "--no-pager", str(unit))
    level = re.search(rf"exposure level for {re.escape(unit.name)}: ([\d.]+)", said)
    assert level is not None, said
    assert float(level[1]) <= MOST_EXPOSURE


def test_a_unit_sets_no_variable_at_which_fairgate_would_stop() -> None:
    for unit in UNITS:
        variables = dict(re.findall(r"(FAIRGATE_\w+)=(\S+)", unit.read_text()))
        assert variables.keys() <= {"FAIRGATE_DATA_DIR", "FAIRGATE_ENGINE_SERVE"}, json.dumps(variables)
