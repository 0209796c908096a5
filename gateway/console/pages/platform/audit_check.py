"""Verifies the whole audit log, and says in one line how it went."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import page, visit_of
from gateway.console.pages.money.usage_check import OWN_PAGES
from gateway.console.rendering import page_response
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import gateway_of
from tenants.people.roles import Act

PATH = "/console/audit/verify"


@page(PATH, act=Act.READ_PLATFORM)
async def verify_page(request: Request) -> Response[str]:
    """With `run` a check, shared by those who ask at the same time; other sites' links start none."""
    from_here = headers_of(request.scope).get("sec-fetch-site", "none") in OWN_PAGES
    runs = "run" in request.query_params and from_here and request.method == "GET"
    verdict = await gateway_of(request).audit.check() if runs else None
    return page_response("platform/audit_check.html", visit_of(request), verdict=verdict)


HANDLERS = [verify_page]
