"""New passwords in forms, typed twice."""

from __future__ import annotations

from collections.abc import Mapping

from tenants.errors import Invalid
from tenants.people.way_in import WayIn


async def chosen_password(way_in: WayIn, name: str, form: Mapping[str, str]) -> str:
    """The hash of the new password in `password` and `repeat`. Raises `Invalid`, `TooManyLogIns`."""
    wanted = form.get("password", "")
    if wanted != form.get("repeat", ""):
        raise Invalid("repeat", "the passwords do not match")
    return await way_in.new_hash(name, wanted)
