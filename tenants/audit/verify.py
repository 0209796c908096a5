"""Checks a whole log against what was signed, and names the first altered row, and how.

Pure. Rows are added in stored order; each is checked by its place, the number in its bytes, the columns
beside them, and the tree: stored subtrees, head and every checkpoint. Numbers and columns name a row exactly;
if these were rewritten too, a wrong signed root names the rows since the last right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tenants.audit.entry import decode, first_difference
from tenants.audit.key_history import KeyHistory, SignerChange
from tenants.audit.note import Checkpoint, PublicKey, claimed_checkpoint, open_checkpoint
from tenants.audit.tree import HASH_BYTES, TILE, Frontier, frontier_of, leaf_hash
from tenants.errors import Invalid


class Damage(StrEnum):
    EDITED = "edited"
    MISSING = "missing"
    REORDERED = "reordered"
    INSERTED = "inserted"
    DUPLICATED = "duplicated"
    TRUNCATED = "truncated"
    COLUMN = "column differs"
    SUBTREE = "subtree wrong"
    HEAD = "head wrong"
    CHECKPOINT = "checkpoint wrong"
    REWRITTEN = "rewritten"


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The first damage of a log: it begins at one of the rows from `first` to `last`."""

    damage: Damage
    first: int
    last: int
    detail: str

    def __str__(self) -> str:
        where = f"row {self.first}" if self.first == self.last else f"rows {self.first} to {self.last}"
        return f"{where}: {self.damage}: {self.detail}"


@dataclass(frozen=True, slots=True)
class LogRow:
    """A stored row: its number, the bytes that are hashed, and the columns beside them."""

    seq: int
    entry: bytes
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Head:
    """The head as claimed. `peaks` None: only size and root are known."""

    size: int
    root: bytes
    peaks: bytes | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    rows: int
    signed: int
    """Rows that checkpoints cover; whoever writes the database may still change the others."""
    checkpoints: int
    finding: AuditFinding | None

    @property
    def words(self) -> str:
        """What was found right."""
        unsigned = self.rows - self.signed
        later = f"; the last {unsigned:,} are not signed yet" if unsigned else ""
        return f"{self.rows:,} rows, as {self.checkpoints:,} checkpoints signed them{later}"


