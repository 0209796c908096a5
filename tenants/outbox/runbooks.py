"""The runbooks of alerts: what each means, what tells its causes apart, and what to do."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tenants.errors import NotFound
from tenants.outbox.kinds import BY_SUBJECT

_PACKAGED = Path(__file__).parent / "runbook_pages"
_CHECKOUT = Path(__file__).parents[2] / "docs" / "runbooks"


@cache
def runbook(subject: str) -> str:
    """Markdown, with relative links to others. Raises `NotFound`."""
    if subject not in BY_SUBJECT:
        raise NotFound("runbook", subject)
    folder = _PACKAGED if _PACKAGED.is_dir() else _CHECKOUT
    return (folder / f"{subject}.md").read_text(encoding="utf-8")
