"""The log-in page, and the log-out."""

from __future__ import annotations

from dataclasses import replace

from litestar import Response

from gateway.console import cookies
from gateway.console.access import form, page, visit_of
from gateway.console.form_errors import FORM_ERRORS, WHOLE_FORM, problem_of
from gateway.console.forms import typed_fields, unsent_of
from gateway.console.rendering import page_response, redirect, session_cookies, signed_in
from gateway.console.return_path import LOG_IN, LOG_OUT, START, safe
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import gateway_of

REFUSED = "Wrong name or password."


@page(LOG_IN, act=None)
async def log_in_page(request: Request) -> Response[str]:
    visit = visit_of(request)
    wanted = request.query_params.get("next", "")
    if visit.session is not None:
        return redirect(safe(wanted))
    next_path = safe(wanted) if wanted else ""
    return page_response(
        "account/log_in.html", visit, next_path=next_path, unsent="", was_sent=False, name=""
    )


@form(LOG_IN, act=None)
async def log_in(request: Request) -> Response[str]:
    """Opens a session and goes on to the requested page; offers a form submitted without a session again."""
    visit, deps = visit_of(request), gateway_of(request).deps
    next_path, kept = safe(visit.form.get("next", "")), visit.form.get("unsent", "")
    try:
        opened = await gateway_of(request).way_in.log_in(
            visit.form.get("name", ""),
            visit.form.get("password", ""),
            address=visit.address,
            user_agent=headers_of(request.scope).get("user-agent", ""),
        )
    except FORM_ERRORS as error:
        return page_response(
            "account/log_in.html",
            visit,
            problem=problem_of(error, refused_at=WHOLE_FORM, refused=REFUSED),
            next_path=next_path if next_path != START else "",
            unsent=kept,
            was_sent=bool(kept),
            name=typed_fields(visit.form, "name")["name"],
        )
    if visit.session is not None:
        await deps.people.log_out(visit.session)
    form = unsent_of(kept)
    if form is None or safe(form.path) != form.path:
        return signed_in(visit, opened.cookie_value, next_path)
    return page_response(
        "account/unsent.html",
        replace(visit, session=opened.session),
        set_cookies=session_cookies(visit, opened.cookie_value),
        form=form,
        leave=START,
    )


@form(LOG_OUT)
async def log_out(request: Request) -> Response[str]:
    """Ends this session in all gateways."""
    visit, gateway = visit_of(request), gateway_of(request)
    if visit.session is not None:
        await gateway.deps.people.log_out(visit.session)
        gateway.accesses.note("session.close", visit.actor, "console")
    return redirect(LOG_IN, [cookies.cleared(cookies.SESSION, secure=visit.is_https)])


HANDLERS = [log_in_page, log_in, log_out]
