"""Runs the scenarios of the budget benchmark; one that fails or hangs is a row of the report like others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click

from engine.client.client import EngineUnavailable
from ops.bench.budgets import survive, upgrade
from ops.bench.budgets.audit import COUNTED, KEYS, Witness, gather, judge
from ops.bench.budgets.scenarios import BudgetScenario, Question, ScenarioContext, questions, scenarios
from ops.bench.budgets.testbed import ScenarioFailed, Testbed, open_testbed
from ops.bench.common.attempts import TIMEOUT_S
from ops.bench.common.http_client import LoadHttpClient
from ops.reporting import Report, cell
from ops.sandbox.server import ROOT, ServerFailed

SCENARIO_S = 60.0
NOTED = ("tokens_per_s", "served", "refused", "cut", "left", "replays", "serving_again_s", "uncertain_tokens",
         "unseen_tokens", "pages", "instants", "streams", "moves", "broken_streams", "other_streams",
         "pause_p50_s", "pause_max_s", "requests", "failed", "server_errors")  # fmt: skip

Progress = Callable[[str, int, int], None]
"""Called with the current activity, the number of ended scenarios and of all."""


@dataclass(frozen=True, slots=True)
class BudgetBenchOptions:
    names: Sequence[str] = ()
    """Shell patterns; none: all but `survive-*` and `upgrade`."""
    gateways: Sequence[int] = (1, 2, 4)
    concurrency: Sequence[int] = (50, 500)
    instants: int = 200
    old_tree: Path | None = None


def chosen(options: BudgetBenchOptions) -> list[BudgetScenario]:
    """The scenarios to run. Raises `ValueError` for a name that fits none."""
    everything = scenarios(options.gateways, options.concurrency)
    for name in options.names:
        if fnmatch(upgrade.NAME, name) or survive.chosen([name]):
            continue
        if not any(fnmatch(each.name, name) for each in everything):
            known = ", ".join(
                [each.name for each in everything]
                + [each.name for each in survive.SCENARIOS]
                + [upgrade.NAME]
            )
            raise ValueError(f"no scenario {name!r}; there are: {known}")
    names = options.names or ("*",)
    return [scenario for scenario in everything if any(fnmatch(scenario.name, name) for name in names)]


async def run(options: BudgetBenchOptions, progress: Progress) -> dict[str, Any]:
    """The report of all scenarios as JSON. Raises `NoServer`, `ServerFailed`, `ScenarioFailed`."""
    selected = chosen(options)
    # Some scenarios kill the engine on purpose.
    logging.getLogger("fairgate.engine.client").setLevel(logging.ERROR)
    begun_s = time.monotonic()
    rows: list[dict[str, Any]] = []
    if selected:
        rows += await _budgets(selected, progress)
    rows += await survive.run(survive.chosen(options.names), options.instants, progress)
    if any(fnmatch(upgrade.NAME, name) for name in options.names):
        rows.append(await upgrade.run(options.old_tree or ROOT, progress))
    return {
        "scenarios": rows,
        "seconds": round(time.monotonic() - begun_s, 1),
        "ok": all(row["ok"] for row in rows),
    }


async def _budgets(selected: Sequence[BudgetScenario], progress: Progress) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    total = len(selected)
    async with open_testbed(lambda activity: progress(activity, 0, total)) as testbed:
        client = LoadHttpClient(timeout_s=TIMEOUT_S)
        asked = await questions(testbed, client)
        witness = Witness(testbed.engine_address)
        try:
            for scenario in selected:
                progress(scenario.name, len(rows), total)
                await testbed.start_gateways(scenario.gateways)
                rows.append(await _one(testbed, client, asked, witness, scenario))
        finally:
            client.close()
            await witness.close()
    return rows


async def _one(
    testbed: Testbed, client: LoadHttpClient, asked: Sequence[Question], witness: Witness,
    scenario: BudgetScenario,
) -> dict[str, Any]:  # fmt: skip
    begun_s = time.monotonic()
    row: dict[str, Any] = {"scenario": scenario.name, "gateways": scenario.gateways}
    broken: Collection[str]
    after = None
    try:
        async with asyncio.timeout(SCENARIO_S):
            pid = await witness.start()
            context = ScenarioContext(testbed, client, asked, scenario.name, scenario.gateways)
            evidence = await scenario.run(context)
            after = evidence.after
            facts = await gather(testbed, witness, pid, evidence.tenants, evidence.answers)
            findings = judge(facts)
        broken = [*evidence.broken, *findings.examples]
        row |= {key: getattr(findings, key) for key in (*KEYS, *COUNTED)}
        row |= {"witnessed": facts.emitted is not None, "pages": facts.pages} | evidence.figures
    except (ScenarioFailed, ServerFailed, EngineUnavailable, OSError, TimeoutError) as error:
        broken = [str(error) or f"{type(error).__name__} after {time.monotonic() - begun_s:.0f} s"]
    if after is not None:
        await after()
    return row | {"broken": list(broken), "ok": not broken, "took_s": round(time.monotonic() - begun_s, 1)}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "scenario": row["scenario"],
        **{key.split("_")[0]: row.get(key) for key in KEYS},
        "admitted": cell(row.get("admitted_of_admissible"), ".2f"),
        "at once": cell(row.get("admitted_at_once"), ".2f"),
        "charged": row.get("charged_tokens"),
        "s": f"{row['took_s']:.0f}",
        "": "ok" if row["ok"] else "BROKEN",
    }


def show(report: dict[str, Any]) -> None:
    rows = report["scenarios"]
    cells = [_row(row) for row in rows]
    Report("Budgets through crashes", [(heading, heading) for heading in cells[0]], cells).show()
    for row in rows:
        if noted := [f"{name} {row[name]}" for name in NOTED if row.get(name)]:
            click.echo(f"  {row['scenario']}: {', '.join(noted)}")
    for row in rows:
        for problem in row["broken"]:
            click.echo(f"  BROKEN {row['scenario']}: {problem}")
    verdict = "the contract was kept" if report["ok"] else "THE CONTRACT WAS BROKEN"
    click.echo(f"{len(rows)} scenarios in {report['seconds']:.0f} s: {verdict}")
