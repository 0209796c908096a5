"""The demo, from an empty directory to its report."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console
from rich.live import Live

from engine.scheduling.policy import DEFAULT_POLICY
from ops.demo import forms, turns
from ops.demo.audit import audit
from ops.demo.calibrate import Capacity, calibrate, engine_status, until_idle
from ops.demo.cast import CAST, planned_tokens
from ops.demo.logbook import events_of
from ops.demo.prompts.prompts import Prompts
from ops.demo.replay import Board, PlannedRequest, replay
from ops.demo.report import MIN_BACKLOG_S, DemoEvidence, build_report, verdict
from ops.demo.simulate import past_requests, served_machine, simulate
from ops.demo.stage import DemoTenants, set_limits, set_stage
from ops.demo.summary import report_page, summary
from ops.demo.trace import ReplayPlan, load_slice, plan
from ops.demo.watch import DemoSampler
from ops.sandbox.core_use import CoreUse, longest_waited_share, watch_core_use
from ops.sandbox.page_check import page_sums
from ops.sandbox.server import LocalServer, LogReader, ServerFailed, local_server
from ops.sandbox.usage_check import usage_differences
from ops.settings.settings import SHIPPED_MODEL

OVERLOAD = 1.8
"""Offered load over measured capacity; limits refuse some of it, and the prefix cache has some already."""
CALIBRATION_REQUESTS = 128
ENGINE_THREADS = 1
"""The model is so small that a second thread mostly waits, and gateway and client need a core."""
MAX_SEQUENCES = 3
"""With more, this small model answers faster than one process of clients can read: they would limit it."""
TOKENS_PER_S = 1_200
"""Ceiling of the engine, prompts included: a core computes that in some half of its time."""
FULL_SPAN_S = 60.0
"""A replay of at least this length must show `MIN_BACKLOG_S` of backlog; a shorter one is a first look."""
MAX_DRAIN_S = 65.0
"""Requests that still run this long after the last arrival are cut: the machine is too slow by far."""
PLAIN_EVERY_S = 5.0
PLAIN_WIDTH = 120
ENGINE_FACTS = ("model", "policy", "max_sequences", "preemptions", "step_time")
INTERRUPTED = 130


@dataclass(frozen=True)
class DemoOptions:
    once: bool = False
    json_file: Path | None = None
    html_file: Path | None = None
    span_s: float = 75.0
    seed: int = 20
    port: int = 0
    max_sequences: int = MAX_SEQUENCES
    model: Path | None = None
    data_dir: Path | None = None


def run_demo(options: DemoOptions) -> int:
    """Returns the exit code (1: a requirement failed, or the demo could not start)."""
    # The report may go to stdout: all other output then goes to stderr.
    console = Console(stderr=options.json_file == Path("-"), highlight=False)
    if not console.is_terminal:
        console = Console(stderr=console.stderr, highlight=False, width=PLAIN_WIDTH)
    try:
        with _directory(options) as data_dir:
            return asyncio.run(_run(options, data_dir, console))
    except ServerFailed as error:
        print(f"fairgate demo: {error}", file=sys.stderr)
        return 1
    except httpx.HTTPError as error:
        print(
            f"fairgate demo: the server stopped answering: {error or type(error).__name__}", file=sys.stderr
        )
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return INTERRUPTED


@contextlib.contextmanager
def _directory(options: DemoOptions) -> Iterator[Path]:
    if options.data_dir is not None:
        if (options.data_dir / "fairgate.db").exists():
            raise ServerFailed(
                f"{options.data_dir} has a database already; the demo needs an empty directory"
            )
        yield options.data_dir.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="fairgate-demo-", ignore_cleanup_errors=True) as path:
        yield Path(path)


async def _run(options: DemoOptions, data_dir: Path, console: Console) -> int:
    _end_in_order()
    started_s = time.monotonic()
    model = (options.model or SHIPPED_MODEL).absolute()
    console.print(
        "Fairgate demo, 3 to 5 minutes: 27 tenants send a recorded trace to a small model on this machine. A"
        " live table\nshows who waits and who is served; then a report shows if all got their fair share."
    )
    console.print(f"Starting in {data_dir} …")
    # What is scarce must be the engine, on a fast machine as on one with other work to do.
    arguments = ["--model", str(model), "--log-level", "warning", "--engine-threads", str(ENGINE_THREADS)]
    arguments += ["--engine-max-sequences", str(options.max_sequences)]
    arguments += ["--engine-max-tokens-per-s", str(TOKENS_PER_S)]
    if options.model:
        arguments += ["--prices", f"{model.resolve().name}=0/0"]
    trace = load_slice()
    making = asyncio.create_task(asyncio.to_thread(Prompts.make, model, trace, options.seed))
    async with contextlib.AsyncExitStack() as closing:
        try:
            server = await closing.enter_async_context(
                local_server(data_dir, arguments=arguments, port=options.port)
            )
        finally:
            prompts = await making
        stage = await set_stage(data_dir, server.model)
        _invite(console, server, stage)
        report = await _play(options, server, stage, prompts, console)
        report["wall_s"] = time.monotonic() - started_s
        await _hand_over(options, report, console)
        if options.once:
            return 0 if report["ok"] else 1
        _invite(console, server, stage)
        console.print("It stays up until Ctrl-C.")
        await _until_stopped(server)
        return 0 if report["ok"] else 1


def _end_in_order() -> None:
    """Ends the server, too, when a signal ends the demo early (asyncio does so for Ctrl-C)."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)


