"""Reports as pages: figures are those of `--json`, and a browser that opens them from disk finds no fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from engine.forecast.length.features import features_of
from engine.forecast.length.length import LengthForecast
from gateway.estimates.persistence import LENGTHS_FILE
from ops.cli.main import cli
from ops.reporting import number
from tests.support.chromium import needs_chromium, problems_of_files
from tests.support.report_page import ShownReport, shown_report

SIMULATE = (
    "simulate",
    "--generate",
    "tenants=2,rate=3,seconds=10,flooder=2",
    "--gpu",
    "l40s",
    "--model",
    "1b",
)
BENCH = (
    "bench",
    "scheduler",
    "--running",
    "8",
    "--waiting",
    "20",
    "--tenants",
    "2",
    "--steps",
    "100",
)
FORECAST = ("forecast", "report", "--data-dir")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With forecasts of answers that have ended, as a server leaves them."""
    made = tmp_path_factory.mktemp("reports")
    lengths = LengthForecast()
    for each in range(60):
        features = features_of(f"List {each} rivers.", prompt_tokens=9)
        lengths.observe("t", "m", 3 + 4 * each, features)
    (made / LENGTHS_FILE).write_text(json.dumps(lengths.to_dict()))
    return made


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, Any]:
    """What each command printed with `--json`; its page lies beside."""
    found = {}
    for asked in (SIMULATE, BENCH, (*FORECAST, str(folder))):
        page = folder / f"report-{asked[0]}.html"
        result = CliRunner().invoke(cli, [*asked, "--json", "--html", str(page)], prog_name="fairgate")
        assert result.exit_code == 0, result.output
        found[asked[0]] = json.loads(result.stdout)
    return found


def shown(folder: Path, name: str) -> ShownReport:
    return shown_report(folder / f"report-{name}.html")


@pytest.mark.parametrize("name", ["simulate", "bench", "forecast"])
def test_a_page_has_the_very_figures_of_the_json(folder: Path, answers: dict[str, Any], name: str) -> None:
    page = shown(folder, name)
    assert page.exact == answers[name]
    assert page.tables[0][1:], "a table with rows"


def test_tables_and_charts_of_a_simulation_have_them_too(folder: Path, answers: dict[str, Any]) -> None:
    page, policies = shown(folder, "simulate"), answers["simulate"]["policies"]
    assert page.column(0, "policy") == [each["policy"] for each in policies]
    assert page.column(0, "TTFT p50, s") == [number(each["ttft_s"]["p50"]) for each in policies]
    for each in policies:
        for tenant, figures in each["tenants"].items():
            name = page.drawn.index(f"{tenant}, {each['policy']}")
            assert page.drawn[name + 1] == f"{100 * figures['attainment']:.1f} %"


def test_the_table_of_forecasts_has_them_too(folder: Path, answers: dict[str, Any]) -> None:
    page, layers = shown(folder, "forecast"), answers["forecast"]["gateway"]["m"]["layers"]
    assert page.column(0, "answers") == [str(each["samples"]) for each in layers.values()]


@needs_chromium
def test_a_browser_finds_nothing_to_complain_about(folder: Path, answers: dict[str, Any]) -> None:
    assert problems_of_files([folder / f"report-{name}.html" for name in answers]) == []
