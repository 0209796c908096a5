"""The page of the check: whether the sums of usage are what the ledger says."""

from __future__ import annotations

from litestar import Response

from gateway.console.access import page, visit_of
from gateway.console.rendering import page_response
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import gateway_of
from tenants.people.roles import Act

PATH = "/console/usage/check"
OWN_PAGES = ("same-origin", "none")


@page(PATH, act=Act.READ_PLATFORM, of_one=True)
async def check_page(request: Request) -> Response[str]:
    """The last result, or with `run` a new one, shared by those who ask; other sites' links start none."""
    check = gateway_of(request).usage_check
    from_here = headers_of(request.scope).get("sec-fetch-site", "none") in OWN_PAGES
    if "run" in request.query_params and from_here and request.method == "GET":
        await check.run()
    gateway_id = gateway_of(request).deps.gateway_id
    return page_response("money/check.html", visit_of(request), checked=check.last, gateway_id=gateway_id)


HANDLERS = [check_page]