async def _play(
    options: DemoOptions, server: LocalServer, stage: DemoTenants, prompts: Prompts, console: Console
) -> dict[str, Any]:
    async with server.operator() as client:
        core_uses: list[CoreUse] = []
        engine_pid = (await engine_status(client))["pid"]
        watching_cores = asyncio.create_task(watch_core_use(engine_pid, core_uses))
        console.print("Measuring what this machine can do …")
        bodies = [prompts.body(place, server.model) for place in prompts.spread(CALIBRATION_REQUESTS)]
        capacity = await calibrate(server, bodies)
        await until_idle(client)
        replayed = plan(
            prompts.trace,
            capacity_cost_per_s=capacity.cost_tokens_per_s,
            overload=OVERLOAD,
            span_s=options.span_s,
        )
        await set_limits(server.data_dir, planned_tokens(replayed.requests))
        console.print(
            f"{capacity.cost_tokens_per_s:,.0f} cost tokens/s ({capacity.output_tokens_per_s:,.0f} output"
            f" tokens/s). Replaying {len(replayed.requests)} requests of {len(CAST)} tenants,"
            f" {replayed.time_compression:.1f} times as fast as recorded, lengths x {replayed.length_factor}:"
            f" {replayed.offered_load:.2f} times the capacity for {options.span_s:g} s."
        )
        planned = [
            PlannedRequest(
                one.arrival_s,
                one.tenant,
                stage.tiers[one.tenant],
                stage.keys[one.tenant],
                prompts.body(one.place, server.model),
                one.input_tokens,
                one.output_tokens,
            )
            for one in replayed.requests
        ]
        board, log = Board(), LogReader(client)
        watch = DemoSampler(client, board, CAST, stage.names, log)
        await watch.sample()
        watching = asyncio.create_task(watch.run())
        showing = asyncio.create_task(_show(watch, console))
        playing = asyncio.create_task(replay(server.url, planned, board))
        try:
            await asyncio.wait({playing}, timeout=options.span_s + MAX_DRAIN_S)
            duration_s = board.now_s()
        finally:
            for task in (playing, watching, showing):
                task.cancel()
            ended = await asyncio.gather(playing, watching, showing, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, Exception):
                raise outcome
        await until_idle(client)
        await watch.sample()
        await log.read()
        decoded = await turns.turns(server, client, stage.keys, stage.ids)
        # Another model may have no place for tools, and knows nothing of these questions.
        formed = {} if options.model else await forms.forms(server, stage.visitor_key, options.seed)
        await until_idle(client)
        watching_cores.cancel()
        console.print("Verifying the ledger and the console's pages, simulating FCFS on the same arrivals …")
        verified = await client.post("/admin/v1/ledger/verify", timeout=120.0)
        verified.raise_for_status()
        books = verified.json()
        database_url = f"sqlite:///{server.data_dir / 'fairgate.db'}"
        async with httpx.AsyncClient(base_url=server.url, timeout=client.timeout) as visitor:
            pages = await page_sums(client, visitor, database_url)
        wrong = [*await usage_differences(client, database_url), *pages.differences]
        books |= {"ok": books["ok"] and not wrong, "problems": [*books["problems"], *wrong]}
        books["pages"] = {"read": pages.pages, "differences": pages.differences}
        return await asyncio.to_thread(
            _account, options, replayed, capacity, board, watch, log, stage, books, decoded, formed,
            core_uses, duration_s,
        )  # fmt: skip


