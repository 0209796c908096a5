"""The page between a button and an act that takes something away: what will happen, asked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from litestar import Response

from gateway.console.access import Visit
from gateway.console.form_errors import FormProblem
from gateway.console.rendering import page_response


def confirm_page(
    visit: Visit,
    *,
    title: str,
    effects: Sequence[str],
    action: str,
    button: str,
    back: str,
    hidden: Mapping[str, str] | None = None,
    reason: str | None = None,
    problem: FormProblem | None = None,
) -> Response[str]:
    """Says in sentences what will stop, for whom, and how many requests run (`effects`); its form goes to
    `action` with the `hidden` fields. `reason`: what was typed as to why; None: it is not asked. `problem`:
    why it is asked once more."""
    return page_response(
        "confirm.html",
        visit,
        problem=problem,
        title=title,
        effects=effects,
        action=action,
        button=button,
        back=back,
        hidden=hidden or {},
        reason=reason,
    )
