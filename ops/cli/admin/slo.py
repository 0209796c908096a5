"""`fairgate slo`: latency targets, how they were met, and causes of misses."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ops.cli.administer import administer
from ops.cli.base import answer
from ops.cli.resource_commands import groups
from ops.reporting import table
from tenants.resources.records.misses import MISSES
from tenants.resources.slos import SLOS
from tenants.slo.slo import PERIOD_DAYS, SloReport
from tenants.types import Tier

TIERS = [tier.value for tier in Tier]


slo = groups((SLOS, MISSES))["slo"]


@slo.command()
@click.option("--tenant", help="Only this tenant (name or id).")
@click.option("--tier", type=click.Choice(TIERS), help="Only this tier.")
def report(tenant: str | None, tier: str | None) -> None:
    """Shows how targets were met over thirty days: attainment, budget left, causes of misses.

    A burn rate of 1 uses up the error budget exactly at the end of the period. An alert fires when both its
    windows burn too fast: 14.4x in an hour and five minutes, 6x in six hours and thirty minutes (page), 1x in
    three days and six hours (ticket).

    \b
    --json answers:
      [{"id": "slo_…", "tenant": "acme", "tier": "interactive", "metric": "ttft", "target_s": 0.5,
        "percentile": 95.0, "requests": 1200, "missed": 30, "attainment": 0.975, "budget_left": 0.5,
        "burn": [{"long_s": 3600, "short_s": 300, "long_rate": 2.1, "short_rate": 0.0, "fires_at": 14.4,
                  "severity": "page", "fires": false}, …],
        "causes": {"capacity": 25, "request": 5}}]
    """
    reports = administer(lambda admin: admin.slos.report(tenant, tier))

    def text() -> None:
        if not reports:
            click.echo("nothing to report: no target is set (`fairgate slo set`), or no request came since")
            return
        columns: tuple[str, ...]
        columns = ("tenant", "tier", "metric", "within", "wanted", "met", "requests", "budget left")
        columns += ("burn 1h/6h/3d", "misses by cause")
        table(f"targets over {PERIOD_DAYS} days", columns, [_row(report) for report in reports])
        for report in reports:
            for burn in report.burning:
                if burn.fires:
                    where = f"{report.tenant_name}, {report.slo.tier.value} {report.slo.metric}"
                    click.secho(
                        f"{burn.alert.severity}: {where} error budget burning {burn.long_rate:.1f}x too"
                        f" fast (last {_hours(burn.alert.long_s)})",
                        fg="red" if burn.alert.severity == "page" else "yellow",
                    )

    answer([report.as_json() for report in reports], text)


def _row(each: SloReport) -> Sequence[object]:
    total, missed = each.period.total, each.period.missed
    left = each.period.budget_left(each.slo.per_mille)
    rates = "/".join("-" if one.long_rate is None else f"{one.long_rate:.1f}" for one in each.burning)
    return (
        each.tenant_name,
        each.slo.tier.value,
        each.slo.metric,
        f"{each.slo.target_s:g} s",
        f"{each.slo.per_mille / 10:g} %",
        f"{100 * (1 - missed / total):.2f} %" if total else "",
        f"{total:,}",
        "" if left is None else f"{100 * left:.0f} %",
        rates,
        ", ".join(f"{cause} {count:,}" for cause, count in each.causes.items()),
    )


def _hours(seconds: int) -> str:
    return f"{seconds // 86_400} days" if seconds >= 86_400 else f"{seconds / 3600:g} h"
