"""Puts a set of requests to other servers, directly and through a gateway in front of them, and compares."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from ops.bench.common.errors import PeerMissing
from ops.bench.common.load import admin_call
from ops.bench.common.report import Progress
from ops.bench.upstreams.difference import RANDOM, FieldDifference, differences
from ops.bench.upstreams.models import CONTEXT_TOKENS
from ops.bench.upstreams.recording import RecordedRequest, Recording, ServerAnswer, save
from ops.bench.upstreams.request_set import SetRequest
from ops.bench.upstreams.servers import KINDS, OtherKind, OtherServer, other_server
from ops.sandbox.server import LocalServer, local_server, until

TIMEOUT_S = 120.0
READY_S = 60.0
POOL = "measured"


@dataclass(frozen=True, slots=True)
class UpstreamBenchOptions:
    servers: tuple[str, ...] | None
    """Names of `KINDS`; None: those that are installed."""
    peers_dir: Path
    record: bool


@dataclass(slots=True)
class ComparedRequest:
    request: str
    answers: int = 0
    differences: list[FieldDifference] = field(default_factory=list)


def report_of(server: str, version: str, requests: Sequence[ComparedRequest]) -> dict[str, Any]:
    differing = {one.request: list(map(str, one.differences)) for one in requests if one.differences}
    return {
        "server": server,
        "version": version,
        "requests": len(requests),
        "answers": sum(request.answers for request in requests),
        "equal": len(requests) - len(differing),
        "differing": differing,
    }


async def run(options: UpstreamBenchOptions, tell: Progress) -> dict[str, Any]:
    """The report; `ok`: every answer is the same. Raises `PeerMissing`, `CannotBench` and `ServerFailed`."""
    reports, skipped = [], []
    for kind in KINDS:
        if options.servers is not None and kind.name not in options.servers:
            continue
        try:
            with tempfile.TemporaryDirectory(prefix="fairgate-upstreams-") as directory:
                reports.append(await _measure(kind, options, Path(directory), tell))
        except PeerMissing as error:
            if options.servers is not None:
                raise
            skipped.append(str(error))
    ok = bool(reports) and not any(report["differing"] for report in reports)
    return {"servers": reports, "skipped": skipped, "ok": ok}


async def _measure(
    kind: OtherKind, options: UpstreamBenchOptions, directory: Path, tell: Progress
) -> dict[str, Any]:
    tell(f"{kind.name}: starting")
    async with (
        other_server(kind, options.peers_dir, directory / "server") as server,
        # llama.cpp ends a connection after some requests without saying so.
        httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, headers={"connection": "close"}) as direct,
    ):
        recorded = []
        for asked in kind.requests():
            tell(f"{kind.name}: {asked.name}, directly")
            recorded.append(await _record(direct, server.model, asked))
        if options.record:
            today = time.strftime("%Y-%m-%d", time.gmtime())
            save(Recording(kind.name, server.version, today, server.model, CONTEXT_TOKENS, recorded))
        compared = []
        async with _gateway(server, directory) as (gateway, key):
            headers = {"authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=TIMEOUT_S) as through:
                for request in recorded:
                    tell(f"{kind.name}: {request.name}, through the gateway")
                    compared.append(await _compare(through, request))
        return report_of(kind.name, server.version, compared)


async def _record(client: httpx.AsyncClient, model: str, asked: SetRequest) -> RecordedRequest:
    """Asks twice: differences between the two are not the gateway's doing."""
    answers: dict[bool, ServerAnswer] = {}
    varies: set[str] = set()
    for is_stream in (False, True) if asked.is_streamed else (False,):
        first, second = [await ask(client, asked.path, model, asked.body, is_stream) for _ in range(2)]
        answers[is_stream] = second
        varies |= {one.field for one in differences(first, second, ignored=RANDOM)}
    return RecordedRequest(
        asked.name, asked.path, asked.body, answers[False], answers.get(True), sorted(varies)
    )


async def _compare(client: httpx.AsyncClient, recorded: RecordedRequest) -> ComparedRequest:
    compared = ComparedRequest(recorded.name)
    for direct in (recorded.whole, recorded.stream):
        if direct is None:
            continue
        compared.answers += 1
        try:
            through = await ask(client, recorded.path, POOL, recorded.body, direct.is_stream)
            differing = differences(direct, through, varies=recorded.varies, ignored=RANDOM)
        except (ValueError, httpx.HTTPError) as error:
            differing = [FieldDifference("answer", "comes", f"{type(error).__name__} {error}"[:200])]
        if differing and differing[0].field == "status":
            differing = [
                FieldDifference("status", differing[0].direct, f"{differing[0].through} {through.body[:200]}")
            ]
        compared.differences += differing
    return compared


async def ask(
    client: httpx.AsyncClient, path: str, model: str, body: dict[str, Any], is_stream: bool
) -> ServerAnswer:
    asked = {"model": model} | body
    if is_stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post(path, json=asked)
    streamed = response.headers.get("content-type", "").startswith("text/event-stream")
    return ServerAnswer(response.status_code, response.text, streamed)


@contextlib.asynccontextmanager
async def _gateway(server: OtherServer, directory: Path) -> AsyncIterator[tuple[LocalServer, str]]:
    upstream = {
        "name": server.kind.name,
        "url": f"{server.url}/v1",
        "model": server.model,
        "pool": POOL,
        "tokenizer_dir": str(server.model_dir),
    } | server.kind.settings
    arguments = ["--engine-serve", "no", "--upstreams", json.dumps([upstream])]
    arguments += ["--prices", f"{POOL}=100/300/50"]
    async with local_server(directory / "data", arguments=arguments) as gateway:
        async with gateway.operator() as operator:
            await admin_call(operator, "POST", "tenants", {"name": "bench"})
            key = await admin_call(operator, "POST", "keys", {"tenant": "bench"})

            async def is_ready() -> bool:
                return (await operator.get("/readyz")).is_success

            await until(is_ready, READY_S)
        yield gateway, str(key["key"])


def measure(options: UpstreamBenchOptions, tell: Progress) -> dict[str, Any]:
    return asyncio.run(run(options, tell))
