"""Runs a private vLLM server from `make bench-vllm`'s environment, stock or with our scheduler in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ops.bench.common.processes import distribution_of, installed, server_program
from ops.sandbox.free_port import free_port
from ops.settings.settings import SHIPPED_MODEL

VERSIONS = ("0.32.0", "0.29.0")
"""Those that benchmarks install (`ops/bench/peers/vllm-*.txt`); the first is the one that is compared."""
START_S = 180.0
MODEL = "fairgate-demo"
CONTEXT_TOKENS = 2048
SCHEDULER = "fairgate_vllm.FairScheduler"
VARIABLES = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
}


@dataclass(frozen=True, slots=True)
class PluginOptions:
    slots: int
    key_file: Path
    """Of the signatures; the gateway has the same."""
    policy: str = "hybrid"
    gateway_timeout_s: float = 30.0
    """A gateway silent for longer counts as gone."""

    def environment(self) -> dict[str, str]:
        """Its settings: vLLM has no place for a plug-in's flags."""
        return {
            "FAIRGATE_VLLM_SLOTS": str(self.slots),
            "FAIRGATE_VLLM_POLICY": self.policy,
            "FAIRGATE_VLLM_KEY_FILE": str(self.key_file),
            "FAIRGATE_VLLM_GATEWAY_TIMEOUT_S": str(self.gateway_timeout_s),
            # vLLM adds routes of a plug-in only where it is named.
            "VLLM_PLUGINS": "fairgate",
        }


@dataclass(frozen=True, slots=True)
class VllmOptions:
    max_sequences: int
    plugin: PluginOptions | None = None
    kv_blocks: int | None = None
    """None: as many as its memory holds."""
    arguments: Sequence[str] = ()

    def command(self, program: Path, port: int) -> list[str]:
        command = [
            *(str(program), "serve", str(SHIPPED_MODEL), "--served-model-name", MODEL),
            *("--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(CONTEXT_TOKENS)),
            *("--max-num-seqs", str(self.max_sequences), "--max-num-batched-tokens", str(CONTEXT_TOKENS)),
            *("--enforce-eager", "--dtype", "float32", "--disable-uvicorn-access-log"),
        ]
        if self.kv_blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.kv_blocks)]
        if self.plugin is not None:
            command += ["--scheduler-cls", SCHEDULER]
        return [*command, *self.arguments]


@dataclass(frozen=True, slots=True)
class VllmServer:
    url: str
    """Without `/v1`."""
    process: asyncio.subprocess.Process
    log: Path = field(repr=False)

    async def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


def vllm_home(peers_dir: Path, version: str = VERSIONS[0]) -> Path:
    return peers_dir / f"vllm-{version}"


def installed_vllm(home: Path) -> Path:
    """vLLM's program in the environment `home`. Raises `PeerMissing`."""
    return installed(home / "bin" / "vllm", "vLLM", "bench-vllm or make bench-versus")


def vllm_version(home: Path) -> str:
    """Of the installed distribution, with its name: a third party builds it for processors without a GPU."""
    return distribution_of(home, "vllm_cpu", "vllm") or "unknown"


@contextlib.asynccontextmanager
async def vllm_server(
    home: Path, directory: Path, options: VllmOptions, *, port: int | None = None
) -> AsyncIterator[VllmServer]:
    """`directory`: of its log; `port` None: a free one. Raises `PeerMissing`, `CannotBench`."""
    program, port = installed_vllm(home), port or free_port()
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    log_path = directory / "vllm.log"
    url = f"http://127.0.0.1:{port}"
    command, environment = options.command(program, port), _environment(program, directory, options)
    async with server_program(
        "vLLM", command, log_path, environment, f"{url}/v1/models", start_s=START_S
    ) as process:
        yield VllmServer(url, process, log_path)


def _environment(program: Path, directory: Path, options: VllmOptions) -> dict[str, str]:
    """Nothing of ours but the plug-in's settings: neither PYTHONPATH nor a proxy."""
    path = f"{program.parent}:{os.environ.get('PATH', os.defpath)}"
    plugin = {} if options.plugin is None else options.plugin.environment()
    return {"PATH": path, "HOME": str(directory)} | VARIABLES | plugin
