"""Costs of a gateway per request and per token: ours and its peers before the same upstream, in turn.

A round in which the clients were the bottleneck is invalid. The cost of estimates is smaller than the
difference between two processes: one server switches them on and off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ops.bench.common.errors import CannotBench, PeerMissing
from ops.bench.common.report import QUIET_CORES, Progress, machine, rotated
from ops.bench.gateway.figures import BESIDE, beside, figures, invalid, one_run, promises
from ops.bench.gateway.mock_upstream import MAX_TOKENS, MODEL
from ops.bench.gateway.peers import (
    ONE_WORKER,
    OURS,
    PEERS,
    WORKERS,
    BenchTarget,
    Serving,
    direct,
    fairgate,
    peer,
)
from ops.bench.gateway.process import cpu_s, fsync_ms, machine_cpu_s, peak_bytes, process_tree
from ops.reporting import all_ok
from ops.sandbox.server import ROOT, ServerFailed, until

CONNECTIONS = 32
STREAMS = 64
CHAT: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": MAX_TOKENS,
    "messages": [
        {"role": "system", "content": "You are a helpful assistant. Answer briefly."},
        {"role": "user", "content": "How far is it from Lisbon to Porto, and how long does it take?"},
    ],
}
LEAST_ROUNDS = 3
LOAD_S = 120.0
"""Most that one measurement may take beyond its time."""


@dataclass(frozen=True, slots=True)
class GatewayBenchOptions:
    peers: tuple[str, ...] | None = None
    """None: those that are installed."""
    rounds: int = 3
    seconds: float = 3.0
    """Of each of the two measurements under load; those of latencies take two thirds and a half of it."""
    tokenizer_dir: Path | None = None
    peers_dir: Path = Path(".bench-peers")
    directory: Path = Path()
    """Where our ledger lies: on a disk, not in memory."""
    without_estimates: bool = False
    watchers: int = 0
    workers: int = 0
    traces: bool = False
    scraper: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredPhase:
    name: str
    connections: int
    streams: bool
    share: float


WARM_UP = (MeasuredPhase("", CONNECTIONS, False, 0.3), MeasuredPhase("", STREAMS, True, 0.2))
SERVERS = 6
PAIRS = 20
PAIR = MeasuredPhase("pair", CONNECTIONS, False, 0.3)
"""Of measurements of each server, with estimates and without."""
SWITCH_S = 10.0
PHASES = (
    MeasuredPhase("single", 1, False, 2 / 3),
    MeasuredPhase("throughput", CONNECTIONS, False, 1.0),
    MeasuredPhase("first_token", 1, True, 0.5),
    MeasuredPhase("streams", STREAMS, True, 1.0),
)


def run(options: GatewayBenchOptions, progress: Progress = lambda line: None) -> dict[str, Any]:
    """`progress` gets a line for each run. Raises `CannotBench`."""
    if not sys.platform.startswith("linux"):
        raise CannotBench("this benchmark needs Linux: it waits with epoll and reads /proc")
    targets, skipped = chosen(options)
    try:
        runs = asyncio.run(_rounds(options, targets, progress))
        pairs = asyncio.run(_pairs(options, progress)) if options.without_estimates else []
    except (ServerFailed, OSError) as error:
        raise CannotBench(str(error)) from None
    summary = figures(runs)
    judged = [promise.as_json() for promise in promises(runs, pairs)]
    side_loads = {key: beside(runs, name) for key, name in BESIDE.items()}
    compared = [row for report in side_loads.values() if report is not None for row in report["figures"]]
    why = invalid(runs)
    return {
        "machine": machine(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "tokens_per_request": MAX_TOKENS,
        "fsync_ms": round(fsync_ms(options.directory), 2),
        "targets": {
            target.name: {
                "version": target.version,
                "figures": summary[target.name],
                "runs": runs[target.name],
            }
            for target in targets
        },
        "skipped": skipped,
        "promises": judged,
        **side_loads,
        "invalid": why,
        "ok": None if why else all_ok([*judged, *compared]),
    }


def chosen(options: GatewayBenchOptions) -> tuple[list[BenchTarget], list[str]]:
    """The targets, and a line for each peer that is not installed. Raises `CannotBench`."""
    side_loads = [name for key, name in BESIDE.items() if getattr(options, key)]
    if side_loads and options.rounds < LEAST_ROUNDS:
        raise CannotBench(
            f"watchers, traces and a scraper need at least {LEAST_ROUNDS} rounds (--rounds): what they change"
            " is compared with the spread of the rounds without them"
        )
    names = PEERS if options.peers is None else tuple(dict.fromkeys(options.peers))
    targets, skipped = [direct()], []
    for name in names:
        if name not in PEERS:
            raise CannotBench(f"no peer {name!r}; there are {', '.join(PEERS)}")
        try:
            targets.append(peer(name, options.peers_dir))
        except PeerMissing as error:
            skipped.append(str(error))
    targets.append(fairgate(options.tokenizer_dir))
    if options.without_estimates:
        targets.append(fairgate(options.tokenizer_dir, estimates=False))
    if options.workers:
        for name, workers in ((ONE_WORKER, 1), (WORKERS, options.workers)):
            targets.append(fairgate(options.tokenizer_dir, beside=name, workers=workers))
    targets += [
        fairgate(options.tokenizer_dir, beside=name, watchers=options.watchers) for name in side_loads
    ]
    return targets, skipped


async def _rounds(
    options: GatewayBenchOptions, targets: Sequence[BenchTarget], progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    runs: dict[str, list[dict[str, Any]]] = {target.name: [] for target in targets}
    by_name = {target.name: target for target in targets}
    async with _upstream() as (port, upstreams):
        for number in range(options.rounds):
            for name in rotated(list(by_name), number):
                row = await _one(options, by_name[name], port, upstreams)
                runs[name].append(row)
                progress(
                    f"{number + 1}/{options.rounds} {name}: {row['requests_per_s']:,.0f} requests/s, "
                    f"{row['tokens_per_s']:,.0f} tokens/s"
                )
    return runs


async def _pairs(options: GatewayBenchOptions, progress: Progress) -> list[float]:
    ratios: list[float] = []
    async with _upstream() as (port, upstreams):
        for number in range(SERVERS):
            of_server = [ratio async for ratio in _pairs_of_server(options, port, upstreams)]
            ratios += of_server
            progress(
                f"with and without estimates, server {number + 1}/{SERVERS}: median of {PAIRS} pairs "
                f"{statistics.median(of_server):.3f}"
            )
    return ratios


async def _pairs_of_server(
    options: GatewayBenchOptions, port: int, upstreams: Sequence[int]
) -> AsyncIterator[float]:
    target = fairgate(options.tokenizer_dir)
    async with _opened(options, target, port) as serving:
        await _warm_up(options, target, serving, upstreams)
        for number in range(PAIRS):
            per_s: dict[bool, float] = {}
            for estimates in (True, False) if number % 2 == 0 else (False, True):
                await _switch_estimates(serving, estimates)
                seen = await _measure(target, serving, PAIR, options.seconds, upstreams)
                # To the last answer: a machine that pauses for a moment ends no request in time.
                per_s[estimates] = seen["requests"] / seen["wall_s"]
            yield per_s[True] / per_s[False]


async def _switch_estimates(serving: Serving, on: bool) -> None:
    """Switches estimates, and waits until answers show it. Raises `CannotBench`."""
    assert serving.process is not None
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{serving.port}", headers=serving.headers[0], timeout=SWITCH_S
    ) as client:

        async def is_switched() -> bool:
            answer = await client.post("/v1/chat/completions", json=CHAT)
            return ("x-fairgate-estimate" in answer.headers) == on

        if not await is_switched():
            os.kill(serving.process, signal.SIGUSR2)
            if not await until(is_switched, SWITCH_S):
                raise CannotBench(f"{OURS}: SIGUSR2 did not switch its estimates")


async def _one(
    options: GatewayBenchOptions, target: BenchTarget, port: int, upstreams: Sequence[int]
) -> dict[str, Any]:
    async with _opened(options, target, port) as serving:
        await _warm_up(options, target, serving, upstreams)
        phases = {
            phase.name: await _measure(target, serving, phase, options.seconds, upstreams) for phase in PHASES
        }
        processes = _processes(serving)
        report = one_run(phases, peak_bytes=peak_bytes(processes), quiet_cores=QUIET_CORES)
        if serving.scraper is not None:
            cost_s = await serving.scraper.cost_s(lambda: cpu_s(processes))
            report["side_load"] |= {"cpu_s_per_scrape": cost_s, "page_bytes": serving.scraper.page_bytes}
    return report


@contextlib.asynccontextmanager
async def _opened(options: GatewayBenchOptions, target: BenchTarget, port: int) -> AsyncIterator[Serving]:
    with tempfile.TemporaryDirectory(
        prefix="fairgate-bench-", dir=options.directory.absolute(), ignore_cleanup_errors=True
    ) as name:
        async with target.open(Path(name), port) as serving:
            yield serving


async def _warm_up(
    options: GatewayBenchOptions, target: BenchTarget, serving: Serving, upstreams: Sequence[int]
) -> None:
    for phase in WARM_UP:
        await _measure(target, serving, phase, options.seconds, upstreams)


async def _measure(
    target: BenchTarget, serving: Serving, phase: MeasuredPhase, seconds: float, upstreams: Sequence[int]
) -> dict[str, Any]:
    """Loads the target from a process of its own. Raises `CannotBench`."""
    order = {
        "port": serving.port,
        "requests": [_request(headers, streams=phase.streams) for headers in serving.headers],
        "connections": phase.connections,
        "seconds": seconds * phase.share,
        "tokens": MAX_TOKENS,
    }
    gateway, watchers = _processes(serving), serving.watchers
    events = watchers.fewest if watchers else 0

    def clocks() -> tuple[float, ...]:
        used = cpu_s(gateway), cpu_s(upstreams), machine_cpu_s()
        return *used, time.process_time(), time.perf_counter()

    before = clocks()
    seen = await _load(order)
    gateway_s, upstream_s, machine_s, own_s, wall_s = (
        now - then for now, then in zip(clocks(), before, strict=True)
    )
    if seen["errors"] or not seen["requests"]:
        raise CannotBench(f"{target.name}: {seen['first_error'] or 'no answer within the time'}")
    if watchers and watchers.ended:
        raise CannotBench(f"{target.name}: an open overview ended: {watchers.ended}")
    others_s = machine_s - gateway_s - upstream_s - own_s - seen["cpu_s"]
    return seen | {
        "gateway_cpu_s": gateway_s,
        "upstream_cpu_s": upstream_s,
        # This process does nothing but its side load while the clients send.
        "side_load_cpu_s": own_s,
        "watched_events": watchers.fewest - events if watchers else 0,
        "others_cores": max(0.0, others_s / wall_s),
    }


def _processes(serving: Serving) -> list[int]:
    return process_tree(serving.process) if serving.process is not None else []


def _request(headers: Any, *, streams: bool) -> str:
    """Two messages, as in a short chat; a stream asks for its usage, so that no gateway has to count."""
    body = CHAT | ({"stream": True, "stream_options": {"include_usage": True}} if streams else {})
    text = json.dumps(body)
    lines = ["POST /v1/chat/completions HTTP/1.1", "host: 127.0.0.1", "content-type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"content-length: {len(text)}", "", text])


async def _load(order: dict[str, Any]) -> dict[str, Any]:
    process = await _start("ops.bench.gateway.client")
    try:
        async with asyncio.timeout(order["seconds"] + LOAD_S):
            out, _ = await process.communicate(json.dumps(order).encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        raise CannotBench(f"the clients did not end within {LOAD_S:g} s") from None
    if process.returncode:
        raise CannotBench(f"the clients failed: {out.decode(errors='replace')[-500:]}")
    report: dict[str, Any] = json.loads(out)
    return report


@contextlib.asynccontextmanager
async def _upstream() -> AsyncIterator[tuple[int, list[int]]]:
    """The upstream's port and processes: on many cores several, so that it is never the narrowest."""
    processes: list[asyncio.subprocess.Process] = []
    port = 0
    try:
        for _ in range(max(1, (os.cpu_count() or 1) // 4)):
            process = await _start("ops.bench.gateway.mock_upstream", str(port))
            processes.append(process)
            assert process.stdout is not None
            line = await process.stdout.readline()
            if not line:
                raise CannotBench("the benchmark's upstream did not start")
            port = int(line)
        yield port, [process.pid for process in processes]
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


async def _start(module: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
