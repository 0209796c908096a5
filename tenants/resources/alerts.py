"""Alerts that the server evaluates: firing and resolved; acknowledged and silenced."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any

from sqlalchemy import Connection
from sqlalchemy.sql import ColumnElement

from tenants.admin.admin import Admin
from tenants.admin.alerts import AlertActs, AlertSilence, find_alert
from tenants.admin.cursor import PAGES, SortKey, beyond
from tenants.outbox import incidents as store
from tenants.outbox.transitions import Incident
from tenants.people.roles import Act
from tenants.resources.query import Filter, Kind, ListQuery
from tenants.resources.resource import ActCall, ActDone, PageRequest, Resource, ResourceAct
from tenants.resources.shown import Form, Shown
from tenants.storage.tables import incidents

ORDER = (incidents.c.fired_us, incidents.c.id)
STATES = ("firing", "resolved")


class AlertQuery(ListQuery, frozen=True):
    """Which alerts. None: any."""

    state: Annotated[str | None, Filter(kind=Kind.CHOICE, choices=STATES)] = None


def _read(connection: Connection, request: PageRequest) -> tuple[list[Incident], SortKey | None]:
    is_open, state = incidents.c.resolved_us.is_(None), request.query.state
    wanted: list[ColumnElement[bool]]
    wanted = [] if state is None else [is_open if state == "firing" else ~is_open]
    if request.after is not None:
        wanted.append(beyond(ORDER, request.after, newest_first=True))
    return store.latest(connection, *wanted, most=request.most), None


def _run(change: Callable[[AlertActs, ActCall], Awaitable[Incident]]) -> Any:
    async def run(admin: Admin, call: ActCall) -> ActDone:
        shown = (await change(admin.alerts, call)).as_json()
        return ActDone(shown, shown)

    return run


_ACT = partial(ResourceAct, scope="admin:write", act=Act.CHANGE_PLATFORM, takes_condition=False)
ALERTS = Resource(
    name="alert",
    plural="alerts",
    title="Alerts",
    query=AlertQuery,
    read=_read,
    order=ORDER,
    key_of=lambda alert: (alert.fired_us, alert.incident_id),
    as_json=Incident.as_json,
    find=lambda connection, reference, tenant, now_us: find_alert(connection, reference),
    scope="admin:read",
    act=Act.READ_TENANT,
    summary="List alerts: firing and resolved, newest first",
    description="Evaluated by the server, of tenants and of the platform. `page`: of the console, with the"
    f" evidence; `runbook`: what to do, as Markdown. {PAGES}",
    has_page=False,
    is_whole=True,
    shown=(
        Shown("id", "Id"),
        Shown("subject", "Subject"),
        Shown("state", "State"),
        Shown("severity", "Severity"),
        Shown("tenant", "Tenant", Form.TENANT),
        Shown("fired_at", "Since", Form.INSTANT),
        Shown("acknowledged_by", "Acknowledged by"),
        Shown("silenced_until", "Silenced until", Form.INSTANT),
        Shown("summary", "What"),
        Shown("runbook", "Runbook"),
    ),
    acts=(
        _ACT(
            "alert.acknowledge",
            _run(lambda acts, call: acts.acknowledge(call.actor, call.reference)),
            path="/{reference}/acknowledge",
            summary="Acknowledge an alert",
            description="Marks all firing alerts of the same problem with who looks after them, and when.",
            confirm=("Your name and the time stand beside the alert. It keeps firing until it is resolved.",),
            done="The alert is acknowledged.",
            answers="what `alerts list` does, of the one.",
            words=lambda alert: f"alert {alert['id']} acknowledged",
        ),
        _ACT(
            "alert.silence",
            _run(lambda acts, call: acts.silence(call.actor, call.reference, call.command)),
            path="/{reference}/silence",
            command=AlertSilence,
            summary="Silence an alert",
            description="No webhook hears of the problem for `for_s` seconds, also when it fires again or is"
            " resolved. An alert that still fires at the end is sent then.",
            hint="No webhook hears of this problem until then, also when it fires again. If it still fires at"
            " the end, its webhooks are sent then. The console keeps showing it.",
            done="The alert is silenced.",
            answers="what `alerts list` does, of the one.",
            words=lambda alert: f"alert {alert['id']} silenced until {alert['silenced_until']}",
        ),
        _ACT(
            "alert.unsilence",
            _run(lambda acts, call: acts.unsilence(call.actor, call.reference)),
            method="DELETE",
            path="/{reference}/silence",
            summary="End a silence",
            confirm=("Webhooks hear of this problem again.",),
            done="The silence has ended.",
            answers="what `alerts list` does, of the one.",
            words=lambda alert: f"alert {alert['id']}: the silence has ended",
        ),
    ),
    answers="""[{"id": "inc_…", "subject": "slo.burn", "state": "firing", "severity": "page",
        "tenant_id": "ten_…", "tenant": "acme", "summary": "…", "evidence": {…},
        "page": "/console/slo?tenant=ten_…", "runbook": "/runbooks/slo.burn", "fired_at": "2026-…",
        "resolved_at": null, "acknowledged_at": null, "acknowledged_by": null, "silenced_until": null,
        "silenced_by": null, "silence_reason": null}, …]
    """,
)
