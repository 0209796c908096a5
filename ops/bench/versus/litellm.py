"""LiteLLM's proxy in a comparison, with its limits counted in Redis, so that they outlive the proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ops.bench.common.processes import installed, server_program
from ops.bench.gateway.peers import litellm_proxy
from ops.bench.versus.stack import ServedStack, TenantTerms
from ops.bench.versus.vllm_server import MODEL
from ops.sandbox.free_port import free_port

START_S = 120.0
WINDOW_S = 10
"""Of its limits on tokens; by default a minute, in which a measurement would see half a window."""
WRITTEN_S = 5.0
"""Time for its callbacks after the last request."""

HOOKS = """import json
from litellm.integrations.custom_logger import CustomLogger
from litellm.proxy._types import UserAPIKeyAuth


async def user_api_key_auth(request, api_key):
    name, tokens, parallel = api_key.removeprefix("sk-").rsplit(".", 2)
    limits = {"tpm_limit": int(tokens) or None, "max_parallel_requests": int(parallel) or None}
    return UserAPIKeyAuth(api_key=api_key, token=api_key, key_alias=name, **limits)


class Bill(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        told = kwargs["standard_logging_object"]
        with open("bill.jsonl", "a") as file:
            file.write(json.dumps({"tenant": told["metadata"]["user_api_key_alias"],
                                   "tokens": told["total_tokens"]}) + "\\n")

    async_log_failure_event = async_log_success_event


bill = Bill()
"""
CONFIG = """model_list:
  - model_name: {model}
    litellm_params: {{model: hosted_vllm/{model}, api_base: "{url}/v1", api_key: none, max_retries: 0,
      input_cost_per_token: 0.00000015, output_cost_per_token: 0.0000006}}
litellm_settings: {{num_retries: 0, telemetry: false, callbacks: versus_hooks.bill}}
router_settings: {{num_retries: 0, disable_cooldowns: true}}
general_settings: {{custom_auth: versus_hooks.user_api_key_auth, custom_auth_run_common_checks: true}}
"""


@dataclass(frozen=True, slots=True)
class LiteLlmGateway:
    program: Path
    upstream_url: str
    redis_url: str
    name: str = "LiteLLM + vLLM"
    is_fair_by_itself: bool = False
    limit_window_s: float = WINDOW_S

    @contextlib.asynccontextmanager
    async def open(self, directory: Path) -> AsyncIterator[ServedStack]:
        """See `Contestant`. Raises `CannotBench`."""
        config = CONFIG.format(model=MODEL, url=self.upstream_url)
        (directory / "config.yaml").write_text(config, encoding="utf-8")
        (directory / "versus_hooks.py").write_text(HOOKS, encoding="utf-8")
        port, redis = free_port(), urlsplit(self.redis_url)
        url, log_path = f"http://127.0.0.1:{port}", directory / "litellm.log"
        command, environment = litellm_proxy(self.program, port)
        environment |= {
            "HOME": str(directory),
            "LITELLM_RATE_LIMIT_WINDOW_SIZE": str(WINDOW_S),
            "REDIS_HOST": redis.hostname or "127.0.0.1",
            "REDIS_PORT": str(redis.port),
        }
        async with server_program(
            "LiteLLM", command, log_path, environment, f"{url}/health/liveliness", start_s=START_S
        ) as process:
            yield LiteLlmServed(url, process, directory)


def installed_proxy(peers_dir: Path) -> Path:
    """LiteLLM's program. Raises `PeerMissing`."""
    return installed(peers_dir / "litellm" / "bin" / "litellm", "LiteLLM", "bench-versus")


CAUSE_WORDS = ("queue", "wait", "priority", "reason", "cause", "throttle")


def explaining_headers(headers: Mapping[str, str]) -> str | None:
    """The headers of an answer whose names have to do with waiting; None: there are none."""
    lines = [
        f"{name}: {value}"
        for name, value in headers.items()
        if any(word in name.lower() for word in CAUSE_WORDS)
    ]
    return "; ".join(lines) or None


@dataclass
class LiteLlmServed:
    url: str
    process: asyncio.subprocess.Process
    directory: Path
    tenants: dict[str, TenantTerms] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def enrol(self, terms: TenantTerms) -> str:
        """See `ServedStack`. It has no weights: a key has tokens a window, and requests at once."""
        self.tenants[terms.name] = terms
        return f"sk-{terms.name}.{terms.limit_tokens or 0}.{terms.most_parallel or 0}"

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def charged_tokens(self, tenant: str) -> int:
        """See `ServedStack`. Counted by its callbacks, which get nothing of a request that it did not end."""
        if self.process.returncode is None:
            await asyncio.sleep(WRITTEN_S)
        bill = self.directory / "bill.jsonl"
        lines = bill.read_text(encoding="utf-8").splitlines() if bill.exists() else []
        entries = [json.loads(line) for line in lines]
        return sum(entry["tokens"] for entry in entries if entry["tenant"] == tenant)

    async def why(self, headers: Mapping[str, str], key: str) -> str | None:
        """See `ServedStack`. Response headers about a queue, a wait or a cause."""
        return explaining_headers(headers)
