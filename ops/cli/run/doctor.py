"""`fairgate doctor`: checks of an installation, with remedies."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict

import click

from ops.cli.base import Command, answer, settings_now


@click.command(cls=Command)
@click.option("--model", help="Model directory, or a model's id on the hub.")
@click.option("--redis-url", metavar="URL", help="Redis.")
def doctor(model: str | None, redis_url: str | None) -> None:
    """Checks data directory, database, Redis, model, engine and clock, and says what to do.

    \b
    Changes nothing. Exit code 1 when something is wrong.
      fairgate doctor
      fairgate doctor --redis-url redis://cache/0
    --json answers:
      {"ok": false, "checks": [{"check": "database", "ok": false, "detail": "there is none yet",
       "advice": "run `fairgate serve` once, or `fairgate db upgrade`"}, …]}
    """
    settings = settings_now({"model": model, "redis_url": redis_url})
    from ops.serving.doctor import examine

    findings = asyncio.run(examine(settings))
    healthy = all(finding.ok for finding in findings)

    def text() -> None:
        for finding in findings:
            mark = click.style("ok  ", fg="green") if finding.ok else click.style("FAIL", fg="red")
            click.echo(f"{mark}  {finding.check}: {finding.detail}")
            if not finding.ok:
                click.echo(f"      -> {finding.advice}")

    answer({"ok": healthy, "checks": [asdict(finding) for finding in findings]}, text)
    sys.exit(0 if healthy else 1)