class LogVerifier:
    """One check of one log. Add every row, then `verdict`."""

    def __init__(
        self,
        keys: Sequence[PublicKey],
        checkpoints: Sequence[tuple[int, str]],
        *,
        kept: Sequence[str] = (),
        tiles: Sequence[tuple[int, bytes]] | None = None,
        changes: Sequence[SignerChange] = (),
    ) -> None:
        """`checkpoints`: the log's notes by stored size; `kept`: from elsewhere; `tiles`: stored subtrees;
        `changes`: of the key, as rows claim. Raises `Invalid` for a kept note that no key signed."""
        history = KeyHistory(keys, changes, dict(checkpoints))
        self._finding: AuditFinding | None = None
        self._wrong_column: AuditFinding | None = None
        """A row whose columns differ from its bytes: the next root says which of them was changed."""
        self._out_of_place: tuple[int, LogRow, int] | None = None
        """A place, the row in it, and the number in that row's bytes."""
        self._found_later = False
        """The row that belongs to that place lies further down."""
        self._edge = Frontier()
        self._leaves = bytearray()
        self._rows = 0
        self._good, self._good_kept = 0, 0
        """Rows up to which a checkpoint's root came out; of the kept ones alone."""
        self._kept_wrong: Checkpoint | None = None
        self._kept: dict[int, list[Checkpoint]] = {}
        for note in kept:
            opened = open_checkpoint(note, history.at(claimed_checkpoint(note).size))
            self._kept.setdefault(opened.size, []).append(opened)
        self._stored: dict[int, Checkpoint] = {}
        self._unreadable: AuditFinding | None = None
        for size, note in sorted(checkpoints):
            self._open(size, note, history.at(size))
        self._tiles = None if tiles is None else list(tiles)
        self._tile_wrong: int | None = None
        self._at_root()

    def add(self, row: LogRow) -> None:
        place, self._rows = self._rows, self._rows + 1
        if self._out_of_place is not None:
            self._found_later = self._found_later or _said(row).get("seq") == self._out_of_place[0]
            return
        if self._finding is not None:
            return
        said = _said(row)
        if not said:
            self._finding = AuditFinding(Damage.EDITED, place, place, "its bytes are no entry")
            return
        if said["seq"] != place:
            self._out_of_place = (place, row, said["seq"])
            return
        if self._wrong_column is None:
            name = first_difference(row.seq, row.fields, said)
            if name is not None:
                detail = f"{name} is not what the row's bytes say"
                self._wrong_column = AuditFinding(Damage.COLUMN, place, place, detail)
        leaf = leaf_hash(row.entry)
        self._leaves += leaf
        self._edge = self._edge.append(leaf)
        self._at_tile()
        self._at_root()

    def verdict(self, head: Head | None = None) -> Verdict:
        finding = self._finding or self._misplaced() or self._at_end(head)
        signed = min(self._rows, max(self._stored, default=0))
        return Verdict(self._rows, signed, len(self._stored), finding)

    def _open(self, size: int, note: str, keys: Sequence[PublicKey]) -> None:
        try:
            opened = open_checkpoint(note, keys)
        except Invalid as error:
            self._note_unreadable(size, str(error))
            return
        if opened.size != size:
            self._note_unreadable(size, f"it is stored under {size} rows and speaks of {opened.size}")
            return
        self._stored[size] = opened

    def _note_unreadable(self, size: int, detail: str) -> None:
        at = max(0, size - 1)
        self._unreadable = self._unreadable or AuditFinding(Damage.CHECKPOINT, at, at, detail)

    def _at_tile(self) -> None:
        size = self._edge.size
        if self._tiles is None or size % TILE or self._tile_wrong is not None:
            return
        number = size // TILE - 1
        first = (size - TILE) * HASH_BYTES
        root = frontier_of(_hashes(self._leaves[first:])).root
        stored = self._tiles[number] if number < len(self._tiles) else None
        if stored != (number, root):
            self._tile_wrong = number

    def _at_root(self) -> None:
        """Compares the root with those that were signed for that many rows."""
        size = self._edge.size
        stored, kept = self._stored.get(size), self._kept.get(size, [])
        if stored is None and not kept:
            return
        root = self._edge.root
        if stored is not None:
            if stored.root != root:
                self._finding = self._not_signed(size)
                return
            self._good = size
        wrong = next((checkpoint for checkpoint in kept if checkpoint.root != root), None)
        if wrong is not None and self._kept_wrong is None:
            self._kept_wrong = wrong
        elif kept and wrong is None and self._kept_wrong is None:
            self._good_kept = size
        if self._wrong_column is not None and stored is not None:
            self._finding = self._wrong_column

    def _not_signed(self, size: int) -> AuditFinding:
        """The rows since the last root that came out are not those of this one."""
        if self._wrong_column is not None:
            at = self._wrong_column.first
            return AuditFinding(
                Damage.EDITED, at, at, f"not what was signed, and {self._wrong_column.detail}"
            )
        first, last = self._good, size - 1
        if self._tile_wrong is not None:
            first, last = max(first, self._tile_wrong * TILE), min(last, self._tile_wrong * TILE + TILE - 1)
        if first > last:
            first, last = self._good, size - 1
        return AuditFinding(
            Damage.EDITED,
            first,
            last,
            f"they are not those of the checkpoint of {size} rows: changed, removed"
            " or put in between, and numbered anew",
        )

    def _misplaced(self) -> AuditFinding | None:
        """What a misplaced row means, once all rows are known."""
        if self._out_of_place is None:
            return None
        place, row, number = self._out_of_place
        if self._found_later and number > place:
            return AuditFinding(
                Damage.REORDERED, place, place, f"row {number} lies here, and row {place} later"
            )
        if number < place:
            if leaf_hash(row.entry) == self._leaf(number):
                return AuditFinding(Damage.DUPLICATED, place, place, f"a copy of row {number} lies here")
            return AuditFinding(
                Damage.INSERTED, number, place, f"two rows say that they are row {number}, and differ"
            )
        return AuditFinding(
            Damage.MISSING,
            place,
            number - 1,
            f"after row {place - 1} comes row {number}" if place else f"the first row is row {number}",
        )

    def _at_end(self, head: Head | None) -> AuditFinding | None:
        """What only the end shows: rows cut off, the head, the last subtrees, kept checkpoints."""
        size = self._edge.size
        told = max([*self._stored, *self._kept, 0 if head is None else head.size])
        if told > size:
            by = "the head" if told not in (*self._stored, *self._kept) else "a checkpoint"
            return AuditFinding(
                Damage.TRUNCATED, size, told - 1, f"{by} speaks of {told} rows, there are {size}"
            )
        if self._kept_wrong is not None:
            at = self._kept_wrong.size
            return AuditFinding(
                Damage.REWRITTEN,
                self._good_kept,
                at - 1,
                f"they are not those of a checkpoint of {at} rows that was kept elsewhere"
                + (
                    ", though the log's own checkpoints fit them: they were signed again"
                    if self._stored
                    else ""
                ),
            )
        if self._unreadable is not None:
            return self._unreadable
        if self._wrong_column is not None:
            return self._wrong_column
        return self._wrong_tile() or (None if head is None else self._wrong_head(head))

    def _wrong_tile(self) -> AuditFinding | None:
        if self._tiles is None:
            return None
        complete = self._edge.size // TILE
        number = self._tile_wrong
        if number is None and len(self._tiles) > complete:
            number = complete
        if number is None:
            return None
        first = number * TILE
        detail = "the stored hash of these rows is not theirs: proofs made with it are wrong"
        return AuditFinding(Damage.SUBTREE, first, first + TILE - 1, detail)

    def _wrong_head(self, head: Head) -> AuditFinding | None:
        size, last = self._edge.size, max(0, self._edge.size - 1)
        if head.size < size:
            return AuditFinding(
                Damage.HEAD, head.size, last, f"it speaks of {head.size} rows, there are {size}"
            )
        if head.root == self._edge.root and head.peaks in (None, self._edge.packed):
            return None
        first = min(self._good, last)
        detail = "it is not the root of the rows: it was changed, or rows since the last checkpoint were"
        return AuditFinding(Damage.HEAD, first, last, detail)

    def _leaf(self, number: int) -> bytes:
        return bytes(self._leaves[number * HASH_BYTES : (number + 1) * HASH_BYTES])


def _said(row: LogRow) -> dict[str, Any]:
    """The fields in a row's bytes; empty: they are no entry."""
    try:
        return decode(row.entry)
    except Invalid:
        return {}


def _hashes(packed: bytes | bytearray) -> list[bytes]:
    return [bytes(packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES)]
