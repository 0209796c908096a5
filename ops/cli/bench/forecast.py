"""`fairgate bench fidelity|control`: simulator and control loop."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from ops.cli.base import Failure
from ops.cli.bench.options import (
    MODEL_OPTION,
    command,
    listed,
    names_given,
    tell,
    verdict,
    whole,
)


@command()
@listed(
    "--policy", "policies", metavar="NAME,…", default="fcfs,sjf,vtc,hybrid", parse=names_given, help="Which."
)
@whole(
    "--repetitions",
    least=2,
    most=100,
    default=3,
    help="What a simulation falls short of is learned from the others of its policy.",
)
@click.option(
    "--seconds", type=click.FloatRange(2, 3600), default=180.0, show_default=True, help="Of each replay."
)
@click.option(
    "--load",
    type=click.FloatRange(0.05, 0.95),
    default=0.7,
    show_default=True,
    help="Of what the server can do, measured first.",
)
@whole("--seed", least=0, default=1, help="Of the requests.")
@MODEL_OPTION
def fidelity(**given: Any) -> None:
    """Does the simulator say what the real engine then does?

    \b
    A fresh server serves a drawn stream under each policy, in turn; what its ledger and timelines recorded is
    simulated with the step times that its engine learned. Some 45 minutes; measure when nothing else runs.
    Ends with 1 where throughput is off by more than 5 %, TTFT p50 by 15 %, p99 by 25 % or 1.5 times what real
    runs differ by, or where the policies come in another order.
    --json answers:
      {"rate_per_s": 14.2, "policies": [{"policy": "vtc", "requests": 7650, "throughput_ratio": 1.01,
       "ttft_p50_ratio": 0.96, "ttft_p99_ratio": 0.9, "real_ttft_p99_spread": 0.2, …}, …],
       "checks": [{"what": "vtc, TTFT p50", "value": 0.96, "wanted": "within 15 %", "ok": true}, …],
       "ok": true}
    """
    import httpx

    from engine.scheduling.policy import POLICIES
    from ops.bench.estimates import fidelity as measuring
    from ops.sandbox.server import ServerFailed

    for name in given["policies"]:
        if name not in POLICIES:
            raise click.BadParameter(
                f"no policy {name!r}; there are {', '.join(sorted(POLICIES))}", param_hint="--policy"
            )
    options = measuring.FidelityOptions(**given)
    try:
        report = measuring.run(options, tell)
    except (ServerFailed, httpx.HTTPError) as error:
        raise Failure(f"the server did not serve: {error}") from None
    verdict(report, lambda: measuring.show(report))


@command()
@whole("--seeds", least=1, most=20, default=3, help="Streams of requests.")
@click.option(
    "--duration", type=click.FloatRange(10, 3600), default=120.0, show_default=True, help="Of each, seconds."
)
@click.option(
    "--load", type=click.FloatRange(0.1, 10), default=1.4, show_default=True, help="Of the engine's capacity."
)
@whole("--gateways", least=1, most=8, default=1, help="That share the queue.")
@whole("--busy", least=0, most=64, default=0, help="Processes beside them that only compute.")
@click.option(
    "--trace",
    "traces",
    metavar="FILE",
    multiple=True,
    help="Instead, on virtual time: this traffic, as for `fairgate simulate`, or dist_shift (repeat).",
)
@whole("--replicas", least=1, most=256, default=1, help="Of an 8B model, each on an H200, for traces.")
@whole("--limit", least=1, metavar="ROWS", help="The first requests of a trace alone.")
@click.option("--slo", metavar="TARGETS", default="ttft=2,tpot=0.1", show_default=True, help="Of traces.")
def control(traces: tuple[str, ...], replicas: int, limit: int | None, slo: str, **live: Any) -> None:
    """Does the control loop serve in time what can be served in time, without swinging?


    Starts its own PostgreSQL, Redis, engine (10 tokens/s) and gateways, with the loop off and acting in turn;
    a load of half the capacity follows each run. Ends with 1 where acting serves less than 0.85 of what could
    have been in time (0.65 beside busy loops), or refuses 30 s after the overload. With --trace on virtual
    time: the loop off at several settings, with its advice, and acting; by segments (of 5 minutes; of traces,
    10) attainment may be a point below the best fixed setting, one knob may turn back in a minute, and advice
    may change nothing.
    --json answers:
      {"rows": [{"seed": 1, "mode": "acting", "requests": 129, "could": 0.72, "in_time": 0.65,
       "simulated": 0.66, "refused": 40, "use": 0.95, "refused_later": 0, "strictness_later": 0.0, …}, …],
       "of_could": 0.9, "least": 0.85, "refused_later": 0, "ok": true}
    --trace --json answers:
      {"cases": [{"case": "dist_shift", "segments": [{"from_s": 0, "fixed": {"2 ahead, strictness 0": 0.16,
       …}, "best_fixed": "2 ahead, strictness 1.5", "acting": 0.72, "below_best": 0.0}, …], "moves": 12,
       "most_reversals_a_minute": 1, "advice_changes_nothing": true, "ok": true}, …], "ok": true}
    """
    if traces:
        _control_of_traces(traces, replicas, limit, slo)
        return
    from ops.bench.budgets.testbed import ScenarioFailed
    from ops.bench.common.errors import CannotBench
    from ops.bench.estimates import control_live
    from ops.sandbox.server import ServerFailed
    from ops.sandbox.services import NoServer

    try:
        report = asyncio.run(control_live.run(control_live.LiveOptions(**live), tell))
    except (CannotBench, NoServer, ScenarioFailed, ServerFailed) as error:
        raise Failure(str(error)) from None
    verdict(report, lambda: control_live.show(report))


def _control_of_traces(traces: tuple[str, ...], replicas: int, limit: int | None, slo: str) -> None:
    from ops.bench.estimates import control as measuring
    from ops.cli.simulate.options import cut, trace_of
    from ops.simulate.machines.machines import roofline_machine
    from ops.simulate.slo import SloLimits
    from ops.simulate.traffic.requests import BadTrace

    try:
        targets = SloLimits.of(slo)
        cases = []
        for name in traces:
            if name == measuring.DIST_SHIFT:
                cases.append(measuring.dist_shift(targets))
                continue
            source = cut(trace_of(name), 1.0, limit)
            machine = roofline_machine("h200", "8b")
            segment_s = measuring.TRACE_SEGMENT_S
            cases.append(measuring.ControlCase(source.name, source, machine, replicas, segment_s, targets))
        report = measuring.run(cases, tell)
    except BadTrace as error:
        raise Failure(str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    verdict(report, lambda: measuring.show(report))
