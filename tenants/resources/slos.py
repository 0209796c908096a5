"""Latency targets: of a tier, or of one tenant in a tier."""

from __future__ import annotations

from typing import Annotated

from sqlalchemy import Connection

from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.admin.slos import TARGETS
from tenants.directory import queries
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.resource import Document, PageRequest, Resource, ResourceAct
from tenants.resources.shown import Form, Shown
from tenants.resources.table_acts import removing, setting
from tenants.slo import store
from tenants.slo.target import METRICS, Slo, SloSet
from tenants.types import Tier

ORDER = TARGETS.order


class SloQuery(ListQuery, frozen=True):
    """Which targets. None: any."""

    tenant: Annotated[str | None, Filter(kind=Kind.TENANT, help="Only those that bind this tenant.")] = None


def _read(connection: Connection, request: PageRequest) -> tuple[list[Slo], SortKey | None]:
    after = request.after
    if request.query.tenant is None:
        beyond_it = [] if after is None else [beyond(ORDER, after)]
        return TARGETS.rows(connection, beyond_it, request.most), None
    tenant_id = queries.find_tenant(connection, request.query.tenant).tenant_id
    binding = sorted(store.binding(connection, tenant_id), key=SLOS.sort_key)
    return [slo for slo in binding if after is None or SLOS.sort_key(slo) > after], None


SLOS = Resource(
    name="slo",
    plural="slos",
    noun="target",
    title="Targets",
    query=SloQuery,
    read=_read,
    order=ORDER,
    key_of=lambda slo: (slo.tenant_id, slo.tier.value, slo.metric),
    as_json=Slo.as_json,
    find=TARGETS.find,
    scope="admin:read",
    act=Act.READ_PLATFORM,
    summary="List targets, all of them or those that bind one tenant",
    description=PAGES,
    page="slo/targets",
    menu="slo",
    empty=("No targets", "Set one: each tier, or one tenant in a tier, may have one for each metric."),
    is_whole=True,
    shown=(
        Shown("id", "Id", on_page=False),
        Shown("tenant", "Tenant", Form.TENANT, missing="every tenant"),
        Shown("tier", "Tier"),
        Shown("metric", "Metric"),
        Shown("target_s", "Within", Form.SECONDS),
        Shown("percentile", "Of requests", Form.PERCENT),
    ),
    acts=(
        ResourceAct(
            "slo.set",
            setting(TARGETS),
            command=SloSet,
            scope="admin:write",
            act=Act.CHANGE_PLATFORM,
            status=201,
            summary="Set a target",
            done="The target is set. What was counted stays.",
            changes_rows=True,
            description="Of a tier, or of one tenant in a tier, whose own target then counts instead. The"
            " same tenant, tier and metric are replaced; what was counted stays. `metric`:"
            f" {', '.join(METRICS)}.",
            command_help="""Sets a target, in place of that of the same tenant, tier and metric.

    \b
    --json answers:
      {"id": "slo_…", "tenant_id": null, "tenant": null, "tier": "interactive", "metric": "ttft",
       "target_s": 0.5, "percentile": 95.0}
    """,
            words=lambda slo: (
                f"target {slo['id']} set: {slo['metric']} within {slo['target_s']:g} s for"
                f" {slo['percentile']:g} % of the requests"
                f" {'of ' + slo['tenant'] + ' ' if slo['tenant'] else ''}in tier {slo['tier']}"
            ),
        ),
        ResourceAct(
            "slo.remove",
            removing(TARGETS),
            method="DELETE",
            path="/{reference}",
            scope="admin:write",
            act=Act.CHANGE_PLATFORM,
            summary="Remove a target",
            confirm=("Requests are no longer measured against it. What was counted stays in the report.",),
            done="The target is removed.",
            answers="what `slo set` does.",
            words=lambda slo: f"target {slo['id']} removed",
        ),
    ),
    document=Document.of(
        TARGETS,
        SloSet,
        ("tier", "metric"),
        "target {metric} in tier {tier}",
        part_name="ConfigTarget",
        order=lambda slo: (list(Tier).index(slo.tier), METRICS.index(slo.metric)),
        of_tenants=True,
    ),
    group_help="""Latency targets, error budgets and causes of misses.

    \b
      fairgate slo set --tier interactive --metric ttft --target 0.5 --percentile 95
      fairgate slo set --tier interactive --metric ttft --target 0.3 --tenant acme
      fairgate slo list
      fairgate slo report --tenant acme
      fairgate slo misses --cause scheduling --since 24h
      fairgate slo remove slo_…
    """,
    command_help="""Lists targets.

    \b
    --json answers:
      [{"id": "slo_…", "tenant_id": null, "tenant": null, "tier": "interactive", "metric": "ttft",
        "target_s": 0.5, "percentile": 95.0}, …]
    """,
)
