"""The page of the scheduling policy: its state and history, and what-ifs."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response

from engine.scheduling.policy import policy_names
from gateway.console.access import form, page, visit_of
from gateway.console.form_errors import FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.policy import tables, what_if_form
from gateway.console.pages.policy.what_if_report import otherwise_of, progress_words
from gateway.console.rendering import page_response, redirect
from gateway.domain.what_if import WhatIf, WhatIfBusy
from gateway.flow.learned.report import at_work_words
from gateway.gateway import Gateway
from gateway.routes.context import gateway_of
from gateway.routes.views.policy_view import policy_of, tenant_names
from gateway.routes.views.status_view import models_of
from tenants.admin.lists.audit import AuditQuery
from tenants.admin.lists.moves import MoveQuery
from tenants.errors import Invalid
from tenants.people.roles import Act
from tenants.types import Window

PATH = "/console/policy"
RUNS = f"{PATH}/what-if"
MOST_DECISIONS = 20
MOST_CHANGES = 5
DONE = {
    "applied": "It is applied, and in force from the next step on.",
    "nothing": "It was so already: nothing was changed.",
}
BUSY = "Another what-if is under way: wait until it has ended, or cancel it below."


@page(PATH, act=Act.READ_PLATFORM)
async def policy_page(request: Request[Any, Any, Any]) -> Response[str]:
    return await _shown(request, typed_fields({}, *what_if_form.FIELDS))


@form(RUNS, act=Act.CHANGE_PLATFORM, lines=what_if_form.LINES)
async def begin(request: Request[Any, Any, Any]) -> Response[str]:
    visit, gateway = visit_of(request), gateway_of(request)
    deps = gateway.deps
    typed = typed_fields(visit.form, *what_if_form.FIELDS)
    try:
        asked = what_if_form.asked_of(
            {
                name: value.rstrip() if name in what_if_form.LINES else value.strip()
                for name, value in typed.items()
            },
            round(deps.wall_clock() * 1e6),
            policies=policy_names_of(gateway),
            tenants={tenant.name for tenant in deps.directory.tenants()},
            models=list(gateway.pools),
        )
        run = await what_if_of(gateway).start(asked, visit.actor.name)
    except Invalid as error:
        return await _shown(request, typed, problem_of(error, fields=what_if_form.FIELDS))
    except WhatIfBusy:
        return await _shown(request, typed, FormProblem(409, {"": BUSY}))
    return redirect(f"{RUNS}/{run.run_id}")


def what_if_of(gateway: Gateway) -> WhatIf:
    """The what-if runner. Raises `Invalid`."""
    if gateway.deps.what_if is None:
        raise Invalid("", "there is no simulator beside this gateway")
    return gateway.deps.what_if


def policy_names_of(gateway: Gateway) -> list[str]:
    return policy_names(gateway.policy.options)


async def _shown(
    request: Request[Any, Any, Any], typed: dict[str, str], problem: FormProblem | None = None
) -> Response[str]:
    visit, gateway = visit_of(request), gateway_of(request)
    deps = gateway.deps
    began_us = round((deps.wall_clock() - deps.clock()) * 1e6)
    changes = await deps.admin.read_audit(AuditQuery(act="policy"), limit=MOST_CHANGES)
    moves = await deps.admin.read_moves(MoveQuery(), limit=tables.MOST_MOVES)
    controls = {name: model["control"] for name, model in models_of(gateway)["pools"].items()}
    logs = {
        name: list(pool.flow.log.since(pool.flow.log.next_index - tables.LOOKED_AT, tables.LOOKED_AT))
        for name, pool in gateway.pools.items()
    }
    names = tenant_names(gateway, {record.tenant_id for records in logs.values() for record in records})
    shown = await policy_of(gateway, MOST_DECISIONS)
    return page_response(
        "policy/policy.html",
        visit,
        problem=problem,
        policy=shown,
        words=tables.words_of(shown),
        learned={model: at_work_words(learned) for model, learned in shown["learned"].items()},
        settings=tables.words_of(shown["settings"]),
        changes=tables.changes_of(changes.rows),
        controls=controls,
        knobs=tables.knobs_of(controls),
        moves=moves.rows,
        brakes=gateway.brakes.now,
        dispatches=tables.dispatches_of(logs, names, began_us),
        runs=[
            (run, otherwise_of(run), progress_words(run))
            for run in ([] if deps.what_if is None else deps.what_if.runs())
        ],
        gateway_id=deps.gateway_id,
        has_simulator=deps.what_if is not None,
        may_change=visit.person.may(Act.CHANGE_PLATFORM),
        typed=typed,
        lasts=what_if_form.LASTS_S,
        default_last=what_if_form.DEFAULT_LAST,
        models=list(gateway.pools),
        meters=[meter.value for meter in what_if_form.METERS],
        windows=[window.value for window in Window],
        done=DONE.get(request.query_params.get("done", ""), ""),
    )


HANDLERS = [policy_page, begin]
