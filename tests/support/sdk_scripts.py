"""Scripts of SDKs that the suite does not install, each run in a process of its own.

The SDKs are in directories of their own, as `make test-sdks` fills them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import Server

SDKS = Path(os.environ.get("FAIRGATE_TEST_SDKS", "/nonexistent")).absolute()
SCRIPT_S = 240.0


def require_sdk(sdk: str) -> Path:
    """The SDK's directory; without it the test is skipped."""
    if not (SDKS / sdk).is_dir():
        pytest.skip(f"{sdk} is not in FAIRGATE_TEST_SDKS: make test-sdks")
    return SDKS / sdk


def run_script(sdk: str, script: str, gateway: Server, key: str, model: str) -> Any:
    """What a script says in its last line, as JSON. Its arguments are the API's URL, a key and a model."""
    directory = require_sdk(sdk)
    command = [sys.executable, "-c", script]
    if sdk == "node":
        node = shutil.which("node")
        assert node is not None, "Node's SDKs are there, and Node is not"
        command = [node, "-e", script]
    paths = {"PYTHONPATH": str(directory), "NODE_PATH": str(directory / "node_modules")}
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # else it asks the network for prices
    ended = subprocess.run(
        [*command, f"{gateway.url}/v1", key, model], env=os.environ | paths | offline,
        capture_output=True, text=True, timeout=SCRIPT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])
