"""Logs of the audit in memory, and what an attacker does to them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tenants.audit import export
from tenants.audit.entry import IDS, decode, encode
from tenants.audit.note import Checkpoint, SigningKey
from tenants.audit.tree import TILE, Frontier, leaf_hash
from tenants.audit.verify import Damage, Head, LogRow, LogVerifier, Verdict

KEY = SigningKey("test.example/log", bytes(32))
SIGNED_BY = [KEY.public]


@dataclass
class LogCopy:
    """All that lies in the database."""

    rows: list[LogRow]
    tiles: list[tuple[int, bytes]] = field(default_factory=list)
    head: Head = field(default_factory=lambda: Head(0, Frontier().root, b""))
    checkpoints: list[tuple[int, str]] = field(default_factory=list)

    def copy(self) -> LogCopy:
        return LogCopy(list(self.rows), list(self.tiles), self.head, list(self.checkpoints))

    def recompute(self) -> None:
        """Makes anew what needs no key: tiles and head."""
        edge, tile, self.tiles = Frontier(), Frontier(), []
        for row in self.rows:
            leaf = leaf_hash(row.entry)
            edge, tile = edge.append(leaf), tile.append(leaf)
            if tile.size == TILE:
                self.tiles.append((len(self.tiles), tile.root))
                tile = Frontier()
        self.head = Head(edge.size, edge.root, edge.packed)

    def sign(self, sizes: Sequence[int], key: SigningKey = KEY) -> None:
        """Makes the checkpoints of these sizes, and no others."""
        edge, self.checkpoints = Frontier(), []
        wanted = set(sizes)
        for size in range(len(self.rows) + 1):
            if size in wanted:
                self.checkpoints.append((size, key.signed(Checkpoint(key.name, size, edge.root).text)))
            if size < len(self.rows):
                edge = edge.append(leaf_hash(self.rows[size].entry))

    def renumber(self, *, also_bytes: bool) -> None:
        """Makes the numbers dense again: of the columns, or of the bytes as well."""
        self.rows = [
            replace(row, seq=seq, entry=encode(seq, _fields(row.entry)) if also_bytes else row.entry)
            for seq, row in enumerate(self.rows)
        ]

    def verdict(self, kept: Sequence[str] = ()) -> Verdict:
        """As the database is checked."""
        verifier = LogVerifier(SIGNED_BY, self.checkpoints, kept=kept, tiles=self.tiles)
        for row in self.rows:
            verifier.add(row)
        return verifier.verdict(self.head)

    def export(self) -> list[bytes]:
        """As a file."""
        root = base64.b64encode(self.head.root).decode()
        lines = [export.head_line(export.ExportHead(str(KEY.public), self.head.size, root))]
        notes = dict(self.checkpoints)
        for row in self.rows:
            lines.append(export.row_line(row, {"tenant": "acme"}))
            if row.seq + 1 in notes:
                lines.append(export.checkpoint_line(row.seq + 1, notes.pop(row.seq + 1)))
        lines += [export.checkpoint_line(size, note) for size, note in notes.items()]
        return [line.encode() for line in lines]

    def verdict_of_export(self, kept: Sequence[str] = ()) -> Verdict:
        """As the file is checked."""
        lines = self.export()
        return export.verify_export(lines, lines, SIGNED_BY, kept)


def row(seq: int, actor: str = "cli:root") -> LogRow:
    """A row like any other."""
    fields: dict[str, Any] = {
        "at_us": 1_700_000_000_000_000 + seq,
        "actor": actor,
        "origin": "10.0.0.7",
        "action": "limit.set",
        "target": f"lim_{seq % 7}",
        "tenant_id": None if seq % 5 == 0 else "ten_1",
        "before": None if seq % 3 == 0 else {"amount": seq, "weight": float(seq)},
        "after": {"amount": seq + 1, "name": "zoë", "flag": True},
        "request_id": None if seq % 4 == 0 else f"req_{seq}",
        "trace_id": None if seq % 4 < 2 else f"{seq:032x}",
    }
    return LogRow(seq, encode(seq, fields), fields)


def log_of(size: int, signed: Sequence[int]) -> LogCopy:
    """A log of so many rows with checkpoints of these sizes."""
    log = LogCopy([row(seq) for seq in range(size)])
    log.recompute()
    log.sign(signed)
    return log


@dataclass(frozen=True)
class Attack:
    """What was done at one row, and what has to be found of it."""

    name: str
    act: Callable[[LogCopy, int, int], None]
    """On a log, with a row and a second one."""
    damages: frozenset[Damage]
    is_exact: bool = True
    """The row itself is named; else a range with it."""
    spares_last: bool = False
    """It is not done to the last row."""
    shows_at: Callable[[int, int], int] = lambda at, other: at
    """The first row that is not as it was."""


def _fields(entry: bytes) -> dict[str, Any]:
    said = decode(entry)
    return {name: said.get(name) for name in row(0).fields}


def _change_column(name: str) -> Callable[[LogCopy, int, int], None]:
    def act(log: LogCopy, at: int, _: int) -> None:
        old = log.rows[at].fields[name]
        # Of JSON only the types: a comparison that takes 2.0 for 2, or 1 for true, finds nothing.
        values = {
            "at_us": lambda: old + 1,
            "before": lambda: {} if old is None else old | {"weight": int(old["weight"])},
            "after": lambda: old | {"flag": 1},
        }
        new = values[name]() if name in values else f"{old}x"
        log.rows[at] = replace(log.rows[at], fields={**log.rows[at].fields, name: new})

    return act


def _edit(log: LogCopy, at: int, *, columns: bool, recomputes: bool) -> None:
    fields = _fields(log.rows[at].entry) | {"actor": "cli:someone-else"}
    log.rows[at] = LogRow(at, encode(at, fields), fields if columns else log.rows[at].fields)
    if recomputes:
        log.recompute()


def _delete(log: LogCopy, at: int, *, renumbers: bool, also_bytes: bool = False) -> None:
    del log.rows[at]
    if renumbers:
        log.renumber(also_bytes=also_bytes)
        log.recompute()


def _swap(log: LogCopy, at: int, other: int, *, also_bytes: bool) -> None:
    first, second = log.rows[at], log.rows[other]
    log.rows[at], log.rows[other] = replace(second, seq=at), replace(first, seq=other)
    if also_bytes:
        log.renumber(also_bytes=True)
    log.recompute()


def _insert(log: LogCopy, at: int, *, also_bytes: bool) -> None:
    log.rows.insert(at, row(at, actor="cli:forged"))
    log.renumber(also_bytes=also_bytes)
    log.recompute()


def _truncate(log: LogCopy, at: int) -> None:
    del log.rows[at:]
    log.recompute()


def _duplicate(log: LogCopy, at: int, *, renumbers: bool) -> None:
    log.rows.insert(at + 1, log.rows[at])
    if renumbers:
        log.renumber(also_bytes=False)
        log.recompute()


def _set_back(log: LogCopy, at: int) -> None:
    log.head = log_of(at, []).head


def _replace_checkpoint(log: LogCopy, at: int, *, key: SigningKey = KEY) -> None:
    """By one of another size, or by one of a key that is not the log's."""
    index = next(index for index, (size, _) in enumerate(log.checkpoints) if size > at)
    size, _ = log.checkpoints[index]
    other = log_of(at, [at])
    other.sign([at], key)
    log.checkpoints[index] = (size, other.checkpoints[0][1])


