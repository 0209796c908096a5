"""What the page of a resource shows beside its rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from gateway.console.pages.filters import Filters, TenantScope
from tenants.admin.admin import Admin
from tenants.resources.shown import Json


async def _nothing(admin: Admin, filters: Filters, scope: TenantScope) -> Json:
    return {}


@dataclass(frozen=True)
class PageParts:
    row: Callable[[Any, Json], Json] = lambda row, shown: shown
    """From a row and its JSON to what page and file show."""
    summary: Callable[[Admin, Filters, TenantScope], Awaitable[Json]] = _nothing
    """Figures for the template. Raises `Invalid`, `NotFound`."""
    template: str = "resource.html"
    words: Json = field(default_factory=dict)
    """Further values for the template."""
