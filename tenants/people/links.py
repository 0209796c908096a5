"""One-time links by which people set a password: the first owner's, and of those invited or reset."""

from __future__ import annotations

from dataclasses import dataclass

from tenants.people.roles import Role

LINK_PATH = "/console/set-up"
LINK_S = 86_400
"""A link works once, for a day."""


@dataclass(frozen=True, slots=True)
class PersonLink:
    token: str
    name: str | None
    """Whose password it sets; None: a name is chosen with it, and it makes the first owner."""
    role: Role

    @property
    def is_set_up(self) -> bool:
        return self.name is None


def link_path(token: str) -> str:
    return f"{LINK_PATH}?token={token}"