def _account(
    options: DemoOptions, replayed: ReplayPlan, capacity: Capacity, board: Board, watch: DemoSampler,
    log: LogReader, stage: DemoTenants, verified: dict[str, Any], decoded: dict[str, Any],
    formed: dict[str, Any], core_uses: list[CoreUse], duration_s: float,
) -> dict[str, Any]:  # fmt: skip
    """Gateway and client share the machine's monotonic clock."""
    everything = events_of(log.records)
    audited = audit(everything)
    events = [
        replace(event, at_s=event.at_s - board.started_s, tenant=stage.names[event.tenant])
        for event in everything
        if event.tenant in stage.names
    ]
    engine = watch.status["engines"][0]
    machine = served_machine(engine, TOKENS_PER_S)
    arrivals = past_requests(board.sent, stage.weights)
    simulated = {policy: simulate(policy, arrivals, machine) for policy in (DEFAULT_POLICY, "fcfs")}
    evidence = DemoEvidence(
        cast=CAST,
        replay=replayed,
        sent=board.sent,
        samples=watch.samples,
        events=events,
        audit=audited,
        ledger={"exact": verified["ok"] and not log.lost, "log_records_lost": log.lost} | verified,
        capacity=msgspec.to_builtins(capacity),
        engine={
            **{name: engine[name] for name in ENGINE_FACTS},
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
        },
        turns=decoded,
        forms=formed,
        waited_for_a_core=longest_waited_share(core_uses),
        duration_s=duration_s,
        simulated_waits_s={policy: waits_s for policy, (_, waits_s) in simulated.items()},
        simulated_duration_s={policy: pool.now_s for policy, (pool, _) in simulated.items()},
        bound_after=watch.bound_after,
        cut=sum(not sent.ok and sent.refusal is None for sent in board.sent),
    )
    report = build_report(evidence)
    least_backlog_s = MIN_BACKLOG_S if options.span_s >= FULL_SPAN_S else 0.0
    failed = verdict(report, min_backlog_s=least_backlog_s)
    return {"ok": not failed, "failed": failed} | report


async def _show(watch: DemoSampler, console: Console) -> None:
    if not console.is_terminal:
        while True:
            await asyncio.sleep(PLAIN_EVERY_S)
            console.print(watch.view("replay").headline(), soft_wrap=True)
    with Live(console=console, refresh_per_second=2, transient=True) as live:
        while True:
            live.update(watch.view("replay"))
            await asyncio.sleep(0.5)


def _invite(console: Console, server: LocalServer, stage: DemoTenants) -> None:
    console.print(f"\nAPI page  {server.docs_url}\nAPI key   {stage.visitor_key}", soft_wrap=True)
    body = json.dumps(
        {"model": server.model, "messages": [{"role": "user", "content": "Count from 3 to 9."}]}
    )
    console.print(
        f"Try it    curl {server.url}/v1/chat/completions -H 'Authorization: Bearer {stage.visitor_key}'"
        f" -H 'Content-Type: application/json' -d '{body}'\n",
        soft_wrap=True,
        markup=False,
    )


async def _hand_over(options: DemoOptions, report: dict[str, Any], console: Console) -> None:
    console.print(summary(report))
    if report["failed"]:
        console.print("NOT as it must be: " + "; ".join(report["failed"]), style="bold red")
    if options.html_file is not None:
        await asyncio.to_thread(options.html_file.write_text, report_page(report), encoding="utf-8")
    if options.json_file is not None:
        text = json.dumps(report, indent=2) + "\n"
        if options.json_file == Path("-"):
            print(text, end="", flush=True)
        else:
            await asyncio.to_thread(options.json_file.write_text, text, encoding="utf-8")


async def _until_stopped(server: LocalServer) -> None:
    """Until Ctrl-C or SIGTERM; `ServerFailed` when the server goes away by itself."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    waiting = {asyncio.create_task(stopped.wait()), asyncio.create_task(server.process.wait())}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    if not stopped.is_set():
        raise ServerFailed(f"it ended with exit code {server.process.returncode}")
