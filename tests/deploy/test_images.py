"""The images' Dockerfile, as its linter reads it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DOCKERFILE = Path(__file__).parents[2] / "ops/deploy/images/Dockerfile"


@pytest.mark.skipif(
    shutil.which("hadolint") is None, reason="hadolint is not here; `make check-deploy` brings it"
)
def test_the_linter_finds_no_fault_in_the_dockerfile() -> None:
    done = subprocess.run(["hadolint", DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
