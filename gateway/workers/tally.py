"""Counts that the workers of one port add up, in a file that all of them map.

Each seat writes a column of its own and reads the others': no lock, and no system call. A key stands, hashed
with a secret, in two rows, and counts as the smaller one: keys that share one row are not taken for one.
"""

from __future__ import annotations

import mmap
import os
import secrets
from hashlib import blake2b
from pathlib import Path

ROWS = 2**16
"""Two halves, each key once in each."""
SECRET_BYTES = 32
CELL_BYTES = 8


class Counts:
    """Of one process that is alone: others have nothing."""

    def add(self, key: object, number: int) -> int:
        """Counts `number` more (or less) here, and returns what the others have of the key. By adding first,
        two that take the last place at once are both refused, and never both let in."""
        return 0


ALONE = Counts()


class Tally:
    """The file, as one process sees it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            cells = memoryview(mmap.mmap(file.fileno(), 0))
        self._secret = bytes(cells[:SECRET_BYTES])
        self._cells = cells[SECRET_BYTES:].cast("q")
        self._seats = len(self._cells) // ROWS

    @classmethod
    def create(cls, path: Path, seats: int) -> Tally:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.truncate(SECRET_BYTES + seats * ROWS * CELL_BYTES)  # without holes written: it stays small
        return cls(path)

    def clear(self, number: int) -> None:
        """Forgets what a seat counted. Only once its process has ended."""
        begin = number * ROWS
        self._cells[begin : begin + ROWS] = memoryview(bytes(ROWS * CELL_BYTES)).cast("q")

    def of(self, number: int, what: str) -> Counts:
        """What the seat of this number counts of one kind."""
        return _SeatCounts(self, number, what)

    def add(self, number: int, key: bytes, more: int) -> int:
        digest, half = int.from_bytes(blake2b(key, key=self._secret, digest_size=8).digest()), ROWS // 2
        cells, others = self._cells, []
        for row in (digest % half, half + (digest >> 32) % half):
            cells[number * ROWS + row] += more
            column = cells[row::ROWS]
            others.append(sum(column) - column[number])
        return min(others)


class _SeatCounts(Counts):
    def __init__(self, tally: Tally, number: int, what: str) -> None:
        self._tally = tally
        self._number = number
        self._what = what

    def add(self, key: object, number: int) -> int:
        return self._tally.add(self._number, f"{self._what} {key}".encode(), number)
