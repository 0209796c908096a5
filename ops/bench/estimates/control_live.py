"""Benchmark of the control loop on a live server under overload, off and acting, beside the simulator.

PostgreSQL, Redis, the gateways, a load process for each, and an engine with a ceiling of tokens a second are
started here. After the overload comes a load below the capacity: nobody may be refused once `LET_GO_S` have
passed. What could have been in time: tokens that the engine computes until the last target, over those asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from statistics import mean
from typing import Any

from engine.messages import StepTime
from gateway.flow.control_rules import ControlMode
from gateway.flow.knobs import Knob
from ops.bench.budgets.testbed import Testbed, open_testbed
from ops.bench.common.load import SEED, LoadClient, admin_call, load_client, server_status
from ops.bench.common.load_client import poisson_instants
from ops.bench.common.processes import end
from ops.bench.estimates.control import ControlCase, Drawn, attainment, served
from ops.reporting import Report, verdict
from ops.simulate.machines.machines import profile_machine
from ops.simulate.slo import SloLimits
from ops.simulate.traffic.requests import SimulatedRequest

PLACES = 2
TOKENS_PER_S = 10
TARGET_S = 5.0
POLICY = "hybrid"
PROMPT_TOKENS = (2, 6)
OUTPUT_TOKENS = (4, 14)
SIZES = 97
"""Different requests, sent over and over."""
WARM_UP_S = 20.0
"""At half of the capacity: forecasts learn."""
CALM_LOAD = 0.5
LET_GO_S = 30.0
LEAST_QUIET, LEAST_BUSY = 0.85, 0.65
"""Of what could have been in time, without and beside busy loops."""
MOST_OPEN = 10_000
TENANT = "load"
MODES = (ControlMode.OFF, ControlMode.ACTING)
MACHINE = profile_machine(
    f"{PLACES} places, {TOKENS_PER_S} tokens/s",
    StepTime(0.0, 1 / TOKENS_PER_S, 0.0, 0.0, samples=0, relative_error=0.0),
    kv_tokens=16_384,
    max_sequences=PLACES,
    max_batched_tokens=512,
    context_tokens=4_096,
)

Figures = dict[str, Any]
Size = tuple[int, int]
"""Tokens of the prompt and of the answer."""


@dataclass(frozen=True, slots=True)
class LiveOptions:
    seeds: int = 3
    duration: float = 120.0
    load: float = 1.4
    gateways: int = 1
    busy: int = 0


def sizes(seed: int) -> list[Size]:
    rng = random.Random(seed)
    return [(rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)) for _ in range(SIZES)]


def computed(size: Size) -> int:
    """Tokens that the engine computes: the last one of an answer is only sampled."""
    return size[0] + size[1] - 1


def per_s(load: float, asked: Sequence[Size]) -> float:
    """Requests a second that are `load` times the engine's capacity."""
    return load * TOKENS_PER_S / mean(map(computed, asked))


def plan(
    tenants: Sequence[str], asked: Sequence[Size], rate: float, seconds: float
) -> list[SimulatedRequest]:
    return sorted(
        (
            SimulatedRequest(at_s, tenant, *asked[number % len(asked)])
            for tenant in tenants
            for number, at_s in enumerate(
                takewhile(
                    lambda at_s: at_s < seconds,
                    poisson_instants(random.Random(f"{SEED} {tenant}"), rate / len(tenants)),
                )
            )
        ),
        key=lambda request: request.arrival_s,
    )


def could_share(requests: Sequence[SimulatedRequest], seconds: float) -> float:
    wanted = sum(computed((one.input_tokens, one.output_tokens)) for one in requests)
    return min(1.0, TOKENS_PER_S * (seconds + TARGET_S) / wanted)


def live_case(requests: Sequence[SimulatedRequest], segment_s: float) -> ControlCase:
    slo = SloLimits(TARGET_S, float("inf"))
    drawn = Drawn("live", tuple(replace(each, tenant=TENANT) for each in requests))
    return ControlCase("live", drawn, MACHINE, 1, segment_s, slo, POLICY)


async def run(options: LiveOptions, progress: Callable[[str], None]) -> Figures:
    """Raises `NoServer`, `ServerFailed`, `ScenarioFailed`, `CannotBench`."""
    rows: list[Figures] = []
    for seed in range(1, options.seeds + 1):
        asked, tenants = sizes(seed), [f"load-{seed}-{number}" for number in range(options.gateways)]
        requests = plan(tenants, asked, per_s(options.load, asked), options.duration)
        case = live_case(requests, options.duration + 1)
        for mode in MODES:
            progress(f"seed {seed}, {mode.value}")
            [simulated] = attainment(case, served(case, mode)[0].records)
            rows.append(
                {
                    "seed": seed,
                    "mode": mode.value,
                    "requests": len(requests),
                    "could": could_share(requests, options.duration),
                    "simulated": simulated,
                    **await _serve(options, mode, asked, requests),
                }
            )
    return asdict(options) | {"rows": rows} | judge(rows, LEAST_BUSY if options.busy else LEAST_QUIET)


