"""Targets of the gateway benchmark, and how each is started in front of the upstream.

Ours and LiteLLM have limits on; nginx and Portkey pass requests on; `direct` is the upstream itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import httpx

from ops.bench.common.errors import CannotBench, PeerMissing
from ops.bench.common.load import QUIET, admin_call, known
from ops.bench.common.processes import distribution_of, installed, server_program, toml
from ops.bench.gateway.mock_upstream import CONTEXT_TOKENS, MODEL
from ops.bench.gateway.side_loads import TRACE_RATIO, Scraper, Watchers, collector, scraping, watching
from ops.sandbox.free_port import free_port
from ops.sandbox.server import LocalServer, local_server
from ops.sandbox.services import start_postgres, start_redis

OURS = "fairgate"
SILENT = "fairgate, no estimates"
WATCHED = "fairgate, overviews open"
TRACED = "fairgate, with traces"
SCRAPED = "fairgate, scraped"
ONE_WORKER = "fairgate, one worker"
WORKERS = "fairgate, several workers"
DIRECT = "direct"
PEERS = ("nginx", "litellm", "portkey")
START_S = 90.0
TENANTS = 4
"""Of ours and of LiteLLM; connections are shared out among their keys."""
UPSTREAM_SEQUENCES = 256
"""More than the benchmark's connections: no request waits for the upstream."""
LARGE = 10**12
LARGE_RATE = 9_000_000
"""Limits that count and never bind."""


@dataclass(frozen=True, slots=True)
class Serving:
    port: int
    process: int | None
    """Root of its processes; None: it has none."""
    headers: Sequence[Mapping[str, str]]
    watchers: Watchers | None = None
    scraper: Scraper | None = None


Open = Callable[[Path, int], contextlib.AbstractAsyncContextManager[Serving]]
"""Starts a gateway, given a directory of its own and the upstream's port."""


@dataclass(frozen=True, slots=True)
class BenchTarget:
    name: str
    version: str
    open: Open


def direct() -> BenchTarget:
    @contextlib.asynccontextmanager
    async def serve(directory: Path, upstream_port: int) -> AsyncIterator[Serving]:
        yield Serving(upstream_port, None, ({},))

    return BenchTarget(DIRECT, "", serve)


def fairgate(
    tokenizer_dir: Path | None,
    *,
    estimates: bool = True,
    beside: str = OURS,
    watchers: int = 0,
    workers: int = 0,
) -> BenchTarget:
    """Our gateway. `tokenizer_dir`: prompts are rendered and counted exactly; None: estimated, with a margin.
    `beside`: name of the target with a side load; `watchers`: number of open overviews of the console;
    `workers`: processes, on PostgreSQL and Redis; 0: one, on SQLite."""

    @contextlib.asynccontextmanager
    async def serve(directory: Path, upstream_port: int) -> AsyncIterator[Serving]:
        config = directory / "fairgate.toml"
        config.write_text(_fairgate_config(upstream_port, tokenizer_dir, estimates), encoding="utf-8")
        arguments = ["--config", str(config), "--prices", f"{MODEL}=150/600", *QUIET]
        async with contextlib.AsyncExitStack() as closing:
            if workers:
                postgres, redis = start_postgres(is_durable=True), start_redis()
                closing.callback(postgres.stop)
                closing.callback(redis.stop)
                arguments += ["--database-url", postgres.url, "--redis-url", redis.url]
                arguments += ["--workers", str(workers)]
            if beside == TRACED:
                url = await closing.enter_async_context(collector())
                arguments += ["--telemetry-otlp", url, "--telemetry-trace-ratio", f"{TRACE_RATIO:g}"]
            server = await closing.enter_async_context(local_server(directory / "data", arguments=arguments))
            headers = await _tenants(server)
            port = httpx.URL(server.url).port
            assert port is not None
            overviews = scraper = None
            if beside == WATCHED:
                overviews = await closing.enter_async_context(watching(server, watchers))
            if beside == SCRAPED:
                scraper = await closing.enter_async_context(scraping(server.url))
            yield Serving(port, server.process.pid, headers, overviews, scraper)

    return BenchTarget(beside if estimates else SILENT, metadata.version("fairgate"), serve)


def _fairgate_config(upstream_port: int, tokenizer_dir: Path | None, estimates: bool) -> str:
    upstream = {
        "name": "bench",
        "url": f"http://127.0.0.1:{upstream_port}/v1",
        "model": MODEL,
        "max_concurrent": UPSTREAM_SEQUENCES,
        "context_tokens": CONTEXT_TOKENS,
    }
    if tokenizer_dir is not None:
        upstream["tokenizer_dir"] = str(tokenizer_dir.absolute())
    return toml(upstream, ["[gateway]", f'estimates = "{"yes" if estimates else "no"}"'])


async def _tenants(server: LocalServer) -> list[dict[str, str]]:
    names, headers = [f"tenant-{number}" for number in range(TENANTS)], []
    async with server.operator() as client:
        for name in names:
            await admin_call(client, "POST", "tenants", {"name": name})
            for limit in (
                {"meter": "total_tokens", "rate_per_s": LARGE_RATE, "amount": LARGE_RATE},
                {"meter": "total_tokens", "window": "day", "amount": LARGE},
            ):
                await admin_call(client, "POST", "limits", {"tenant": name, "mode": "hard", **limit})
            key = await admin_call(client, "POST", "keys", {"tenant": name})
            headers.append({"authorization": f"Bearer {key['key']}"})
        if not await known(client, dict.fromkeys(names, 2), START_S):
            raise CannotBench(f"{OURS} does not know its tenants after {START_S:g} s")
    return headers


