"""What other servers can do, in a line, for `fairgate model` and `fairgate doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_REASON_CHARACTERS = 120


def can(replica: Mapping[str, Any]) -> str:
    """What a replica can do beyond plain text; `replica` as `Upstream.describe` and the status page have
    it."""
    words = [word for word in replica.get("capabilities", ()) if word != "text"]
    known = ", ".join(words) or "plain text only"
    untried = "; not tried yet: " + ", ".join(replica["untried"]) if replica.get("untried") else ""
    return known + untried


def cannot(replica: Mapping[str, Any]) -> str:
    """What it refuses, in its own words; empty: nothing, or the settings say what it can."""
    return "; ".join(
        f"{word} ({reason[:MOST_REASON_CHARACTERS]})" for word, reason in replica.get("cannot", {}).items()
    )
