"""What is there to say of a request that has ended? Read from what was kept, for routes and for the CLI."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from gateway.account.explanation import explanation
from gateway.account.timeline import UnreadableTimeline, unpack
from tenants.ledger.timelines import StoredTimeline

if TYPE_CHECKING:
    from tenants.admin.admin import Admin

NOTHING_KEPT: dict[str, Any] = {"explanation": [], "waits": None, "stages": [], "timeline": None}
"""Its timeline is gone, or never was: it is older than they are kept, or its gateway died."""

log = logging.getLogger("fairgate.gateway.explaining")


async def explained(
    find: Callable[[str], Awaitable[StoredTimeline | None]], admin: Admin, request_id: str
) -> dict[str, Any]:
    """The timeline with its explanation, and the targets that were missed. Raises `DatabaseUnavailable`."""
    stored = await find(request_id)
    shown = NOTHING_KEPT
    if stored is not None:
        try:
            shown = explanation(unpack(stored.packed))
        except UnreadableTimeline as error:
            log.warning("the timeline of request %s cannot be read: %s", request_id, error)
    missed = await admin.list_misses(request_id=request_id)
    return shown | {
        "misses": [
            {
                name: value
                for name, value in each.as_json().items()
                if name in ("metric", "target_s", "actual_s", "cause", "evidence")
            }
            for each in missed
        ]
    }