def peer(name: str, peers_dir: Path) -> BenchTarget:
    """One of `PEERS`. Raises `PeerMissing`."""
    makers = {"nginx": _nginx, "litellm": _litellm, "portkey": _portkey}
    return makers[name](peers_dir.absolute() / name)


NGINX_CONFIG = """daemon off;
{user}
worker_processes 1;
pid nginx.pid;
error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  keepalive_requests 100000000;
  upstream bench {{ server 127.0.0.1:{upstream_port}; keepalive 256; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://bench;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_set_header Authorization "Bearer upstream";
      proxy_buffering off;
    }}
  }}
}}
"""


def _nginx(home: Path) -> BenchTarget:
    unpacked = home / "usr" / "sbin" / "nginx"
    # With the directories of system programs, which users do not always have.
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
    on_path = None if unpacked.is_file() else shutil.which("nginx", path=path)
    program = on_path or str(installed(unpacked, "nginx", "bench-peers"))

    @contextlib.asynccontextmanager
    async def serve(directory: Path, upstream_port: int) -> AsyncIterator[Serving]:
        port = free_port()
        user = "user root;" if os.geteuid() == 0 else ""
        text = NGINX_CONFIG.format(user=user, port=port, upstream_port=upstream_port)
        (directory / "nginx.conf").write_text(text, encoding="utf-8")
        command = (program, "-p", str(directory), "-c", str(directory / "nginx.conf"), "-e", "stderr")
        async with _program("nginx", command, directory, {}, port, ({},)) as serving:
            yield serving

    return BenchTarget("nginx", "", serve)


LITELLM_AUTH = f"""from litellm.proxy._types import UserAPIKeyAuth


async def user_api_key_auth(request, api_key):
    return UserAPIKeyAuth(
        api_key=api_key, token=api_key, tpm_limit={LARGE}, rpm_limit={LARGE}, max_budget={LARGE}
    )
"""
LITELLM_CONFIG = """model_list:
  - model_name: {model}
    litellm_params:
      model: openai/{model}
      api_base: "http://127.0.0.1:{upstream_port}/v1"
      api_key: upstream
      max_retries: 0
      input_cost_per_token: 0.00000015
      output_cost_per_token: 0.0000006
litellm_settings: {{num_retries: 0, telemetry: false}}
router_settings: {{num_retries: 0, disable_cooldowns: true}}
general_settings: {{custom_auth: bench_auth.user_api_key_auth, custom_auth_run_common_checks: true}}
"""


def _litellm(home: Path) -> BenchTarget:
    program = installed(home / "bin" / "litellm", "litellm", "bench-peers")

    @contextlib.asynccontextmanager
    async def serve(directory: Path, upstream_port: int) -> AsyncIterator[Serving]:
        text = LITELLM_CONFIG.format(model=MODEL, upstream_port=upstream_port)
        (directory / "config.yaml").write_text(text, encoding="utf-8")
        (directory / "bench_auth.py").write_text(LITELLM_AUTH, encoding="utf-8")
        port = free_port()
        command, environment = litellm_proxy(program, port)
        headers = [{"authorization": f"Bearer sk-bench-{number}"} for number in range(TENANTS)]
        async with _program("litellm", command, directory, environment, port, headers) as serving:
            yield serving

    return BenchTarget("litellm", distribution_of(home, "litellm").removeprefix("litellm-"), serve)


def litellm_proxy(program: Path, port: int) -> tuple[tuple[str, ...], dict[str, str]]:
    return (str(program), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)), {
        "PATH": f"{program.parent}:{os.environ.get('PATH', os.defpath)}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_MASTER_KEY": f"sk-{secrets.token_hex(16)}",
        "LITELLM_MODE": "PRODUCTION",
    }


def _portkey(home: Path) -> BenchTarget:
    package = home / "node_modules" / "@portkey-ai" / "gateway"
    start = installed(package / "build" / "start-server.js", "portkey", "bench-peers")
    node = shutil.which("node")
    if node is None:
        raise PeerMissing("portkey needs node: make bench-peers")

    @contextlib.asynccontextmanager
    async def serve(directory: Path, upstream_port: int) -> AsyncIterator[Serving]:
        port = free_port()
        command = (node, str(start), f"--port={port}", "--headless")
        headers = {
            "authorization": "Bearer upstream",
            "x-portkey-provider": "openai",
            "x-portkey-custom-host": f"http://127.0.0.1:{upstream_port}/v1",
        }
        environment = {"NODE_ENV": "production"}
        async with _program("portkey", command, directory, environment, port, (headers,), package) as serving:
            yield serving

    return BenchTarget("portkey", json.loads((package / "package.json").read_text())["version"], serve)


@contextlib.asynccontextmanager
async def _program(
    name: str,
    command: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    port: int,
    headers: Sequence[Mapping[str, str]],
    cwd: Path | None = None,
) -> AsyncIterator[Serving]:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "Are you there?"}]}

    async def ask(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(url, json=body, headers=headers[0])

    variables = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory), **environment}
    log_path = directory / f"{name}.log"
    async with server_program(name, command, log_path, variables, ask, start_s=START_S, cwd=cwd) as process:
        yield Serving(port, process.pid, headers)
