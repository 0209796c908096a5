"""`fairgate slo`: latency targets, how they were met, and causes of misses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ops.cli.administer import actor, administer, named_list, named_one
from ops.cli.base import answer, group
from ops.cli.resource_commands import add_to
from ops.reporting import table
from tenants.admin.commands import SloSet
from tenants.resources.misses import MISSES
from tenants.slo.slo import METRICS, PERIOD_DAYS, Slo, SloReport
from tenants.types import Tier

if TYPE_CHECKING:
    pass

CAUSES = ("request", "quota", "capacity", "scheduling", "gateway", "fault", "client", "unknown")
TIERS = [tier.value for tier in Tier]


@group()
def slo() -> None:
    """Targets of a tier or a tenant, error budgets, and the causes of misses.

    \b
      fairgate slo set --tier interactive --metric ttft --target 0.5 --percentile 95
      fairgate slo set --tier interactive --metric ttft --target 0.3 --tenant acme
      fairgate slo list
      fairgate slo report --tenant acme
      fairgate slo misses --cause scheduling --from 24h
      fairgate slo remove slo_…
    """


@slo.command(name="set")
@click.option("--tier", type=click.Choice(TIERS), required=True, help="Whose requests it binds.")
@click.option(
    "--metric",
    type=click.Choice(METRICS),
    required=True,
    help="ttft: arrival to first token; tpot: per further token; e2e: arrival to last token.",
)
@click.option("--target", "target_s", type=click.FloatRange(0, min_open=True), required=True, help="Seconds.")
@click.option(
    "--percentile",
    type=click.FloatRange(1, 100),
    default=95.0,
    show_default=True,
    help="Per cent of the requests that must meet it; the rest is the error budget.",
)
@click.option("--tenant", help="Only this tenant's (name or id); then the tier's does not bind it.")
def set_(**options: Any) -> None:
    """Sets a target; the same tenant, tier and metric are replaced, and what was counted stays.

    \b
    --json answers:
      {"id": "slo_…", "tenant_id": null, "tenant": null, "tier": "interactive", "metric": "ttft",
       "target_s": 0.5, "percentile": 95.0}
    """
    wanted = SloSet(**options)
    made, shown = named_one(lambda admin: admin.slos.set(actor(), wanted), Slo.as_json)
    whose = f"of {wanted.tenant} " if wanted.tenant else ""
    answer(
        shown,
        f"target {made.slo_id} set: {wanted.metric} within {wanted.target_s:g} s for {wanted.percentile:g} %"
        f" of the requests {whose}in tier {wanted.tier}",
    )


@slo.command(name="list")
@click.option("--tenant", help="Only those that bind this tenant.")
def list_(tenant: str | None) -> None:
    """Lists targets.

    \b
    --json answers:
      [{"id": "slo_…", "tenant_id": null, "tenant": null, "tier": "interactive", "metric": "ttft",
        "target_s": 0.5, "percentile": 95.0}, …]
    """
    targets, shown = named_list(lambda admin: admin.slos.all(tenant), Slo.as_json)
    rows = [
        (
            target.slo_id,
            named["tenant"] or target.tenant_id or "every tenant",
            target.tier.value,
            target.metric,
            f"{target.target_s:g} s",
            f"{target.per_mille / 10:g} %",
        )
        for target, named in zip(targets, shown, strict=True)
    ]
    answer(
        shown,
        lambda: table("targets", ("id", "binds", "tier", "metric", "within", "of requests"), rows),
    )


@slo.command()
@click.argument("slo_id")
def remove(slo_id: str) -> None:
    """Removes a target.

    \b
    --json answers:
      {"id": "slo_…", "removed": true}
    """
    administer(lambda admin: admin.slos.remove(actor(), slo_id))
    answer({"id": slo_id, "removed": True}, f"target {slo_id} removed")


@slo.command()
@click.option("--tenant", help="Only this tenant (name or id).")
@click.option("--tier", type=click.Choice(TIERS), help="Only this tier.")
def report(tenant: str | None, tier: str | None) -> None:
    """How targets were met over thirty days: attainment, budget left, burn rates, causes of the misses.

    A burn rate of 1 uses the error budget up exactly at the end of the period. An alert fires when both its
    windows burn at its rate: 14.4 over an hour and five minutes, 6 over six hours and thirty minutes (page),
    1 over three days and six hours (ticket).

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
            click.echo("nothing to report: no target is set (`fairgate slo set`), or nothing was sent since")
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
                        f"{burn.alert.severity}: {where} burns its budget {burn.long_rate:.1f} times as fast"
                        f" as it may over {_hours(burn.alert.long_s)}",
                        fg="red" if burn.alert.severity == "page" else "yellow",
                    )

    answer([report.as_json() for report in reports], text)


add_to(slo, MISSES)


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
