"""What all parts of the configuration file are made of: places in it, and the errors that name them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta

from tenants.errors import Invalid

Place = tuple[str | int, ...]
"""Way to a value from the top of the file: `("tenants", 3, "weight")`."""
State = Annotated[
    Literal["present", "absent"], Meta(description="`absent`: it is removed. What is not named stays.")
]


class ConfigInvalid(Invalid):
    """A value of the file that is refused; nothing was changed. `field` is the place."""

    def __init__(self, place: Place, message: str) -> None:
        super().__init__(as_text(place), message)
        self.place = place


def as_text(place: Place) -> str:
    """`tenants[3].weight`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".") or "the file"


def place_of(text: str) -> Place:
    parts = re.findall(r"([^.\[\]]+)|\[(\d+)\]", text)
    return tuple(int(number) if number else name for name, number in parts)
