"""Errors that `tenants` raises. Messages may be shown to clients: a driver's text is only in `__cause__`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal


class TenancyError(Exception):
    """Base of all errors of `tenants`."""


class Invalid(TenancyError):
    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class NotFound(TenancyError):
    """No such thing. `what` is `tenant`, `project`, `key`, `limit`, `override`, `price`, `brake`, `drain`,
    `person`, `session`, `link`, `webhook`, `dead letter` or `runbook`."""

    def __init__(self, what: str, reference: str) -> None:
        super().__init__(f"no such {what}: {reference!r}")
        self.what = what
        self.reference = reference


class AlreadyExists(TenancyError):
    def __init__(self, what: str, name: str) -> None:
        super().__init__(f"{what} {name!r} already exists")
        self.what = what
        self.name = name


class PreconditionFailed(TenancyError):
    """The object is not as the caller saw it: nothing was changed. `current`: its stored state, if any."""

    def __init__(self, current: Mapping[str, Any] | None) -> None:
        super().__init__(
            "it does not exist" if current is None else "it has changed since: read it again, then repeat"
        )
        self.current = current


KeyReason = Literal[
    "malformed", "unknown", "revoked", "expired", "tenant_suspended", "project_suspended", "no_tier"
]

_KEY_MESSAGES: dict[KeyReason, str] = {
    "malformed": "an API key looks like fg_live_<id>_<secret>",
    "unknown": "no such API key",
    "revoked": "this API key was revoked",
    "expired": "this API key has expired",
    "tenant_suspended": "the tenant of this API key is suspended",
    "project_suspended": "the project of this API key is suspended",
    "no_tier": "the tenant of this API key may no longer use any of the key's tiers",
}


class KeyRejected(TenancyError):
    """An API key that is not accepted."""

    def __init__(self, reason: KeyReason, ids: tuple[str, str, str] = ("", "", "")) -> None:
        """`ids`: of tenant, project and key, where the secret is right."""
        super().__init__(_KEY_MESSAGES[reason])
        self.reason: KeyReason = reason
        self.ids = ids


class UnknownPrice(TenancyError):
    def __init__(self, model: str, tier: str) -> None:
        super().__init__(
            f"model {model!r} has no price in tier {tier}: set one with "
            f"`fairgate price set {model} --input N --output N`, or mark it free with --free"
        )
        self.model = model
        self.tier = tier


class LogInRefused(TenancyError):
    """A log-in that is not accepted. One text for every reason: it does not reveal which names exist."""

    def __init__(self) -> None:
        super().__init__("wrong name or password")


class PersonChanged(TenancyError):
    """The actor was changed or suspended since the session was read: the act is not done."""

    def __init__(self) -> None:
        super().__init__("your account has changed, so your session has ended: log in again")


class TooManyLogIns(TenancyError):
    """Log-ins are slowed: too many failed, or too many are checked now."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"too many log-ins: try again in {max(1, math.ceil(retry_after_s))} s")
        self.retry_after_s = retry_after_s


class EpochEnded(TenancyError):
    """The counters were rebuilt since this was granted, without it: reserve again."""

    def __init__(self) -> None:
        super().__init__("the quota counters were rebuilt in the meantime")


class PepperMismatch(TenancyError):
    """The keys in this database were made with another pepper: none of them would be accepted."""

    def __init__(self) -> None:
        super().__init__(
            "the API keys in this database were made with another pepper; "
            "start with the data directory (or pepper) that created it"
        )


class AuditDamaged(TenancyError):
    """The audit's rows, tree and checkpoints do not fit together."""


class DatabaseUnavailable(TenancyError):
    """The database cannot be used now; callers fail closed. After a failed write it is unknown whether it was
    committed: repeat it (ledger writes are idempotent)."""


class NotWritten(DatabaseUnavailable):
    """The database answers and cannot store anything. `reason` says why, with the error's name."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the database cannot be written: {reason}")
        self.reason = reason


class SchemaMissing(DatabaseUnavailable):
    """The database answers but has no (or an older) Fairgate schema."""

    def __init__(self) -> None:
        super().__init__("the database has no current Fairgate schema: run `fairgate db upgrade`")
