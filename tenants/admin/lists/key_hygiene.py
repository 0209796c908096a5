"""What deserves a look about a key: never used, idle, without end, about to end, without a limit."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import ColumnElement, and_, exists, not_, or_

from tenants.instants import to_us
from tenants.nouns.key import ApiKey
from tenants.storage.tables import api_keys, key_uses, limits
from tenants.types import LimitMode, SubjectKind

IDLE_DAYS = 30
EXPIRING_DAYS = 14


class KeyFinding(StrEnum):
    """What deserves a look about a key that works."""

    NEVER_USED = "never_used"
    IDLE = "idle"
    """Not used for `IDLE_DAYS`."""
    NO_EXPIRY = "no_expiry"
    EXPIRING = "expiring"
    """Within `EXPIRING_DAYS`."""
    NO_LIMIT = "no_limit"
    """No hard limit of its own, of its project or of its tenant."""


def findings_of(
    key: ApiKey, last_used: datetime | None, has_limit: bool, now: datetime
) -> tuple[KeyFinding, ...]:
    """None of a revoked or expired key. `has_limit`: a hard one below the platform's. Pure."""
    if key.status(now) != "active":
        return ()
    ends = key.expires_at
    holds = {
        KeyFinding.NEVER_USED: last_used is None,
        KeyFinding.IDLE: last_used is not None and last_used < now - timedelta(days=IDLE_DAYS),
        KeyFinding.NO_EXPIRY: ends is None,
        KeyFinding.EXPIRING: ends is not None and ends < now + timedelta(days=EXPIRING_DAYS),
        KeyFinding.NO_LIMIT: not has_limit,
    }
    return tuple(finding for finding, applies in holds.items() if applies)


def condition(finding: KeyFinding, now: datetime) -> ColumnElement[bool]:
    """SQL: a key works and has this finding."""
    now_us = to_us(now)
    works = and_(
        api_keys.c.revoked_us.is_(None),
        or_(api_keys.c.expires_us.is_(None), api_keys.c.expires_us > now_us),
    )
    use = key_uses.c.key_id == api_keys.c.id
    match finding:
        case KeyFinding.NEVER_USED:
            is_it = not_(exists().where(use))
        case KeyFinding.IDLE:
            is_it = exists().where(use, key_uses.c.last_us < to_us(now - timedelta(days=IDLE_DAYS)))
        case KeyFinding.NO_EXPIRY:
            is_it = api_keys.c.expires_us.is_(None)
        case KeyFinding.EXPIRING:
            is_it = api_keys.c.expires_us < to_us(now + timedelta(days=EXPIRING_DAYS))
        case KeyFinding.NO_LIMIT:
            is_it = and_(*(not_(query) for query in _hard_limits()))
    return and_(works, is_it)


def _hard_limits() -> list[ColumnElement[bool]]:
    """One search in the index of subjects each: of the key, its project, its tenant."""
    subjects = (
        (SubjectKind.KEY, api_keys.c.id),
        (SubjectKind.PROJECT, api_keys.c.project_id),
        (SubjectKind.TENANT, api_keys.c.tenant_id),
    )
    hard = limits.c.mode == LimitMode.HARD.value
    return [
        exists().where(limits.c.kind == kind.value, limits.c.subject_id == subject, hard)
        for kind, subject in subjects
    ]
