"""Keys as rows of a list: last use, findings, and the limit that binds first."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from gateway.console.access import visit_of
from gateway.console.pages.tenant_parts.key_path import PathLimit, paths_of, words_of
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.admin.lists.key_hygiene import EXPIRING_DAYS, IDLE_DAYS, KeyFinding, findings_of
from tenants.instants import from_us, to_us
from tenants.nouns.key import ApiKey
from tenants.people.roles import Act
from tenants.resources.keys import ListedKey
from tenants.types import LimitMode

FINDINGS = {
    KeyFinding.NEVER_USED: "never used",
    KeyFinding.IDLE: f"not used for {IDLE_DAYS} days",
    KeyFinding.NO_EXPIRY: "no end",
    KeyFinding.EXPIRING: f"ends within {EXPIRING_DAYS} days",
    KeyFinding.NO_LIMIT: "no limit",
}


Row = dict[str, Any]


def row_of(
    key: ApiKey,
    last_used: datetime | None,
    path: Sequence[PathLimit],
    now: datetime,
    *,
    tenant: str | None,
    project: str | None,
) -> Row:
    """A key as shown, without its secret. `tenant`, `project`: names."""
    has_limit = any(limit.mode is LimitMode.HARD and limit.level != "all tenants together" for limit in path)
    return {
        "key_id": key.key_id,
        "name": key.display_name or key.name or key.prefix,
        "plain_name": key.name,
        "prefix": key.prefix,
        "tenant": tenant or key.tenant_id,
        "project": project or key.project_id,
        "state": key.status(now),
        "scopes": ", ".join(sorted(key.scopes)),
        "used_us": None if last_used is None else to_us(last_used),
        "expires_us": None if key.expires_at is None else to_us(key.expires_at),
        "findings": [
            FINDINGS[finding]
            for finding in findings_of(key, last_used, has_limit, now)
            if finding is not KeyFinding.NO_EXPIRY  # which its column says
        ],
        "limit_words": words_of(path),
    }


async def rows_of_keys(request: Request, listed: Sequence[ListedKey]) -> list[Row]:
    """The number of statements does not depend on the number of keys."""
    deps, keys = gateway_of(request).deps, [row.key for row in listed]
    now = from_us(round(deps.wall_clock() * 1e6))
    named = await deps.admin.with_names(key.as_json() for key in keys)
    shows_platform = visit_of(request).person.may(Act.READ_PLATFORM)
    paths = await paths_of(request, keys, shows_platform=shows_platform)
    return [
        row_of(
            row.key,
            row.last_used_at,
            paths[row.key.key_id],
            now,
            tenant=names["tenant"],
            project=names["project"],
        )
        for row, names in zip(listed, named, strict=True)
    ]
