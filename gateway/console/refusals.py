"""Turns every exception of the console into a page or a redirect to the log-in."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from litestar import Response
from litestar.exceptions import MethodNotAllowedException, NotFoundException
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.console.access import FormRefused, NotForThisRole, SignInNeeded, Visit, note_refused, visit_to
from gateway.console.forms import unsent
from gateway.console.live.stream import session_over, wants_stream
from gateway.console.rendering import HTML, SECURITY_HEADERS, page_response, redirect, render
from gateway.console.return_path import LOG_IN, LOG_OUT, START, log_in_for
from gateway.error_mapping import as_api_error
from gateway.http.asgi import Request
from gateway.routes.context import gateway_of
from tenants.errors import DatabaseUnavailable, NotFound, NotWritten, PersonChanged, TooManyLogIns

RETRY_S = 5


def is_console(path: str) -> bool:
    """True for any /console path, existing or not."""
    return path == START or path.startswith(f"{START}/")


def answer(request: Request, exception: Exception, request_id: str) -> Response[str] | Response[bytes]:
    """Unknown exceptions are logged with their traceback."""
    shown = _page(request, exception, request_id)
    note_refused(request, gateway_of(request), shown.status_code or 500)
    return shown


def _page(request: Request, exception: Exception, request_id: str) -> Response[str] | Response[bytes]:
    headers: dict[str, str] = {}
    gateway_id = gateway_of(request).deps.gateway_id
    match exception:
        case SignInNeeded(next_path=path):
            if wants_stream(request):
                return session_over(path)
            return redirect(log_in_for(path)) if path else _log_in_first(request)
        case PersonChanged():  # the session ended while the form was worked on
            return _log_in_first(request)
        case FormRefused():
            status, title = 403, "This form was not accepted"
            message = (
                "It came from another site or another session, or your browser blocks cookies. Nothing was"
                " changed. Open the page again and send the form from there."
            )
        case NotForThisRole():
            status, title = 403, "Your role does not allow this"
            message = "Ask an owner for another role."
        case NotFound(what="what-if"):
            status, title = 404, "What-if not found on this gateway"
            message = (
                "Each gateway keeps the last ten that it ran, in memory, until it stops."
                f" This is {gateway_id}. Open it at the gateway that ran it, or run it again here."
            )
        case NotFoundException() if "visit" not in request.scope["state"] and request.method == "GET":
            return _NoRoute(request, exception, request_id)
        case NotFoundException() | NotFound():
            status, title = 404, "Page not found"
            message = "Check the address. What it names may have been removed."
        case MethodNotAllowedException(headers=allowed):
            status, title = 405, "This address only takes forms"
            message = "Go to the start page."
            headers = {"allow": (allowed or {}).get("allow", "")}
        case DatabaseUnavailable():
            status, title = 503, "The database cannot be reached"
            if isinstance(exception, NotWritten):
                title = f"The database cannot be written: {exception.reason}"
            message = (
                "Sessions and people are stored there, so no page can be shown now. If you sent a form, check"
                " later whether it took effect."
            )
            headers = {"retry-after": str(RETRY_S)}
            if request.method == "GET":  # a page comes back by itself; a form is not sent again
                headers["refresh"] = str(RETRY_S)
        case TooManyLogIns(retry_after_s=wait_s):
            status, title = 429, "Too many log-ins"
            message = f"Try again in {max(1, round(wait_s))} s."
            headers = {"retry-after": str(max(1, round(wait_s)))}
        case _:
            error = as_api_error(exception, request_id)
            status, title, message = error.status, "Something went wrong", error.message
            if status == 413:
                headers = {"connection": "close"}  # its rest is not read
    # Not the session: the page must be there without one.
    visit: Visit | None = request.scope["state"].get("visit")
    text = render("refusal.html", visit, title=title, message=message, request_id=request_id)
    return Response(text, status_code=status, headers={**SECURITY_HEADERS, **headers}, media_type=HTML)


class _NoRoute(Response[str]):
    """For an address without a route, where no guard has looked for a session: with its menu, if any."""

    def __init__(self, request: Request, exception: Exception, request_id: str) -> None:
        super().__init__("", status_code=404)
        self._asked = request, exception, request_id

    def to_asgi_response(self, *args: Any, **kwargs: Any) -> ASGIApp:  # type: ignore[override]
        request, exception, request_id = self._asked

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            state, visit = request.scope["state"], None
            with contextlib.suppress(DatabaseUnavailable):
                visit = await visit_to(request, gateway_of(request))
            state["visit"] = visit
            page = _page(request, exception, request_id)
            await page.to_asgi_response(*args, **kwargs)(scope, receive, send)

        return answered


def _log_in_first(request: Request) -> Response[str]:
    """The log-in page, which keeps a submitted form."""
    visit: Visit = request.scope["state"]["visit"]
    if request.scope["path"] == LOG_OUT:
        return redirect(LOG_IN)
    return page_response(
        "account/log_in.html",
        replace(visit, session=None),
        status=401,
        next_path="",
        unsent=unsent(quote(request.scope["path"]), visit.form),
        was_sent=True,
        name="",
    )
