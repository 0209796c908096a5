"""Tables of the policy page: changes, knobs, recent dispatches. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.flow.control_rules import ControlMode
from gateway.flow.dispatch_log import LogRecord
from tenants.admin.audit import AuditRow
from tenants.directory.records import to_us
from tenants.types import Tier

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


def words_of(policy: Mapping[str, Any]) -> str:
    """`vtc (slots=16)`."""
    options = ", ".join(f"{name}={value}" for name, value in policy.get("options", {}).items())
    return f"{policy['policy']} ({options})" if options else str(policy["policy"])


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
