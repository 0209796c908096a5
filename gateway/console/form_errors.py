"""What is wrong with a form, by field. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tenants.errors import AlreadyExists, Invalid, LogInRefused, NotFound, PreconditionFailed, TooManyLogIns

WHOLE_FORM = ""
FORM_ERRORS = (AlreadyExists, Invalid, LogInRefused, NotFound, PreconditionFailed, TooManyLogIns)
"""What a person can correct in the form."""
CHANGED_MEANWHILE = (
    "It was changed after you opened this page, so your changes were not saved. Check what is stored now,"
    " then send the form again to replace it."
)
GONE_MEANWHILE = "It was removed after you opened this page. Nothing was changed."


@dataclass(frozen=True)
class FormProblem:
    status: int
    errors: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict)


def problem_of(
    error: Exception,
    *,
    fields: tuple[str, ...] = (),
    refused_at: str = "password",
    refused: str = "Wrong password.",
) -> FormProblem:
    """Errors outside `fields` concern the whole form. `refused_at`: the field of one's own password."""
    match error:
        case LogInRefused():
            return FormProblem(403, {refused_at: refused})
        case TooManyLogIns(retry_after_s=retry_after_s):
            wait_s = max(1, math.ceil(retry_after_s))
            text = f"Too many attempts. Try again in {wait_s} s."
            return FormProblem(429, {WHOLE_FORM: text}, {"retry-after": str(wait_s)})
        case PreconditionFailed(current=current):
            text = CHANGED_MEANWHILE if current is not None else GONE_MEANWHILE
            return FormProblem(412, {WHOLE_FORM: text})
        case AlreadyExists():
            status, where, text = 409, "name", str(error)
        case NotFound(what=what):
            status, where, text = 422, f"{what}s", str(error)
        case Invalid(field=name, message=message):
            status, where, text = 422, name, message
        case _:
            raise error
    return FormProblem(status, {where if where in fields else WHOLE_FORM: _sentence(text)})


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
