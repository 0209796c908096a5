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
from ops.bench.estimates import calibration
from ops.bench.estimates.fidelity import FidelityOptions
from ops.bench.fairness import live
from ops.bench.gateway.run import GatewayBenchOptions
from ops.cli.bench import engine as engine_cli
from ops.cli.bench import fairness as fairness_cli
from ops.cli.bench import forecast as forecast_cli
from ops.cli.bench import gateway as gateway_cli


def test_an_option_that_a_benchmark_would_ignore_is_refused() -> None:
    result = CliRunner().invoke(fairness_cli.fairness, ["--decode", "--scenario", "flood"])
    assert result.exit_code == 2
    assert "--scenario does not go with --decode" in result.output


@pytest.mark.parametrize(
    ("command", "target", "own"),
    [
        (engine_cli.engine, EngineBenchOptions, {"no_roofline"}),
        (engine_cli.scheduler, scheduler_cost.run, set()),
        (fairness_cli.fairness, live.run, {"decode"}),
        (fairness_cli.calibration, calibration.run, {"bursts", "model"}),
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
    required = {name for name, argument in arguments.items() if argument.default is inspect.Parameter.empty}
    assert required - {"progress"} <= given