def judge(rows: Sequence[Figures], least: float) -> Figures:
    acting = [row for row in rows if row["mode"] == ControlMode.ACTING.value]
    of_could = mean(row["in_time"] for row in acting) / mean(row["could"] for row in acting)
    refused_later = sum(row["refused_later"] for row in acting)
    return {
        "of_could": of_could,
        "least": least,
        "refused_later": refused_later,
        "ok": of_could >= least and not refused_later,
    }


async def _serve(
    options: LiveOptions,
    mode: ControlMode,
    asked: Sequence[Size],
    requests: Sequence[SimulatedRequest],
) -> Figures:
    engine = {"max_sequences": PLACES, "max_tokens_per_s": TOKENS_PER_S}
    tenants = sorted({request.tenant for request in requests})
    async with (
        open_testbed(lambda line: None, engine, ("--gateway-control", mode.value)) as testbed,
        _busy_loops(options.busy),
        AsyncExitStack() as closing,
    ):
        await testbed.start_gateways(options.gateways)
        await testbed.ready()
        operator = await closing.enter_async_context(testbed.servers[0].operator())
        target = {"tier": "standard", "metric": "ttft", "target_s": TARGET_S}
        await admin_call(operator, "POST", "slos", target)
        warm, loads, calm = [
            [await closing.enter_async_context(each) for each in await _clients(testbed, names, asked)]
            for names in ([f"warm-{one}" for one in tenants], tenants, [f"calm-{one}" for one in tenants])
        ]
        low = per_s(CALM_LOAD, asked)
        await _start(warm, low, round(low * WARM_UP_S / len(warm)))
        await asyncio.gather(*(client.finish() for client in warm), *(client.take() for client in loads))
        counts = [sum(request.tenant == tenant for request in requests) for tenant in tenants]
        await _start(loads, per_s(options.load, asked), *counts)
        await asyncio.sleep(options.duration)
        seen = await asyncio.gather(*(client.take() for client in loads))
        await _start(calm, low, None)
        await asyncio.sleep(LET_GO_S)
        await asyncio.gather(*(client.take() for client in calm))
        await asyncio.sleep(LET_GO_S)
        later = await asyncio.gather(*(client.take() for client in calm))
        status = await server_status(operator)
        rest = await asyncio.gather(*(client.finish() for client in loads))
    strictness = status["models"]["pools"][testbed.model]["control"]["in_force"][Knob.ADMISSION.value]
    tokens = sum(
        computed((account["actual"]["input_tokens"], account["actual"]["output_tokens"]))
        for one in seen
        for account in one.accounts
    )
    ttfts_s = [ttft_s for one in (*seen, *rest) for ttft_s in one.ttfts_s]
    return {
        "in_time": sum(ttft_s <= TARGET_S for ttft_s in ttfts_s) / len(requests),
        "refused": sum(one.refused for one in (*seen, *rest)),
        "use": tokens / TOKENS_PER_S / options.duration,
        "refused_later": sum(one.refused for one in later),
        "strictness_later": strictness,
        "client_cpu_share": max(one.cpu_share for one in seen),
        "load_average": os.getloadavg()[0],
    }


async def _clients(
    testbed: Testbed, names: Sequence[str], asked: Sequence[Size]
) -> list[AbstractAsyncContextManager[LoadClient]]:
    tenant = await testbed.tenant(names[0])
    await testbed.known(tenant)
    bodies = [
        {
            "model": testbed.model, "prompt": list(range(5, 5 + prompt)), "max_tokens": output,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }
        for prompt, output in asked
    ]  # fmt: skip
    return [
        load_client(name, f"{server.url}/v1/completions", tenant.key, bodies)
        for name, server in zip(names, testbed.servers, strict=True)
    ]


async def _start(clients: Sequence[LoadClient], rate: float, *counts: int | None) -> None:
    """`rate`: of all together; `counts`: requests of each, or one number for all; None: until the end."""
    for client, count in zip(clients, counts * (len(clients) // len(counts)), strict=True):
        await client.poisson(rate / len(clients), count=count, most_open=MOST_OPEN)


@contextlib.asynccontextmanager
async def _busy_loops(count: int) -> AsyncIterator[None]:
    loops = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass") for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in loops:
            await end(process)


def show(report: Figures) -> None:
    Report(
        f"share with a TTFT of at most {TARGET_S:g} s: {PLACES} places, {TOKENS_PER_S} tokens/s, load"
        f" {report['load']:g}, {POLICY}, {report['gateways']} gateways, {report['busy']} busy loops",
        (
            ("seed", "seed"), ("mode", "loop"), ("requests", "requests"), ("could", "could have", ".1%"),
            ("in_time", "in time", ".1%"), ("simulated", "simulated", ".1%"), ("refused", "refused"),
            ("use", "use of the engine", ".0%"), ("refused_later", f"refused {LET_GO_S:g} s after"),
            ("strictness_later", "strictness then", "g"), ("client_cpu_share", "client's CPU", ".1%"),
            ("load_average", "load average", ".1f"),
        ),
        report["rows"],
    ).show()  # fmt: skip
    print(
        f"acting over what could have been: {report['of_could']:.2f}, at least {report['least']:g};"
        f" {report['refused_later']} refused later: {verdict(report)}"
    )
