"""The page of ended requests, the newest first, and how many have ended since it was loaded."""

from __future__ import annotations

from gateway.console.formats import exact_dollars
from gateway.console.pages.requests.filters import Filters, TenantScope, checked
from gateway.console.pages.requests.record_list import Record, RecordList
from gateway.domain.outcomes import RequestOutcome
from gateway.explain.attribution import Cause
from gateway.explain.explanation import steps_of
from tenants.admin.admin import Admin
from tenants.admin.cursor import Page
from tenants.admin.lists.requests import RequestQuery, SettledRequest

PATH = "/console/requests"


async def read(
    admin: Admin, filters: Filters, scope: TenantScope, cursor: str | None, limit: int
) -> Page[SettledRequest]:
    query = RequestQuery(
        tenant=scope.wanted,
        project=filters.get("project"),
        key=filters.get("key"),
        model=filters.get("model"),
        tier=filters.get("tier"),
        outcome=checked("outcome", filters.get("outcome"), tuple(RequestOutcome)),
        cause=checked("cause", filters.get("cause"), tuple(Cause)),
        since=filters.instant("from"),
        until=filters.instant("to"),
    )
    return await admin.requests.page(query, cursor=cursor, limit=limit)


def row_of(settled: SettledRequest) -> Record:
    """A request as listed: as the API shows it, with the instant in microseconds."""
    return settled.as_json() | steps_of(settled.packed) | {"ended_us": settled.ended_us}


def file_row_of(settled: SettledRequest) -> Record:
    """A request as a row of the file: exact."""
    missed = [f"{metric}: {cause}" for metric, cause in settled.misses]
    charged = exact_dollars(settled.cost_nanousd)
    return row_of(settled) | {"misses": ", ".join(missed), "charged_usd": charged}


HANDLERS = RecordList(
    path=PATH,
    template="requests/ended.html",
    file_name="requests",
    filter_names=("tenant", "project", "key", "model", "tier", "outcome", "cause", "from", "to"),
    columns=(
        *("id", "ended_at", "outcome", "tenant_id", "tenant", "project_id", "project", "key_id", "key_name"),
        *("model", "tier", "input_tokens", "output_tokens", "cost_nanousd", "charged_usd", "gpu_ms"),
        *("dispatched_s", "first_token_s", "ended_s", "misses", "labels"),
    ),
    read=read,
    at_us=lambda settled: settled.ended_us,
    row_of=row_of,
    file_row_of=file_row_of,
    choices={"outcomes": list(RequestOutcome), "causes": list(Cause)},
).handlers()
