"""`fairgate doctor`: checks of an installation, with remedies."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ops.cli.base import Command, answer, settings_now, wants_json

if TYPE_CHECKING:
    from ops.serving.doctor import Finding
    from ops.settings.settings import Settings


@click.command(cls=Command)
@click.option("--model", help="Model directory, or a model's id on the hub.")
@click.option("--redis-url", metavar="URL", help="Redis to check.")
@click.option(
    "--rules",
    "rules_file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also check that this Prometheus rule file is up to date (`fairgate alerts rules`).",
)
@click.option(
    "--probe",
    is_flag=True,
    help="Ask only whether the server of this data directory is ready; for health checks of containers.",
)
def doctor(model: str | None, redis_url: str | None, rules_file: Path | None, probe: bool) -> None:
    """Checks this installation and says how to fix it.

    \b
    Data directory, database, audit, Redis, model, engine, clock and more. Changes nothing. Exit code 1 when
    something is wrong.
      fairgate doctor
      fairgate doctor --redis-url redis://cache/0
      fairgate doctor --rules /etc/prometheus/fairgate.rules.yml
      fairgate doctor --probe
    --json answers:
      {"ok": false, "checks": [{"check": "database", "ok": false, "detail": "there is none yet",
       "advice": "run `fairgate serve` once, or `fairgate db upgrade`", "took_s": 0.1}, …]}
    """
    settings = settings_now({"model": model, "redis_url": redis_url})
    if probe:
        from ops.serving.processes.probe import readiness

        said = readiness(settings.data_dir)
        answer(
            {"ok": not said, "checks": [{"check": "ready", "ok": not said, "detail": said or "ready"}]},
            lambda: click.echo(said or "ready"),
        )
        sys.exit(1 if said else 0)
    from ops.serving.doctor import examine

    findings: list[Finding] = []

    def note(finding: Finding) -> None:
        findings.append(finding)
        if not wants_json():
            _print(finding)

    async def run() -> None:
        async for finding in examine(settings):
            note(finding)

    asyncio.run(run())
    if rules_file is not None:
        note(_rules(rules_file, settings))
    healthy = all(finding.ok for finding in findings)
    answer({"ok": healthy, "checks": [asdict(finding) for finding in findings]}, lambda: None)
    sys.exit(0 if healthy else 1)


def _print(finding: Finding) -> None:
    mark = click.style("ok  ", fg="green") if finding.ok else click.style("FAIL", fg="red")
    took = f" ({finding.took_s:.1f} s)" if finding.took_s > 1 else ""
    click.echo(f"{mark}  {finding.check}: {finding.detail}{took}")
    if not finding.ok:
        click.echo(f"      -> {finding.advice}")


def _rules(path: Path, settings: Settings) -> Finding:
    from ops.cli.config.alerts import rules_now
    from ops.deploy.alert_rules import as_yaml, out_of_date
    from ops.serving.doctor import Finding

    wrong = out_of_date(path, as_yaml(rules_now(settings)))
    advice = f"run `fairgate alerts rules > {path}`, and reload Prometheus" if wrong else ""
    return Finding("alert rules", not wrong, wrong or f"{path} is up to date", advice)
