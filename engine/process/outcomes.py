"""`OutcomeStore`: outcomes that no gateway has acknowledged yet.

Bounded: sequences are refused while there is no room for their outcomes (`has_room`). What is left when the
engine ends is written to a file and read at the next start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable
from pathlib import Path

import msgspec

from engine.messages import SequenceOutcome

MAX_OUTCOMES = 100_000
FILE_VERSION = 1


class OutcomesUnreadable(Exception):
    """The outcomes file is damaged or of another version."""


class HeldOutcome(msgspec.Struct, frozen=True):
    """An outcome and the gateway that must settle it."""

    gateway_id: str
    outcome: SequenceOutcome
    ended_ns: int = 0
    """Since 1970; 0: not known."""


class OutcomesFile(msgspec.Struct, frozen=True):
    """Content of `<engine_id>.outcomes`."""

    version: int
    held: list[HeldOutcome]


class OutcomeStore:
    """Unacknowledged outcomes by sequence id, oldest first."""

    def __init__(self, max_outcomes: int = MAX_OUTCOMES) -> None:
        if max_outcomes < 1:
            raise ValueError(f"max_outcomes must be at least 1, not {max_outcomes}")
        self._max_outcomes = max_outcomes
        self._held: dict[str, HeldOutcome] = {}
        self._restored: set[str] = set()
        self._on_settled: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._held

    def has_room(self, live_sequences: int) -> bool:
        """Whether one more sequence may start beside `live_sequences`: each will leave an outcome."""
        return len(self._held) + live_sequences < self._max_outcomes

    def keep(self, gateway_id: str, outcome: SequenceOutcome, ended_ns: int = 0) -> None:
        """Keeps a sequence's outcome. Raises `ValueError` if it has one already."""
        if outcome.sequence_id in self._held:
            raise ValueError(f"sequence {outcome.sequence_id} has an outcome already")
        self._held[outcome.sequence_id] = HeldOutcome(gateway_id, outcome, ended_ns)

    def acknowledge(self, gateway_id: str, sequence_ids: Iterable[str]) -> list[HeldOutcome]:
        """Forgets and returns settled outcomes of `gateway_id`; other ids are ignored."""
        settled, had_restored = [], bool(self._restored)
        for sequence_id in sequence_ids:
            held = self._held.get(sequence_id)
            if held is not None and held.gateway_id == gateway_id:
                settled.append(self._held.pop(sequence_id))
                self._restored.discard(sequence_id)
        if had_restored and not self._restored:
            self._on_settled()
        return settled

    def collect(
        self, gateway_id: str, *, adopt_from_all_but: Container[str] | None = None
    ) -> list[SequenceOutcome]:
        """The outcomes that `gateway_id` must settle, oldest first. With `adopt_from_all_but` (ids of live
        gateways), outcomes of all other gateways are reassigned to `gateway_id`."""
        if adopt_from_all_but is not None:
            for sequence_id, held in self._held.items():
                if held.gateway_id not in adopt_from_all_but:
                    self._held[sequence_id] = HeldOutcome(gateway_id, held.outcome, held.ended_ns)
        return [held.outcome for held in self._held.values() if held.gateway_id == gateway_id]

    def held(self) -> list[HeldOutcome]:
        return list(self._held.values())

    def restore(self, held: Iterable[HeldOutcome], on_settled: Callable[[], None] = lambda: None) -> None:
        """Takes over the outcomes of an earlier engine; may exceed the bound, so that none is lost.
        `on_settled`: called when all of them are acknowledged."""
        self._on_settled = on_settled
        for entry in held:
            self._held.setdefault(entry.outcome.sequence_id, entry)
            self._restored.add(entry.outcome.sequence_id)


def write_outcomes(path: Path, store: OutcomeStore) -> None:
    """Writes all outcomes durably (fsync); an empty store removes the file."""
    if not len(store):
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(path.name + ".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.msgpack.encode(OutcomesFile(FILE_VERSION, store.held())))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_outcomes(path: Path) -> list[HeldOutcome]:
    """Outcomes of an earlier engine; empty without a file. Raises `OutcomesUnreadable` on a damaged file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    try:
        file = msgspec.msgpack.decode(content, type=OutcomesFile)
    except msgspec.DecodeError as error:
        raise OutcomesUnreadable(f"{path} is damaged: {error}") from error
    if file.version != FILE_VERSION:
        raise OutcomesUnreadable(f"{path} has version {file.version}, this engine reads {FILE_VERSION}")
    return file.held
