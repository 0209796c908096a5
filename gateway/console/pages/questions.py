"""What a page is asked for in its address: filters as they were typed, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from litestar import Request

from gateway.console.form_errors import WHOLE_FORM, FormProblem
from gateway.console.forms import typed_fields
from tenants.errors import Invalid, NotFound

DATE_CHARACTERS = 10
FILTER_ERRORS = (Invalid, NotFound)


def asked_of(request: Request[Any, Any, Any], *names: str) -> dict[str, str]:
    """The values of these fields; empty: not given."""
    values = {name: str(request.query_params.get(name, "")).strip() for name in names}
    return typed_fields(values, *names)


def cursor_of(request: Request[Any, Any, Any]) -> str | None:
    """Where a list is to go on; None: it begins."""
    return request.query_params.get("cursor") or None


def instant(text: str) -> str | None:
    """A date as the instant at which it begins in UTC; instants stay as they are; None: not given."""
    if not text:
        return None
    return f"{text}T00:00:00+00:00" if len(text) == DATE_CHARACTERS else text


def filter_problem(
    error: Exception, fields: Sequence[str], names: dict[str, str] | None = None
) -> FormProblem:
    """What is wrong with filters, beside the field; else with all of them. `names`: how fields are called
    here that have another name where they are checked."""
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
