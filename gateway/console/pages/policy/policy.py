"""The page of the scheduling policy: its state and history, and what-ifs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from litestar import Response

from engine.scheduling.policy import policy_names
from gateway.console import formats
from gateway.console.access import form, page, visit_of
from gateway.console.form_errors import FormProblem, problem_of
from gateway.console.forms import typed_fields
from gateway.console.pages.policy import what_if_form
from gateway.console.pages.policy.policy_words import KNOB_UNITS, SAYS, knobs, words_of
from gateway.console.pages.policy.what_if_report import otherwise_of, progress_words
from gateway.console.rendering import page_response, redirect
from gateway.domain.server_description import UnreadableDescription, server_of
from gateway.domain.what_if import Stretch, WhatIf, WhatIfBusy, stretches_of
from gateway.flow.control_rules import ControlMode
from gateway.flow.dispatch_log import LogRecord
from gateway.flow.learned.report import at_work_words
from gateway.gateway import Gateway
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from gateway.routes.views.policy_view import policy_of, tenant_names
from gateway.routes.views.status_view import models_of
from tenants.admin.audit import AuditRow
from tenants.errors import Invalid
from tenants.instants import to_us
from tenants.ledger import timelines
from tenants.people.roles import Act
from tenants.resources.reading import read_page
from tenants.resources.records.audit import AUDIT, AuditQuery
from tenants.resources.records.moves import MOVES, MoveQuery
from tenants.types import Tier, Window

PATH = "/console/policy"
RUNS = f"{PATH}/what-if"
MOST_DECISIONS = 20
MOST_CHANGES = 5
CHANGE = f"{PATH}/change"
CHANGED = ("new_policy", "new_options")
"""Fields of the form that changes the policy."""
Change = tuple[dict[str, str], FormProblem | None]
"""What was typed there, and what is wrong with it."""
DONE = {
    "changed": "The policy is changed, and in force from the next step on.",
    "applied": "It is applied, and in force from the next step on.",
    "nothing": "It was so already: nothing was changed.",
}
BUSY = "Another what-if is running: wait until it has finished, or cancel it below."


Row = dict[str, Any]
MOST_MOVES = 20
MOST_DISPATCHES = 20
LOOKED_AT = 400
"""Dispatch log entries searched for recent dispatches."""
WHY_NEXT = {
    "": "by its tier and the policy's order",
    "reservation": "its tenant's reservation goes first",
    "aged": "it had waited long",
    "owed": "its tenant had had less than its share",
}


def changes_of(rows: Iterable[AuditRow]) -> list[Row]:
    return [
        {
            "at_us": to_us(row.at),
            "by": row.actor,
            "before": words_of(row.before) if row.before else "",
            "after": (words_of(row.after) if row.after else "")
            + (" (the settings)" if row.action == "policy.from_settings" else ""),
        }
        for row in rows
    ]


def knobs_of(controls: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The knobs of active control loops, by model."""
    return [
        {
            "model": model,
            "mode": control["mode"],
            "knob": knob.replace("_", " "),
            "value": value,
            "rest": control.get("rests", {}).get(knob),
            "unit": KNOB_UNITS.get(knob, ""),
        }
        for model, control in controls.items()
        if control["mode"] != ControlMode.OFF.value
        for knob, value in control["knobs"].items()
    ]


def dispatches_of(
    logs: Mapping[str, Iterable[LogRecord]], names: Mapping[str, str], began_us: int
) -> list[Row]:
    """Newest first. `logs`: by model."""
    turns: list[Row] = [
        {
            "at_us": began_us + round(record.at_s * 1e6),
            "request_id": record.request_id,
            "tenant": names.get(record.tenant_id, record.tenant_id),
            "tier": tuple(Tier)[record.tier].value,
            "waited_s": max(0.0, record.at_s - record.arrived_s),
            "why": WHY_NEXT.get(record.rule, record.rule),
            "tenants_waiting": len(record.backlog),
        }
        for records in logs.values()
        for record in records
        if record.event == "dispatch"
    ]
    return sorted(turns, key=lambda turn: -turn["at_us"])[:MOST_DISPATCHES]


@page(PATH, act=Act.READ_PLATFORM, of_one=True)
async def policy_page(request: Request) -> Response[str]:
    return await policy_shown(request)


