"""Query parameters of pages: filters as typed, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.console.form_errors import WHOLE_FORM, FormProblem
from gateway.console.forms import typed_fields
from gateway.http.asgi import Request
from tenants.errors import Invalid, NotFound

DATE_CHARACTERS = 10
FILTER_ERRORS = (Invalid, NotFound)


def asked_of(request: Request, *names: str) -> dict[str, str]:
    values = {name: str(request.query_params.get(name, "")).strip() for name in names}
    return typed_fields(values, *names)


def cursor_of(request: Request) -> str | None:
    return request.query_params.get("cursor") or None


def instant(text: str) -> str | None:
    """A date becomes the start of its day in UTC; instants stay; None: not given."""
    if not text:
        return None
    return f"{text}T00:00:00+00:00" if len(text) == DATE_CHARACTERS else text


def filter_problem(
    error: Exception, fields: Sequence[str], names: dict[str, str] | None = None
) -> FormProblem:
    """The problem of a field, or of the whole form. `names`: form names of fields checked under others."""
    match error:
        case NotFound(what=what):
            where, text = what, str(error)
        case Invalid(field=where, message=text):
            pass
        case _:
            raise error
    where = (names or {}).get(where, where)
    shown = text if where in fields else str(error)
    return FormProblem(400, {where if where in fields else WHOLE_FORM: shown[:1].upper() + shown[1:] + "."})
