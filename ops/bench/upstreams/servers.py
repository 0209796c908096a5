"""Starts other servers, each from an environment of its own (`make bench-upstreams`)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.bench.common.errors import CannotBench
from ops.bench.common.processes import distribution_of, installed, server_program
from ops.bench.upstreams import request_set
from ops.bench.upstreams.models import CONTEXT_TOKENS, save_defaults, save_image_model, save_text_model
from ops.bench.upstreams.request_set import SetRequest
from ops.bench.versus.vllm_server import VARIABLES, vllm_home
from ops.sandbox.free_port import free_port

START_S = 240.0
MODEL = "m"
VLLM = vllm_home(Path()).name
RUNNERS = Path(__file__).parents[1] / "peers"
SHOWN_BYTES = 800
PROMPT_DETAILS = "--enable-prompt-tokens-details"
TRANSFORMERS = "from transformers.cli.transformers import main; main()"


@dataclass(frozen=True, slots=True)
class OtherKind:
    name: str
    environment: str
    """Directory under that of the peers."""
    distribution: str
    """Its name in that environment, for the version."""
    requests: Callable[[], list[SetRequest]]
    health: str = "/v1/models"
    has_images: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults, for its model's `generation_config.json`."""
    arguments: Sequence[str] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the upstream in the gateway in front of it."""


KINDS = (
    OtherKind(
        "vllm",
        *(VLLM, "vllm_cpu", request_set.vllm),
        arguments=("--enable-auto-tool-choice", "--tool-call-parser", "hermes", PROMPT_DETAILS),
    ),
    OtherKind(
        "vllm_defaults",
        *(VLLM, "vllm_cpu", request_set.vllm_defaults),
        defaults=request_set.OWN_DEFAULTS,
        arguments=(PROMPT_DETAILS,),
    ),
    OtherKind(
        "vllm_images",
        *(VLLM, "vllm_cpu", request_set.vllm_images),
        has_images=True,
        # Tokenised again, the text of random weights has more tokens than were generated.
        settings={"tokenizer_dir": ""},
        arguments=(
            "--reasoning-parser",
            "deepseek_r1",
            "--structured-outputs-config.enable_in_reasoning",
            "true",
        ),
    ),
    OtherKind(
        "llama_cpp",
        *("llama_cpp", "xllamacpp", request_set.llama_cpp, "/health"),
        # It has no salt for its cache: what it finds there is hidden otherwise.
        settings={"context_tokens": CONTEXT_TOKENS, "prefix_cache": "shared"},
    ),
    OtherKind(
        "llama_cpp_embeddings",
        *("llama_cpp", "xllamacpp", request_set.llama_cpp_embeddings, "/health"),
        arguments=("embeddings",),
        settings={"context_tokens": CONTEXT_TOKENS},
    ),
    OtherKind(
        "transformers",
        *("transformers", "transformers", request_set.transformers, "/health"),
        settings={"context_tokens": CONTEXT_TOKENS, "health": "/health", "usage": "none"},
    ),
)


@dataclass(frozen=True, slots=True)
class OtherServer:
    kind: OtherKind
    url: str
    """Without `/v1`."""
    model: str
    model_dir: Path
    version: str


@contextlib.asynccontextmanager
async def other_server(kind: OtherKind, peers_dir: Path, directory: Path) -> AsyncIterator[OtherServer]:
    """Starts one and waits until it answers. Raises `PeerMissing` and `CannotBench`."""
    home = installed(peers_dir / kind.environment, kind.name, "bench-upstreams")
    model_dir = (save_image_model if kind.has_images else save_text_model)(directory / "model")
    if kind.defaults:
        save_defaults(model_dir, kind.defaults)
    port = free_port()
    command, environment = _command(kind, home, model_dir, port)
    url = f"http://127.0.0.1:{port}"
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory)} | environment
    log_path = directory / "server.log"
    async with server_program(kind.name, command, log_path, environment, url + kind.health, start_s=START_S):
        model = str(model_dir) if kind.environment == "transformers" else MODEL
        yield OtherServer(kind, url, model, model_dir, _version(kind, home))


def _command(kind: OtherKind, home: Path, model_dir: Path, port: int) -> tuple[list[str], dict[str, str]]:
    program = str(home / "bin" / "python")
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if kind.environment == VLLM:
        return [
            *(program, "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir), *address),
            *("--served-model-name", MODEL, "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "4"),
            *("--enforce-eager", "--dtype", "float32", *kind.arguments),
        ], VARIABLES
    if kind.environment == "llama_cpp":
        gguf = model_dir.with_suffix(".gguf")
        writer = [program, str(RUNNERS / "write_gguf.py"), str(model_dir), str(gguf)]
        made = subprocess.run(writer, capture_output=True, text=True)
        if made.returncode:
            raise CannotBench(f"the model could not be written for llama.cpp: {made.stderr[-SHOWN_BYTES:]}")
        return [program, str(RUNNERS / "run_llama_cpp.py"), str(gguf), str(port), MODEL, *kind.arguments], {}
    # The packages that it needs would change how transformers loads models elsewhere: only it sees them.
    return [sys.executable, "-c", TRANSFORMERS, "serve", str(model_dir), *address, "--device", "cpu"], {
        "PYTHONPATH": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _version(kind: OtherKind, home: Path) -> str:
    if kind.environment == "transformers":
        from transformers import __version__

        return f"transformers-{__version__}"
    return distribution_of(home, kind.distribution) or "unknown"
