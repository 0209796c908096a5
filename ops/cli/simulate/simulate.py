"""`fairgate simulate`: policies on given traffic and machines, on a virtual clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Failure, PageCommand, answer
from ops.cli.simulate.options import (
    DEFAULT_POLICIES,
    TABLE_POLICIES,
    cut,
    machine_of,
    policies_of,
    run_and_answer,
    scenario_of,
    serving_options,
    trace_of,
)
from ops.reporting import table

if TYPE_CHECKING:
    from ops.simulate.presets import ScenarioPreset
    from ops.simulate.run import Scenario
    from ops.simulate.traffic.requests import Source


@click.command(cls=PageCommand)
@click.option(
    "--trace",
    "traces",
    metavar="FILE",
    multiple=True,
    help="CSV or CSV.gz with arrival_s, input_tokens, output_tokens and perhaps tenant, prefix_blocks (or"
    " Azure's columns); or azure, arena, servegen: those that ship with Fairgate. Several with --sustained.",
)
@click.option("--generate", metavar="SPEC", help="Tenants from a seed, such as tenants=20,rate=8,flooder=3.")
@click.option("--preset", metavar="NAME", help="chat, code, long-form, batch or seventy-b.")
@click.option("--rate", type=float, help="Requests a second, drawn: for a file of lengths alone.")
@serving_options()
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of whatever is drawn.")
@click.option(
    "--control",
    type=click.Choice(["off", "advice", "acting"]),
    default="off",
    show_default=True,
    help="The control loop, which turns knobs of queue, engines and admission.",
)
@click.option("--limit", type=click.IntRange(1), metavar="ROWS", help="The first requests alone.")
@click.option("--speed", type=float, default=1.0, show_default=True, help="So many times as fast as it was.")
@click.option(
    "--sustained", is_flag=True, help="The highest rate at which 90 % meet the SLO, by policy and trace."
)
def simulate(
    traces: tuple[str, ...],
    generate: str | None,
    preset: str | None,
    rate: float | None,
    policy: str | None,
    seed: int,
    limit: int | None,
    speed: float,
    sustained: bool,
    **asked: Any,
) -> None:
    """Simulates the queue and the engines on a virtual clock.

    Nothing is measured: the very scheduler, KV bookkeeping and queue that serve decide, and the time of a
    step comes from a GPU's data sheet (or from a profile). See docs/simulating.md.

    \b
      fairgate simulate --preset chat
      fairgate simulate --preset seventy-b
      fairgate simulate --trace azure --policy static,fcfs,hybrid --replicas 2 --html report.html
      fairgate simulate --trace day.csv.gz --gpu h100 --model 70b --tensor-parallel 4 --slo ttft=1,tpot=0.05
      fairgate simulate --generate tenants=20,rate=10,flooder=5,hot=2 --html flood.html
      fairgate simulate --sustained --trace azure --trace arena --limit 1000
      fairgate simulate --trace azure --gpu l40s --policy hybrid,learned --option learned_table=learned.json

    \b
    SPEC is NAME=NUMBER pairs: tenants, skew (Zipf), rate, seconds, onoff, flooder (times the rate), long,
    hot, cold (tenants of that kind), lengths=azure|arena|code|long-form|even.
    --json answers:
      {"source": "azure2023_conv.csv.gz", "machine": "8b on h200", "replicas": 1, "slo": "ttft 2 s, …",
       "policies": [{"policy": "hybrid", "ttft_s": {"p50": 0.04, …}, "attainment": 0.99, "goodput_per_s": 5.5,
         "jain_index": 0.99, "service_gap_over_bound": 0.01, "busy_share": 0.7, "tenants": {…}, …}]}
    and with --sustained:
      {"rows": [{"trace": "azure2023_conv", "rate_per_s": {"fcfs": 12.1, "hybrid": 13.0}, "best": "hybrid",
         "ratios": {"fcfs": 1.0, "hybrid": 1.07}, …}], "published": […]}
    """
    from ops.simulate.presets import PRESETS
    from ops.simulate.traffic.requests import BadTrace

    if (len(traces) > 0) + (generate is not None) + (preset is not None) != 1:
        raise click.UsageError("say one of --trace, --generate and --preset")
    if len(traces) > 1 and not sustained:
        raise click.UsageError("several --trace go with --sustained")
    if preset is not None and preset not in PRESETS:
        raise click.UsageError(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    chosen = PRESETS[preset] if preset is not None else None
    try:
        machine = machine_of(chosen, asked)
        sources = [trace_of(name, rate, seed) for name in traces] or [_source(chosen, generate, seed)]
        scenarios = [
            scenario_of(source if sustained else cut(source, speed, limit), machine, chosen, asked)
            for source in sources
        ]
        of_preset = ",".join(chosen.policies) if chosen else DEFAULT_POLICIES
        policies = policies_of(policy, TABLE_POLICIES if sustained else of_preset)
        if sustained:
            _sustained(scenarios, policies, limit)
            return
        run_and_answer(scenarios[0], policies)
    except BadTrace as error:
        raise Failure(str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _source(chosen: ScenarioPreset | None, generate: str | None, seed: int) -> Source:
    from ops.simulate.traffic.generate import Generated, Spec

    if chosen is not None:
        return chosen.source(seed)
    return Generated(Spec.of(generate or ""), seed)


def _sustained(scenarios: list[Scenario], policies: list[str], limit: int | None) -> None:
    from ops.reporting import number, plain
    from ops.simulate.sustained import PUBLISHED, compare, named

    def tell(trace: str, name: str) -> None:
        click.echo(f"{trace}: {name}", err=True)

    rows = compare(
        [(named(scenario.source), scenario) for scenario in scenarios], policies, limit=limit, on_policy=tell
    )

    def text() -> None:
        table(
            f"requests/s at which {100 * rows[0]['wanted']:.0f} % meet {rows[0]['slo']}; "
            f"{rows[0]['replicas']} x {rows[0]['machine']}",
            ("trace", *policies, "best", "ratios to static"),
            [
                (
                    row["trace"],
                    *(
                        (">= " if policy in row["at_least"] else "") + number(row["rate_per_s"][policy])
                        for policy in policies
                    ),
                    row["best"]
                    + (" (hybrid as good)" if row["hybrid_is_best"] and row["best"] != "hybrid" else ""),
                    " : ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratios"].items()),
                )
                for row in rows
            ],
        )
        click.echo("\npublished, on other machines and traffic:")
        for line in PUBLISHED:
            click.echo(f"  {line}")

    answer(plain({"rows": rows, "published": list(PUBLISHED)}), text)
