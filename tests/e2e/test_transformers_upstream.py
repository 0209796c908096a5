"""A foreign server behind the gateway: transformers' own `serve`. transformers' own `serve`.

It needs packages that would change how transformers loads models in every other test (accelerate), so they
are looked for in a directory of their own, which only that server gets to see:

    pip install --target .serving --no-deps fastapi starlette opentelemetry-api accelerate
    FAIRGATE_TEST_SERVING=.serving pytest tests/e2e/test_transformers_upstream.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from ops.sandbox.free_port import free_port
from tests.support.server_process import PRICE, Server, server_process, until

SERVING = os.environ.get("FAIRGATE_TEST_SERVING", "")
NEEDED = ("fastapi", "starlette", "opentelemetry", "accelerate")
MISSING = [name for name in NEEDED if PathFinder.find_spec(name, [*sys.path, SERVING]) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"transformers serve needs {', '.join(MISSING)}: see the top of this file"
)

HELLO: Any = [{"role": "user", "content": "Hello"}]
CONTEXT_TOKENS = 512
POOL = "tiny-elsewhere"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> Iterator[str]:
    """URL of transformers' server, with our tiny model."""
    home = tmp_path_factory.mktemp("transformers")
    port = free_port()
    command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"]
    command += [str(chat_model), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(SERVING).absolute()) if SERVING else ""
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, (home / "log").read_text()
        try:
            return httpx.get(f"{url}/health", timeout=2).is_success
        except httpx.TransportError:
            return False

    try:
        until(is_up, 120)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, chat_model: Path, other: str) -> Iterator[Server]:
    """A gateway without an engine in front of it."""
    upstream = {
        "name": "transformers",
        "url": other,
        "model": str(chat_model),
        "pool": POOL,
        "tokenizer_dir": str(chat_model),
        "context_tokens": CONTEXT_TOKENS,
        "usage": "none",
        "health": "/health",
    }
    arguments = ["--engine-serve", "no", "--upstreams", json.dumps([upstream])]
    arguments += ["--prices", f"{PRICE},{POOL}=100/300/50"]
    with server_process(tmp_path_factory.mktemp("gateway"), chat_model, *arguments) as running:
        yield running


def test_its_answers_are_streamed_counted_and_charged(gateway: Server, other: str, chat_model: Path) -> None:
    key = gateway.tenant("acme")
    gateway.limit("acme", "total_tokens", 10_000, window="lifetime")
    body = {"model": str(chat_model), "messages": HELLO, "max_tokens": 12, "temperature": 0}
    direct = httpx.post(f"{other}/v1/chat/completions", json=body, timeout=60).json()
    with OpenAI(api_key=key, base_url=f"{gateway.url}/v1", max_retries=0) as client:
        answer = client.chat.completions.create(model=POOL, messages=HELLO, max_tokens=12, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model=POOL, messages=HELLO, max_tokens=12, temperature=0, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
    text = answer.choices[0].message.content
    assert text == direct["choices"][0]["message"]["content"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == direct["usage"]["completion_tokens"]
    assert answer.usage.prompt_tokens == direct["usage"]["prompt_tokens"]
    assert answer.model_extra is not None
    assert (answer.model_extra["fairgate"]["upstream"], answer.model_extra["fairgate"]["basis"]) == (
        "transformers",
        "upstream",
    )
    state = gateway.limit_state("acme", "total_tokens")
    assert (state["used"], state["held"]) == (2 * answer.usage.total_tokens, 0)
