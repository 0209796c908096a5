"""The page of one what-if: progress, comparison, application."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec
from litestar import Response
from litestar.params import FromPath

from gateway.console.access import form, page, visit_of
from gateway.console.form_errors import FormProblem
from gateway.console.pages.policy import what_if_report
from gateway.console.pages.policy.policy import PATH, RUNS
from gateway.console.pages.policy.policy_words import what_if_said
from gateway.console.rendering import SECURITY_HEADERS, confirm_page, page_response, redirect
from gateway.console.return_path import with_query
from gateway.domain.what_if import RunState, WhatIfRun
from gateway.gateway import Gateway
from gateway.http.asgi import Request
from gateway.routes.admin.config import file_of
from gateway.routes.context import gateway_of
from tenants.admin.platform.policy import StoredPolicy
from tenants.admin.transaction import etag_of
from tenants.config_file.base import ConfigInvalid
from tenants.config_file.document import ConfigPolicy, Configuration
from tenants.config_file.export import as_yaml
from tenants.config_file.steps import ConfigPlan, ConfigStep, stored
from tenants.errors import Invalid, NotFound, PreconditionFailed
from tenants.people.roles import Act

RUN = f"{RUNS}/{{run:str}}"
CHANGED_MEANWHILE = (
    "Something else was changed since you were asked, and nothing was applied: this is what it would do now."
)


CREATES = "tenant.create"


def wanted_of(run: WhatIfRun, number: str, now: StoredPolicy) -> Configuration:
    """What simulation `number` of the report sets: policy (if another), weights, limits. Raises `Invalid`."""
    rows: Sequence[Any] = run.report.get("policies", ())
    known = {str(place): row for place, row in enumerate(rows) if not row.get("is_baseline")}
    if run.state is not RunState.DONE or number not in known:
        raise Invalid("number", "there is no such simulation in this run")
    row = known[number]
    wanted = StoredPolicy(row["policy"], row["options"])
    policy = None if wanted == now else ConfigPolicy(name=wanted.name, options=dict(wanted.options))
    return msgspec.structs.replace(run.asked.file(), policy=policy)


def require_known(plan: ConfigPlan) -> None:
    """Raises `Invalid` if a tenant of the run is gone: it must not be re-created."""
    for step in plan.steps:
        if step.act == CREATES:
            raise Invalid("weights", f"there is no tenant {step.tenant or step.subject!r} any more")


def _compared(run: WhatIfRun, wanted: Configuration) -> list[str]:
    """What the run said of its policy."""
    policy = wanted.policy
    said = "" if policy is None else what_if_said([run], policy.name, policy.options)
    return [said] if said else []


def effects_of(plan: ConfigPlan, *, waiting: int, running: int, replicas: int | None) -> list[str]:
    effects = [_words(step) for step in plan.steps]
    effects.append(
        f"{waiting:,} requests wait and {running:,} run now: none is lost. The new order counts from the next"
        " step, in all gateways."
    )
    if replicas is not None:
        effects.append(f"The number of engines stays: start or stop them yourself to have {replicas}.")
    return effects


def _words(step: ConfigStep) -> str:
    changes = [f"{name} {_value(before)} → {_value(after)}" for name, (before, after) in step.changes.items()]
    subject = step.subject[:1].upper() + step.subject[1:]
    return f"{subject}: {'; '.join(changes)}." if changes else f"{subject}: stored as it is in force now."


def _value(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}={item}" for name, item in value.items())
    return str(value)


@page(RUN, act=Act.READ_PLATFORM, of_one=True)
async def what_if_page(request: Request, run: FromPath[str]) -> Response[str]:
    return _shown(request, _run_of(gateway_of(request), run))


@page(f"{RUN}/report", act=Act.READ_PLATFORM, of_one=True)
async def what_if_file(request: Request, run: FromPath[str]) -> Response[str]:
    """The exact report, as `fairgate whatif --json` prints it."""
    shown = _run_of(gateway_of(request), run)
    if shown.state is not RunState.DONE:
        raise NotFound("report", run)
    headers = SECURITY_HEADERS | {"content-disposition": 'attachment; filename="what-if.json"'}
    return Response(json.dumps(shown.report, indent=2), headers=headers, media_type="application/json")


@form(f"{RUN}/cancel", act=Act.CHANGE_PLATFORM, of_one=True)
async def cancel(request: Request, run: FromPath[str]) -> Response[str]:
    gateway = gateway_of(request)
    shown = _run_of(gateway, run)
    if gateway.deps.what_if is not None:
        await gateway.deps.what_if.cancel(shown.run_id)
    return redirect(f"{RUNS}/{shown.run_id}")


@form(f"{RUN}/apply", act=Act.CHANGE_PLATFORM, of_one=True)
async def apply(request: Request, run: FromPath[str]) -> Response[str]:
    """Shows what would change; with that state's tag it applies it."""
    visit, gateway = visit_of(request), gateway_of(request)
    shown = _run_of(gateway, run)
    number, tag = visit.form.get("number", ""), visit.form.get("etag", "")
    file = file_of(gateway, gateway.policy.checked)
    try:
        wanted = wanted_of(shown, number, gateway.policy.now)
        problem = None
        if tag:
            try:
                plan = await file.plan(wanted, if_match=frozenset({tag}))
                require_known(plan)
                await file.apply(visit.actor, plan)
                return await _applied(gateway, is_changed=bool(plan.steps))
            except PreconditionFailed:
                problem = FormProblem(412, {"": CHANGED_MEANWHILE})
        plan = await file.plan(wanted)
        require_known(plan)
    except (ConfigInvalid, Invalid) as error:
        return _shown(request, shown, FormProblem(422, {"": f"This cannot be applied: {error}."}))
    if not plan.steps:
        return redirect(with_query(PATH, {"done": "nothing"}))
    load = await gateway.fleet.now()
    return confirm_page(
        visit,
        title="Apply this what-if",
        effects=_compared(shown, wanted)
        + effects_of(
            plan,
            waiting=sum(load.queued.values()),
            running=load.running,
            replicas=shown.asked.replicas,
        ),
        action=f"{RUNS}/{shown.run_id}/apply",
        button="Apply it",
        back=f"{RUNS}/{shown.run_id}",
        hidden={"number": number, "etag": etag_of(stored(plan.revision))},
        problem=problem,
    )


