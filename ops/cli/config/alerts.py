"""`fairgate alerts`: alerts that the server evaluates, and rules for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ops.cli.administer import named_list
from ops.cli.base import PageCommand, answer, group, settings_now
from ops.deploy.alert_rules import as_yaml, rules
from ops.reporting import table
from tenants.outbox.transitions import Incident

if TYPE_CHECKING:
    from ops.settings.settings import Settings


def rules_now(settings: Settings) -> dict[str, Any]:
    return rules(settings.gateway.alert_misses, settings.audit.checkpoint_s)


@group()
def alerts() -> None:
    """Alerts: what fires, and rules for Prometheus.

    \b
      fairgate alerts list
      fairgate alerts rules > /etc/prometheus/fairgate.rules.yml
    """


@alerts.command("list")
@click.option("--state", type=click.Choice(["firing", "resolved"]), help="Only these.")
def list_(state: str | None) -> None:
    """Lists alerts of tenants and of the platform, newest first.

    \b
    --json answers:
      [{"id": "inc_…", "subject": "slo.burn", "state": "firing", "severity": "page", "tenant_id": "ten_…",
        "tenant": "acme", "summary": "…", "evidence": {…}, "page": "/console/slo?tenant=ten_…",
        "fired_at": "2026-…", "resolved_at": null}, …]
    """
    fires = None if state is None else state == "firing"
    alerts_, shown = named_list(lambda admin: admin.webhooks.alerts(fires=fires), Incident.as_json)
    rows = [
        (row.subject, named["state"], row.severity, named["tenant"] or "", named["fired_at"], row.summary)
        for row, named in zip(alerts_, shown, strict=True)
    ]
    columns = ("subject", "state", "severity", "tenant", "since", "what")
    answer(shown, lambda: table("alerts", columns, rows))


@alerts.command("rules", cls=PageCommand)
def print_rules() -> None:
    """Prints a rule file: burn rates of error budgets by tier, what is wrong with the installation, and which
    of it pages or makes a ticket.

    An alert needs at least `gateway.alert_misses` misses in its long window: with little traffic one missed
    request would burn a month's budget. The rules hold for whatever targets are set. By tenant the same
    alerts are in `fairgate slo report` and in the console.
    --json answers:
      {"groups": [{"name": "fairgate-slo", "interval": "30s", "rules": [{"record":
       "fairgate:slo_burn_rate:5m", "expr": "…"}, {"alert": "FairgateSloBurn1h", "expr": "…", "labels":
       {"severity": "page", "window": "1h"}, "annotations": {…}}]}]}
    """
    content = rules_now(settings_now())
    answer(content, lambda: click.echo(as_yaml(content), nl=False))
