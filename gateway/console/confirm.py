"""The confirmation page before an act that takes something away."""

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
    """`effects`: sentences about what will stop, for whom, and how many requests run. The form posts `hidden`
    to `action`. `reason`: what was typed as the reason; None: no reason is asked for. `problem`: why the page
    is shown again."""
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
