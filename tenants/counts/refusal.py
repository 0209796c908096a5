"""A refused request, and exact counts of refused requests in bounded memory. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tenants.directory.records import from_us

MAX_ID_CHARACTERS = 80
MAX_MODEL_CHARACTERS = 256
MAX_CODE_CHARACTERS = 64


class RefusalKey(NamedTuple):
    """What refused requests are counted by."""

    minute_s: int
    """Seconds since 1970."""
    tenant_id: str
    """Empty: the key is not known."""
    code: str
    limit_id: str
    """Empty: no limit refused it."""


Counts = dict[RefusalKey, int]


class RefusedRequest(msgspec.Struct, frozen=True):
    """One refused request. Empty texts: not known, or none."""

    request_id: str
    at_us: int
    """Microseconds since 1970."""
    code: str
    tenant_id: str = ""
    project_id: str = ""
    key_id: str = ""
    tier: str = ""
    model: str = ""
    """As it was asked for."""
    limit_id: str = ""
    of_platform: bool = False
    """The limit is on all tenants together."""
    wanted: int | None = None
    """In the limit's unit."""
    available: int | None = None
    retry_after_ms: int | None = None

    @property
    def key(self) -> RefusalKey:
        return RefusalKey(self.at_us // 60_000_000 * 60, self.tenant_id, self.code, self.limit_id)

    def as_json(self) -> dict[str, Any]:
        return {
            "request_id": self.request_id,
            "object": "refusal",
            "at": from_us(self.at_us).isoformat(),
            "tenant_id": self.tenant_id or None,
            "project_id": self.project_id or None,
            "key_id": self.key_id or None,
            "tier": self.tier or None,
            "model": self.model or None,
            "code": self.code,
            "limit_id": self.limit_id or None,
            "of_platform": self.of_platform,
            "wanted": self.wanted,
            "available": self.available,
            "retry_after_s": None if self.retry_after_ms is None else self.retry_after_ms / 1000,
        }

    def for_tenant(self) -> RefusedRequest:
        """As its tenant sees it: without the numbers of platform limits."""
        if not self.of_platform:
            return self
        return msgspec.structs.replace(self, limit_id="", wanted=None, available=None)


def added(counts: Counts, more: Mapping[RefusalKey, int]) -> None:
    for key, count in more.items():
        counts[key] = counts.get(key, 0) + count


def merged(counts: Counts, most: int) -> Counts:
    """The same refusals under at most `most` keys: minutes are given up first, then limits, then tenants,
    each only where needed. Codes are few and always stay."""
    first_s = min((key.minute_s for key in counts), default=0)
    coarser: tuple[Callable[[RefusalKey], RefusalKey], ...] = (
        lambda key: key._replace(minute_s=first_s),
        lambda key: key._replace(limit_id=""),
        lambda key: key._replace(tenant_id=""),
    )
    for coarse in coarser:
        if len(counts) <= most:
            break
        fewer: Counts = {}
        for key, count in counts.items():
            added(fewer, {coarse(key): count})
        counts = fewer
    return counts