@form(RUNS, act=Act.CHANGE_PLATFORM, lines=what_if_form.LINES, of_one=True)
async def begin(request: Request) -> Response[str]:
    visit, gateway = visit_of(request), gateway_of(request)
    deps = gateway.deps
    policies = what_if_form.policies_typed(visit.form)
    typed = typed_fields({**visit.form, "policies": policies}, *what_if_form.FIELDS)
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
        runner = what_if_of(gateway)
        if typed["from"] and not asked.gateway:
            require_one(await stretches_between(gateway, asked.since_us, asked.until_us), asked.model)
        run = await runner.start(asked, visit.actor.name)
    except Invalid as error:
        return await policy_shown(request, typed, problem_of(error, fields=what_if_form.FIELDS))
    except WhatIfBusy:
        return await policy_shown(request, typed, FormProblem(409, {"": BUSY}))
    return redirect(f"{RUNS}/{run.run_id}")


def what_if_of(gateway: Gateway) -> WhatIf:
    """The what-if runner. Raises `Invalid`."""
    if gateway.deps.what_if is None:
        raise Invalid("", "there is no simulator beside this gateway")
    return gateway.deps.what_if


async def stretches_between(gateway: Gateway, since_us: int, until_us: int) -> list[Stretch]:
    """Of the newest requests of that time."""
    database = gateway.deps.database
    most = what_if_form.MOST_LOOKED
    rows = await timelines.servers(database, from_us=since_us, to_us=until_us, most=most)
    described = await timelines.described(database, {name for _, name in rows if name is not None})
    servers = {}
    for name, content in described.items():
        with contextlib.suppress(UnreadableDescription):
            servers[name] = server_of(content)
    return stretches_of(rows, servers)


def require_one(stretches: Sequence[Stretch], model: str) -> None:
    """Raises `Invalid` for traffic of a server that changed."""
    of_model = [stretch for stretch in stretches if model in ("", stretch.server.model)]
    pairs = zip(of_model[1:], of_model, strict=False)
    changed = [one for one, before in pairs if one.server.model == before.server.model]
    if changed:
        when = formats.at(changed[-1].since_us)
        raise Invalid("from", f"the server changed at {when}: choose one of the stretches, or a shorter time")


def policy_names_of(gateway: Gateway) -> list[str]:
    return policy_names(gateway.policy.options)


async def policy_shown(
    request: Request,
    typed: dict[str, str] | None = None,
    problem: FormProblem | None = None,
    change: Change | None = None,
) -> Response[str]:
    visit, gateway = visit_of(request), gateway_of(request)
    deps = gateway.deps
    began_us = round((deps.wall_clock() - deps.clock()) * 1e6)
    changes = await read_page(deps.admin, AUDIT, AuditQuery(act="policy"), limit=MOST_CHANGES)
    moves = await read_page(deps.admin, MOVES, MoveQuery(), limit=MOST_MOVES)
    controls = {name: model["control"] for name, model in models_of(gateway)["pools"].items()}
    logs = {
        name: list(pool.flow.log.since(pool.flow.log.next_index - LOOKED_AT, LOOKED_AT))
        for name, pool in gateway.pools.items()
    }
    names = tenant_names(gateway, {record.tenant_id for records in logs.values() for record in records})
    shown = await policy_of(gateway, MOST_DECISIONS)
    typed = typed or typed_fields({}, *what_if_form.FIELDS)
    new, refused = change or (dict.fromkeys(CHANGED, ""), None)
    may_simulate = deps.what_if is not None and visit.person.may(Act.CHANGE_PLATFORM)
    now_us = round(deps.wall_clock() * 1e6)
    began_looking_us = now_us - what_if_form.LOOKED_BACK_S * 1_000_000
    found = await stretches_between(gateway, began_looking_us, now_us) if may_simulate else []
    return page_response(
        "policy/policy.html",
        visit,
        status=refused.status if refused else 200,
        problem=problem,
        policy=shown,
        words=words_of(shown),
        learned={model: at_work_words(learned) for model, learned in shown["learned"].items()},
        settings=words_of(shown["settings"]),
        changes=changes_of(changes.rows),
        controls=controls,
        knobs=knobs_of(controls),
        moves=moves.rows,
        brakes=await deps.admin.brakes.all(),
        says=SAYS,
        all_options=knobs(),
        new=new,
        change_errors=refused.errors if refused else {},
        dispatches=dispatches_of(logs, names, began_us),
        runs=[
            (run, otherwise_of(run), progress_words(run))
            for run in ([] if deps.what_if is None else deps.what_if.runs())
        ],
        gateway_id=deps.gateway_id,
        has_simulator=deps.what_if is not None,
        may_change=visit.person.may(Act.CHANGE_PLATFORM),
        typed=typed,
        stretches=[(what_if_form.stretch_value(each), each) for each in what_if_form.offered(found)],
        checked=what_if_form.checked(typed, shown["policies"], shown["policy"]),
        models=list(gateway.pools),
        meters=[meter.value for meter in what_if_form.METERS],
        windows=[window.value for window in Window],
        done=DONE.get(request.query_params.get("done", ""), ""),
    )


HANDLERS = [policy_page, begin]
