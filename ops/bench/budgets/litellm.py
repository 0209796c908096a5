"""The bursts of the budget benchmark against LiteLLM's limits: its proxy before our server without a limit.

It comes from an environment of its own (`make bench-peers`). Keys are checked by a custom hook, since it has
no database; a key's name contains its limit, in tokens a minute.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ops.bench.budgets.scenarios import MAX_TOKENS, SHARE, Question, ScenarioEvidence, judged_burst
from ops.bench.budgets.testbed import ScenarioFailed, Testbed
from ops.bench.common.attempts import ClientAttempt, ClientRequest, persist
from ops.bench.common.errors import PeerMissing
from ops.bench.common.http_client import LoadHttpClient
from ops.bench.common.processes import end
from ops.sandbox.free_port import free_port
from ops.sandbox.server import until

CLIENTS = 50
PATIENCE_S = 15.0
START_S = 90.0
AUTH = """from litellm.proxy._types import UserAPIKeyAuth


async def user_api_key_auth(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, token=api_key, tpm_limit=int(api_key.split("-")[1]))
"""
CONFIG = """model_list:
  - model_name: {model}
    litellm_params: {{model: openai/{model}, api_base: "{url}/v1", api_key: "{key}", max_retries: 0}}
litellm_settings: {{num_retries: 0, telemetry: false}}
router_settings: {{num_retries: 0, disable_cooldowns: true}}
general_settings: {{custom_auth: contract_auth.user_api_key_auth, custom_auth_run_common_checks: true}}
"""


def installed_litellm(peers_dir: Path) -> Path:
    """LiteLLM's program. Raises `PeerMissing`."""
    found = peers_dir.absolute() / "litellm" / "bin" / "litellm"
    if not found.exists():
        raise PeerMissing(f"LiteLLM is not installed in {found.parents[1]}: make bench-peers")
    return found


@dataclass(frozen=True, slots=True)
class LiteLLM:
    """One peer's rows of the report."""

    program: Path
    rows: int = 4

    async def run(
        self, testbed: Testbed, client: LoadHttpClient, questions: Sequence[Question]
    ) -> list[dict[str, Any]]:
        """Bursts of 50, with and without max_tokens, streaming and not. Raises `ScenarioFailed`."""
        tenant = await testbed.tenant("behind-the-peer")
        await testbed.known(tenant)
        rows = []
        async with self._proxy(testbed, tenant.key) as url:
            for asks_max_tokens in (True, False):
                for streams in (True, False):
                    rows.append(await _burst(client, url, testbed.model, questions, asks_max_tokens, streams))
        return rows

    @asynccontextmanager
    async def _proxy(self, testbed: Testbed, key: str) -> AsyncIterator[str]:
        with tempfile.TemporaryDirectory(prefix="fairgate-contract-peer-") as name:
            directory = Path(name)
            config = CONFIG.format(model=testbed.model, url=testbed.servers[0].url, key=key)
            (directory / "config.yaml").write_text(config)
            (directory / "contract_auth.py").write_text(AUTH)
            port = free_port()
            with (directory / "log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    str(self.program),
                    *("--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)),
                    cwd=directory,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={
                        "PATH": f"{self.program.parent}:{os.environ.get('PATH', '')}",
                        "HOME": name,
                        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                        "LITELLM_LOG": "ERROR",
                        "LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(16)}",
                        "LITELLM_MODE": "PRODUCTION",
                    },
                    process_group=0,
                )
            try:
                url = f"http://127.0.0.1:{port}"
                await _serves(url, process, directory / "log")
                yield url
            finally:
                await end(process)


async def _serves(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with httpx.AsyncClient(timeout=5.0) as client:

        async def answers() -> bool:
            if process.returncode is not None:
                return True
            try:
                return (await client.get(f"{url}/health/liveliness")).status_code == 200
            except httpx.HTTPError:
                return False

        if not await until(answers, START_S) or process.returncode is not None:
            raise ScenarioFailed(f"LiteLLM does not serve: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]


async def _burst(
    client: LoadHttpClient,
    url: str,
    model: str,
    questions: Sequence[Question],
    asks_max_tokens: bool,
    streams: bool,
) -> dict[str, Any]:
    wanted = [questions[number % len(questions)] for number in range(CLIENTS)]
    demand = sum(question.total_tokens for question in wanted)
    amount = int(demand * SHARE[CLIENTS])
    name = f"{'max' if asks_max_tokens else 'open'}-{'stream' if streams else 'plain'}"
    begun_s = time.monotonic()
    answers: list[ClientAttempt] = []
    fields = {"stream": streams, "temperature": 0} | ({"max_tokens": MAX_TOKENS} if asks_max_tokens else {})
    asks = [
        ClientRequest("", f"sk-{amount}-{name}", {"model": model, "messages": question.messages, **fields})
        for question in wanted
    ]
    until_s = begun_s + PATIENCE_S
    await asyncio.gather(*(persist(client, [url], ask, answers, until_s=until_s) for ask in asks))
    evidence = judged_burst(
        ScenarioEvidence([], answers), amount, demand, time.monotonic() - begun_s, must=False
    )
    served = [answer for answer in answers if answer.status == 200]
    used = sum(answer.prompt_tokens + answer.delivered_tokens for answer in served)
    return {
        "scenario": f"litellm burst-{CLIENTS}-{name}",
        "peer": "litellm",
        "gateways": 1,
        "overshoot_tokens": max(0, used - amount),
        "charged_tokens": used,
        "broken": evidence.broken,
        "ok": used <= amount and not evidence.broken,
        "took_s": round(time.monotonic() - begun_s, 1),
    } | evidence.figures