async def _applied(gateway: Gateway, *, is_changed: bool) -> Response[str]:
    """Waits until the change is in force everywhere or the time is over."""
    if is_changed:
        await gateway.directory.changed()
        await gateway.policy.follow()
    return redirect(with_query(PATH, {"done": "applied" if is_changed else "nothing"}))


def _run_of(gateway: Gateway, run_id: str) -> WhatIfRun:
    """Raises `NotFound`: another gateway's, or too old."""
    shown = None if gateway.deps.what_if is None else gateway.deps.what_if.run(run_id)
    if shown is None:
        raise NotFound("what-if", run_id)
    return shown


def _shown(request: Request, run: WhatIfRun, problem: FormProblem | None = None) -> Response[str]:
    visit = visit_of(request)
    report = run.report
    return page_response(
        "policy/what_if.html",
        visit,
        problem=problem,
        run=run,
        path=f"{RUNS}/{run.run_id}",
        is_running=run.state is RunState.RUNNING,
        progress=what_if_report.progress_words(run),
        command=shlex.join(["fairgate", "whatif", *run.asked.flags(), "--json"]),
        file=as_yaml(run.asked.file()) if run.asked.limits else "",
        report=report,
        rows=what_if_report.rows_of(report) if report else [],
        tenants=what_if_report.tenants_of(report) if report else [],
        bars=what_if_report.bars_of(report) if report else [],
        verdict=what_if_report.verdict_of(report) if report else "",
        accuracy=what_if_report.accuracy_of(report),
        may_change=visit.person.may(Act.CHANGE_PLATFORM),
    )


HANDLERS = [what_if_page, what_if_file, cancel, apply]
