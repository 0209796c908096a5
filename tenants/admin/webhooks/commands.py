"""Commands on webhooks, and the webhook itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from tenants.directory.records import from_us
from tenants.errors import Invalid
from tenants.outbox.kinds import OF_TENANTS, SUBJECTS


class WebhookAdd(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/webhooks`."""

    url: str
    tenant: str | None = None
    """Whose events it is told of; without: those of all tenants, and of the platform."""
    subjects: list[str] | None = None
    """Only these; without: all."""


class DeliveryAgain(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /admin/v1/webhooks/{webhook}/resend`; without a body: every dead letter."""

    seq: int | None = None
    """Of the dead letter."""


@dataclass(frozen=True, slots=True)
class Webhook:
    """Who is told of events."""

    webhook_id: str
    tenant_id: str
    """Empty: of all tenants, and of the platform."""
    host: str
    """Its URL without the path, which is a secret of many receivers."""
    subjects: tuple[str, ...]
    """Empty: all."""
    created_us: int
    by: str

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.webhook_id,
            "tenant_id": self.tenant_id or None,
            "host": self.host,
            "subjects": list(self.subjects),
            "created_at": from_us(self.created_us).isoformat(),
            "by": self.by,
        }


def checked_subjects(wanted: Iterable[str] | None, *, of_tenant: bool) -> tuple[str, ...]:
    """Raises `Invalid` for a subject that the webhook would never be told of."""
    known = OF_TENANTS if of_tenant else SUBJECTS
    chosen = tuple(dict.fromkeys(wanted or ()))
    for each in chosen:
        if each not in known:
            whose = "of a tenant" if of_tenant else "there are"
            raise Invalid("subjects", f"{each[:40]!r} is none; those {whose}: {', '.join(known)}")
    return chosen
