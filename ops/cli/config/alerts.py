"""`fairgate alerts`: alerts that the server evaluates, and rules for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ops.cli.base import Command, PageCommand, answer, group, settings_now
from ops.cli.resource_commands import add_to
from ops.deploy.alert_rules import as_yaml, rules
from tenants.outbox.kinds import BY_SUBJECT
from tenants.outbox.runbooks import runbook
from tenants.resources.alerts import ALERTS

if TYPE_CHECKING:
    from ops.settings.settings import Settings


def rules_now(settings: Settings) -> dict[str, Any]:
    gateway, checkpoint_s = settings.gateway, settings.audit.checkpoint_s
    return rules(gateway.alert_misses, checkpoint_s, gateway.backup_late_s, gateway.console_url)


@group()
def alerts() -> None:
    """Alerts: list, acknowledge and silence them; rules for Prometheus.

    \b
      fairgate alerts list
      fairgate alerts runbook saturation
      fairgate alerts acknowledge inc_…
      fairgate alerts silence inc_… --for 2h --reason "replica is being replaced"
      fairgate alerts rules > /etc/prometheus/fairgate.rules.yml
    """


add_to(alerts, ALERTS)


@alerts.command("runbook", cls=Command)
@click.argument("subject", metavar="SUBJECT", type=click.Choice(list(BY_SUBJECT)))
def print_runbook(subject: str) -> None:
    """Prints the page of an alert: what it means, how its causes are told apart, what to do.

    \b
    --json answers:
      {"subject": "saturation", "text": "# saturation…"}
    """
    text = runbook(subject)
    answer({"subject": subject, "text": text}, lambda: click.echo(text, nl=False))


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
