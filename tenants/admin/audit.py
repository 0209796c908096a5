"""The audit log: actor, origin, action and target of every change, with its before and after.

A row is written on the connection, and so in the transaction, of its change: neither exists alone. It is read
in `audit_query.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert

from tenants.errors import Invalid
from tenants.storage.tables import audit

MAX_TEXT = 128


@dataclass(frozen=True, slots=True)
class Actor:
    """An actor (`cli:root`, `key:fg_live_…`, `system`) and its origin (`cli`, an IP address)."""

    name: str
    origin: str = ""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > MAX_TEXT:
            raise Invalid("actor", f"needs 1 to {MAX_TEXT} characters")
        if len(self.origin) > MAX_TEXT:
            raise Invalid("origin", f"has more than {MAX_TEXT} characters")


@dataclass(frozen=True, slots=True)
class AuditRow:
    """One admin act or key event. `before` and `after` are None where nothing was or is there."""

    audit_id: int
    at: datetime
    actor: str
    origin: str
    action: str
    target: str
    tenant_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None

    @property
    def target_name(self) -> str:
        """What the target was called, where it has a name."""
        return str((self.after or self.before or {}).get("name") or "")

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.audit_id,
            "at": self.at.isoformat(),
            "actor": self.actor,
            "origin": self.origin,
            "action": self.action,
            "target": self.target,
            "target_name": self.target_name,
            "tenant_id": self.tenant_id,
            "before": self.before,
            "after": self.after,
        }


def record(
    connection: Connection,
    actor: Actor,
    action: str,
    target: str,
    *,
    at_us: int,
    tenant_id: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Adds one row. `action` is `<thing>.<verb>`, `target` the id of the thing."""
    connection.execute(
        insert(audit).values(
            at_us=at_us,
            actor=actor.name,
            origin=actor.origin,
            action=action,
            target=target,
            tenant_id=tenant_id,
            before=None if before is None else dict(before),
            after=None if after is None else dict(after),
        )
    )
