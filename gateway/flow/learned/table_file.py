"""Learned table: one vector of actions for each macro-state, as one small JSON file."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

import msgspec
from msgspec import Meta, Struct

from gateway.flow.learned.actions import Actions
from gateway.flow.learned.macro_state import NUM_STATES, Borders, SeenRange, Situation, state_of

FORMAT, VERSION = "fairgate learned policy", 1
MOST_FILE_BYTES = 1 << 16


class BadLearnedTable(ValueError):
    """Not a table of this version; the message has the reason and the remedy."""


class TableEntry(Struct, frozen=True, forbid_unknown_fields=True):
    state: Annotated[int, Meta(ge=0, lt=NUM_STATES)]
    actions: Actions
    share: Annotated[float, Meta(ge=0, le=1)]
    """Of the looks of the fit, in this state; 0: it was not seen, and nothing was fitted."""


class Judged(Struct, frozen=True, forbid_unknown_fields=True):
    """The sum that the fit minimised, on requests that it had not seen; see `fairgate policy learn`."""

    learned: float
    hybrid: float
    spread: float


class LearnedTable(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    format: str
    version: int
    model: str
    machine: str
    trace: str
    seed: int
    simulated_requests: int
    borders: Borders
    fitted: SeenRange
    entries: Annotated[list[TableEntry], Meta(min_length=1, max_length=NUM_STATES)]
    judged: Judged | None = None

    def look_up(self, situation: Situation) -> tuple[int, Actions | None]:
        """The macro-state and its actions, in O(1); None: outside of the fit."""
        state = state_of(situation, self.borders)
        entry = self.indexed[state]
        if entry is None or not entry.share or not self.fitted.covers(situation):
            return state, None
        return state, entry.actions

    @cached_property
    def indexed(self) -> list[TableEntry | None]:
        """As `by_state`, built once."""
        return self.by_state()

    def by_state(self) -> list[TableEntry | None]:
        """The entries in the order of the states."""
        found: list[TableEntry | None] = [None] * NUM_STATES
        for entry in self.entries:
            found[entry.state] = entry
        return found

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Raises `BadLearnedTable` for anything but a whole table of this version."""
        try:
            head = msgspec.json.decode(content, type=_LearnedHead)
            if head.format != FORMAT:
                raise BadLearnedTable("it is no table of a learned policy")
            if head.version != VERSION:
                raise BadLearnedTable(
                    f"it is of version {head.version}, and this program reads version {VERSION}"
                )
            table = msgspec.json.decode(content, type=cls)
        except msgspec.DecodeError as error:
            raise BadLearnedTable(f"it is no table of a learned policy: {error}") from None
        if len({entry.state for entry in table.entries}) != len(table.entries):
            raise BadLearnedTable("a macro-state stands in it twice")
        return table

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises `BadLearnedTable`, also for an unreadable file."""
        try:
            if path.exists() and not path.is_file():
                # A pipe would block `open`.
                raise BadLearnedTable("it is no file")
            with path.open("rb") as file:
                content = file.read(MOST_FILE_BYTES + 1)
            if len(content) > MOST_FILE_BYTES:
                raise BadLearnedTable(f"it has more than a table's {MOST_FILE_BYTES:,} bytes")
            return cls.decode(content)
        except OSError as error:
            raise BadLearnedTable(
                f"{path} cannot be read: {error.strerror}; see `fairgate policy learn`"
            ) from None
        except BadLearnedTable as error:
            raise BadLearnedTable(f"{path}: {error}; make one with `fairgate policy learn`") from None


class _LearnedHead(Struct):
    format: str = ""
    version: int = 0