def _change_tile(log: LogCopy, at: int) -> None:
    number = at // TILE
    log.tiles[number] = (number, bytes(32))


def _spoil(log: LogCopy, at: int) -> None:
    log.rows[at] = replace(log.rows[at], entry=b"{")
    log.recompute()


EDITED = frozenset({Damage.EDITED})
OTHER = SigningKey(KEY.name, bytes(31) + b"1")
COLUMNS = ("at_us", "actor", "origin", "action", "target", "tenant_id", "before", "after", *IDS)
ATTACKS: tuple[Attack, ...] = (
    *(Attack(f"column {name}", _change_column(name), frozenset({Damage.COLUMN})) for name in COLUMNS),
    Attack(
        "column seq",
        lambda log, at, _: log.rows.__setitem__(at, replace(log.rows[at], seq=10_000)),
        frozenset({Damage.COLUMN}),
    ),
    Attack("bytes alone", lambda log, at, _: _edit(log, at, columns=False, recomputes=True), EDITED),
    Attack("bytes that are none", lambda log, at, _: _spoil(log, at), EDITED),
    Attack(
        "bytes and columns", lambda log, at, _: _edit(log, at, columns=True, recomputes=False), EDITED, False
    ),
    Attack(
        "all that needs no key",
        lambda log, at, _: _edit(log, at, columns=True, recomputes=True),
        EDITED,
        False,
    ),
    Attack(
        "deleted",
        lambda log, at, _: _delete(log, at, renumbers=False),
        frozenset({Damage.MISSING}),
        spares_last=True,
    ),
    Attack(
        "deleted, seq made dense",
        lambda log, at, _: _delete(log, at, renumbers=True),
        frozenset({Damage.MISSING}),
        spares_last=True,
    ),
    Attack(
        "deleted, all numbered anew",
        lambda log, at, _: _delete(log, at, renumbers=True, also_bytes=True),
        frozenset({Damage.EDITED, Damage.TRUNCATED}),
        False,
    ),
    Attack(
        "exchanged",
        lambda log, at, other: _swap(log, at, other, also_bytes=False),
        frozenset({Damage.REORDERED}),
        spares_last=True,
        shows_at=min,
    ),
    Attack(
        "exchanged, numbered anew",
        lambda log, at, other: _swap(log, at, other, also_bytes=True),
        EDITED,
        False,
        spares_last=True,
        shows_at=min,
    ),
    # A checkpoint between the forged row and the one that it displaced says only that one of them is wrong.
    Attack(
        "inserted",
        lambda log, at, _: _insert(log, at, also_bytes=False),
        frozenset({Damage.INSERTED, Damage.EDITED}),
        False,
    ),
    Attack("inserted, numbered anew", lambda log, at, _: _insert(log, at, also_bytes=True), EDITED, False),
    Attack("truncated", lambda log, at, _: _truncate(log, at), frozenset({Damage.TRUNCATED})),
    *(
        Attack(
            f"duplicated{', seq made dense' if renumbers else ''}",
            lambda log, at, _, renumbers=renumbers: _duplicate(log, at, renumbers=renumbers),  # type: ignore[misc]
            frozenset({Damage.DUPLICATED}),
            shows_at=lambda at, _: at + 1,
        )
        for renumbers in (False, True)
    ),
    Attack("head set back", lambda log, at, _: _set_back(log, at), frozenset({Damage.HEAD})),
    Attack(
        "checkpoint of another size",
        lambda log, at, _: _replace_checkpoint(log, at),
        frozenset({Damage.CHECKPOINT}),
        False,
    ),
    Attack(
        "checkpoint of another key",
        lambda log, at, _: _replace_checkpoint(log, at, key=OTHER),
        frozenset({Damage.CHECKPOINT}),
        False,
    ),
)
