"""The configuration change that applies one simulation of a what-if. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.domain.what_if import RunState, WhatIfRun
from tenants.admin.policy import StoredPolicy
from tenants.config_file.document import ConfigPolicy, Configuration
from tenants.config_file.steps import ConfigPlan, ConfigStep
from tenants.errors import Invalid

CREATES = "tenant.create"


def wanted_of(run: WhatIfRun, number: str, now: StoredPolicy) -> Configuration:
    """The simulation's policy with its options, if another is active, and the run's weights and limits.
    `number`: within the report. Raises `Invalid`."""
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


def effects_of(plan: ConfigPlan, *, waiting: int, running: int, replicas: int | None) -> list[str]:
    effects = [_words(step) for step in plan.steps]
    effects.append(
        f"{waiting:,} requests wait and {running:,} run now: none is lost, and the new order counts from the"
        " next step on, in all gateways."
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
