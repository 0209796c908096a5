"""Merkle tree of RFC 6962 (SHA-256): roots, appending by the right edge, proofs of inclusion and consistency.

Pure. Leaves are numbered from 0. A `Frontier` is the right edge of a tree: the roots of the complete subtrees
that its size is the sum of, largest first; appending a leaf takes O(log n) hashes. Proofs are made from
complete subtrees, which the caller has stored or makes from leaves (`Subtree`)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

HASH_BYTES = 32
TILE = 256
"""Rows of one stored subtree."""
EMPTY_ROOT = hashlib.sha256(b"").digest()

Subtree = Callable[[int, int], bytes]
"""The root of `size` leaves from `start` on, where `size` is a power of two that divides `start`."""


def leaf_hash(entry: bytes) -> bytes:
    return hashlib.sha256(b"\0" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


@dataclass(frozen=True, slots=True)
class Frontier:
    """The right edge of a tree."""

    size: int = 0
    peaks: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 0 or len(self.peaks) != self.size.bit_count():
            raise ValueError(f"a tree of {self.size} leaves has {self.size.bit_count()} peaks")

    def append(self, leaf: bytes) -> Frontier:
        """The edge with one more leaf, given by its hash."""
        peaks, size = [*self.peaks, leaf], self.size
        while size & 1:
            right = peaks.pop()
            peaks.append(node_hash(peaks.pop(), right))
            size >>= 1
        return Frontier(self.size + 1, tuple(peaks))

    @property
    def root(self) -> bytes:
        return _folded(self.peaks)

    @property
    def packed(self) -> bytes:
        return b"".join(self.peaks)

    @classmethod
    def unpacked(cls, size: int, packed: bytes) -> Frontier:
        """Raises `ValueError` for what is no frontier of that many leaves."""
        parts = tuple(packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES))
        if any(len(part) != HASH_BYTES for part in parts):
            raise ValueError(f"peaks have {HASH_BYTES} bytes each")
        return cls(size, parts)


def frontier_of(leaves: Iterable[bytes]) -> Frontier:
    edge = Frontier()
    for leaf in leaves:
        edge = edge.append(leaf)
    return edge


def subtree_of_leaves(leaves: Sequence[bytes], first: int = 0) -> Subtree:
    def subtree(start: int, size: int) -> bytes:
        level = list(leaves[start - first : start - first + size])
        if start < first or len(level) != size:
            raise ValueError(f"leaves {start} to {start + size - 1} are not all there")
        while len(level) > 1:
            level = [node_hash(level[at], level[at + 1]) for at in range(0, len(level), 2)]
        return level[0]

    return subtree


def root_of(start: int, end: int, subtree: Subtree) -> bytes:
    """The root of the leaves from `start` to before `end`: `start` is 0, or the largest power of two within
    them divides it."""
    return _folded([subtree(*part) for part in _complete_parts(start, end)])


def inclusion_proof(index: int, size: int, subtree: Subtree) -> list[bytes]:
    """The hashes from a leaf's sibling to the root of the first `size` leaves (RFC 6962, 2.1.1)."""
    if not 0 <= index < size:
        raise ValueError(f"a tree of {size} leaves has no leaf {index}")
    start, end = 0, size
    path: list[bytes] = []
    while end - start > 1:
        middle = start + _left_size(end - start)
        if index < middle:
            path.append(root_of(middle, end, subtree))
            end = middle
        else:
            path.append(root_of(start, middle, subtree))
            start = middle
    return path[::-1]


def consistency_proof(old: int, new: int, subtree: Subtree) -> list[bytes]:
    """The hashes that show that `new` leaves extend the tree of the first `old` (RFC 6962, 2.1.2)."""
    if not 0 <= old <= new:
        raise ValueError(f"a tree of {new} leaves extends none of {old}")
    if old in (0, new):
        return []
    start, end, is_whole = 0, new, True
    path: list[bytes] = []
    while old != end:
        middle = start + _left_size(end - start)
        if old <= middle:
            path.append(root_of(middle, end, subtree))
            end = middle
        else:
            path.append(root_of(start, middle, subtree))
            start, is_whole = middle, False
    if not is_whole:
        path.append(root_of(start, end, subtree))
    return path[::-1]


def is_included(leaf: bytes, index: int, size: int, proof: Sequence[bytes], root: bytes) -> bool:
    """Whether a proof leads from the leaf hash to the root (RFC 9162, 2.1.3.2)."""
    if not 0 <= index < size:
        return False
    at, last, digest = index, size - 1, leaf
    for part in proof:
        if last == 0:
            return False
        if at & 1 or at == last:
            digest = node_hash(part, digest)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            digest = node_hash(digest, part)
        at, last = at >> 1, last >> 1
    return last == 0 and digest == root


def is_consistent(old: int, old_root: bytes, new: int, new_root: bytes, proof: Sequence[bytes]) -> bool:
    """Whether a proof shows that the new tree begins with the old one (RFC 9162, 2.1.4.2)."""
    if not 0 <= old <= new:
        return False
    if old == new or old == 0:
        return not proof and (old_root == new_root if old == new else old_root == EMPTY_ROOT)
    parts = list(proof)
    if old & (old - 1) == 0:
        parts.insert(0, old_root)
    if not parts:
        return False
    at, last = old - 1, new - 1
    while at & 1:
        at, last = at >> 1, last >> 1
    of_old = of_new = parts[0]
    for part in parts[1:]:
        if last == 0:
            return False
        if at & 1 or at == last:
            of_old, of_new = node_hash(part, of_old), node_hash(part, of_new)
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            of_new = node_hash(of_new, part)
        at, last = at >> 1, last >> 1
    return last == 0 and of_old == old_root and of_new == new_root


def _left_size(size: int) -> int:
    """The largest power of two below the size, which is more than 1."""
    return 1 << (size - 1).bit_length() - 1


def _complete_parts(start: int, end: int) -> list[tuple[int, int]]:
    """The complete subtrees that these leaves are made of, from left to right."""
    parts = []
    while start < end:
        size = 1 << (end - start).bit_length() - 1
        parts.append((start, size))
        start += size
    return parts


def _folded(peaks: Sequence[bytes]) -> bytes:
    if not peaks:
        return EMPTY_ROOT
    digest = peaks[-1]
    for peak in reversed(peaks[:-1]):
        digest = node_hash(peak, digest)
    return digest
