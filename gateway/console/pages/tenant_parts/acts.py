"""Shared by forms of tenants, projects, keys and limits: tags, redirects after an act, running requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from litestar import Response

from gateway.console.rendering import redirect
from gateway.console.return_path import with_query
from gateway.http.asgi import Request
from gateway.pools.request_actions import LIST, RequestAction
from gateway.routes.context import gateway_of
from tenants.admin.transaction import IfMatch, etag_of

TAG_FIELD = "etag"
LATE = "A gateway has not confirmed it yet; there it is in force as soon as it reads the database again."


async def done(request: Request, path: str, act: str) -> Response[str]:
    """Redirects once the act is in force in all gateways that answer; the page then says what was done."""
    late = await gateway_of(request).directory.changed()
    return redirect(with_query(path, {"done": act, "late": "yes" if late else ""}))


def said(request: Request, words: Mapping[str, str]) -> str:
    """What was just done, from `done` and `late` of the address."""
    text = words.get(request.query_params.get("done", ""), "")
    return f"{text} {LATE}" if text and request.query_params.get("late") == "yes" else text


def tag_of(stored: Mapping[str, Any]) -> str:
    """The tag of the object that a form was filled in from."""
    return etag_of(stored)


def if_match(form: Mapping[str, str]) -> IfMatch:
    """The condition of a form's act. A form without a tag is refused."""
    return frozenset({form.get(TAG_FIELD, "")})


@dataclass(frozen=True)
class Unfinished:
    waiting: int
    running: int
    is_whole: bool
    """False: there are more, or a gateway did not answer."""

    @property
    def words(self) -> str:
        least = "" if self.is_whole else "at least "
        return f"{least}{self.running:,} running and {least}{self.waiting:,} waiting"


async def in_flight(request: Request, tenant_id: str, *, project: str = "", key: str = "") -> Unfinished:
    ask = RequestAction(LIST, of_tenant=tenant_id, project=project, key=key)
    requests = await gateway_of(request).fleet.live_requests(ask)
    by_status = Counter(row["status"] for row in requests.data)
    running = by_status.pop("running", 0)
    return Unfinished(by_status.total(), running, not requests.has_more and not requests.gateways_missing)
