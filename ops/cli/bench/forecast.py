"""`fairgate bench fidelity|control`: simulator and control loop."""

from __future__ import annotations

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
                f"no policy {name!r}; there are {', '.join(POLICIES)}", param_hint="--policy"
            )
    options = measuring.FidelityOptions(**given)
    try:
        report = measuring.run(options, tell)
    except (ServerFailed, httpx.HTTPError) as error:
        raise Failure(f"the server did not serve: {error}") from None
    verdict(report, lambda: measuring.show(report))


@command()
@click.option(
    "--trace",
    "traces",
    metavar="FILE",
    multiple=True,
    help="Also this traffic, as for `fairgate simulate` (repeat).",
)
@whole("--replicas", least=1, most=256, default=1, help="Of an 8B model, each on an H200, for traces.")
@whole("--limit", least=1, metavar="ROWS", help="The first requests of a trace alone.")
@click.option("--slo", metavar="TARGETS", default="ttft=2,tpot=0.1", show_default=True, help="In seconds.")
def control(traces: tuple[str, ...], replicas: int, limit: int | None, slo: str) -> None:
    """Does the control loop do as well as the best fixed setting, without swinging?

    
    On virtual time: the published setting dist_shift, and traces, with the loop off and its knobs at several
    settings, with its advice, and acting. By segments (of 5 minutes; of traces, 10) attainment may be a
    point below the best fixed setting, one knob may turn back in a minute, and advice may change nothing.
    --json answers:
      {"cases": [{"case": "dist_shift", "segments": [{"from_s": 0, "fixed": {"2 ahead, strictness 0": 0.16,
       …}, "best_fixed": "2 ahead, strictness 1.5", "acting": 0.72, "below_best": 0.0}, …], "moves": 12,
       "most_reversals_a_minute": 1, "advice_changes_nothing": true, "ok": true}, …], "ok": true}
    """
    from ops.bench.estimates import control as measuring
    from ops.cli.simulate.options import cut, trace_of
    from ops.simulate.machines.machines import roofline_machine
    from ops.simulate.slo import SloLimits
    from ops.simulate.traffic.requests import BadTrace

    try:
        targets = SloLimits.of(slo)
        cases = [measuring.dist_shift(targets)]
        for name in traces:
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
