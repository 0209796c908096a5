"""Options of `fairgate bench` against the arguments of their benchmarks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ops.bench.budgets.run import BudgetBenchOptions
from ops.bench.engine import scheduler_cost
from ops.bench.engine.run import EngineBenchOptions
from ops.bench.estimates import estimates
from ops.bench.estimates.fidelity import FidelityOptions
from ops.bench.fairness import live
from ops.bench.gateway.run import GatewayBenchOptions
from ops.cli.bench import engine as engine_cli
from ops.cli.bench import fairness as fairness_cli
from ops.cli.bench import forecast as forecast_cli
from ops.cli.bench import gateway as gateway_cli


@pytest.mark.parametrize(
    ("arguments", "refused"),
    [
        (["--virtual", "--model", "m"], "--model does not go with --virtual"),
        (["--virtual", "--runs", "2"], "--runs does not go with --virtual"),
        (["--decode", "--scenario", "flood"], "--scenario does not go with --decode"),
    ],
)
def test_an_option_that_a_benchmark_would_ignore_is_refused(arguments: list[str], refused: str) -> None:
    result = CliRunner().invoke(fairness_cli.fairness, arguments)
    assert result.exit_code == 2
    assert refused in result.output


@pytest.mark.parametrize(
    ("command", "target", "own"),
    [
        (engine_cli.engine, EngineBenchOptions, {"no_roofline"}),
        (engine_cli.scheduler, scheduler_cost.run, set()),
        (fairness_cli.fairness, live.run, {"virtual", "decode"}),
        (fairness_cli.estimates, estimates.run, set()),
        (gateway_cli.contract, BudgetBenchOptions, {"json_file"}),
        (gateway_cli.gateway, GatewayBenchOptions, {"json_file"}),
        (forecast_cli.fidelity, FidelityOptions, set()),
    ],
)
def test_every_option_is_an_argument_of_its_benchmark(
    command: click.Command, target: Callable[..., Any], own: set[str]
) -> None:
    given = {param.name for param in command.params if param.expose_value} - own
    arguments = inspect.signature(target).parameters
    assert given <= set(arguments)
    required = {name for name, each in arguments.items() if each.default is inspect.Parameter.empty}
    assert required - {"progress"} <= given
