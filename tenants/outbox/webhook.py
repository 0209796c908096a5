"""A webhook: how it is added, what it is, how it is shown; sending events again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tenants.errors import Invalid
from tenants.fields import Field
from tenants.instants import from_us
from tenants.outbox.address import MAX_URL_CHARS, PORTS
from tenants.outbox.kinds import OF_TENANTS, SUBJECTS


class WebhookAdd(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Adds a receiver of events."""

    url: Annotated[
        str,
        Field(
            is_argument=True,
            schema={"pattern": f"^(({'|'.join(PORTS)})://[!-~]+)$", "maxLength": MAX_URL_CHARS},
        ),
    ]
    tenant: Annotated[
        str | None, Field("Only events of this tenant (name or id); without: all, and the platform's.")
    ] = None
    subjects: Annotated[
        list[str] | None, Field("Only these (repeat).", option="--subject", choices=SUBJECTS)
    ] = None


class DeliveryAgain(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sends dead letters again: one, or without a body all."""

    seq: Annotated[
        int | None,
        Field("Of one dead letter; without: all.", schema={"minimum": 1, "maximum": 2**63 - 1}),
    ] = None


@dataclass(frozen=True, slots=True)
class Webhook:
    """A receiver of events."""

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
    """Raises `Invalid` for a subject that the webhook would never receive."""
    known = OF_TENANTS if of_tenant else SUBJECTS
    chosen = tuple(dict.fromkeys(wanted or ()))
    for subject in chosen:
        if subject not in known:
            raise Invalid("subjects", f"{subject[:40]!r} is not one of {', '.join(known)}")
    return chosen
