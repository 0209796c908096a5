"""The tree against RFC 6962 as written and against pymerkle, an implementation that is not ours."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pymerkle import InmemoryTree, verify_consistency, verify_inclusion
from pymerkle.core import _inclusion_path_layout
from pymerkle.proof import InclusionProof as TheirProof

from tenants.audit.tree import (
    EMPTY_ROOT,
    Frontier,
    consistency_proof,
    frontier_of,
    inclusion_proof,
    is_consistent,
    is_included,
    leaf_hash,
    node_hash,
    root_of,
    subtree_of_leaves,
)

MOST = 100
ENTRIES = [f"entry {number}".encode() for number in range(MOST)]
LEAVES = [leaf_hash(entry) for entry in ENTRIES]
SUBTREE = subtree_of_leaves(LEAVES)
sizes = st.integers(1, MOST)


def split(size: int) -> int:
    left = 1
    while left * 2 < size:
        left *= 2
    return left


def rfc_root(leaves: Sequence[bytes]) -> bytes:
    """MTH of RFC 6962, 2.1."""
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    left = split(len(leaves))
    return node_hash(rfc_root(leaves[:left]), rfc_root(leaves[left:]))


def rfc_subproof(old: int, leaves: Sequence[bytes], is_whole: bool) -> list[bytes]:
    """SUBPROOF of RFC 6962, 2.1.2."""
    if old == len(leaves):
        return [] if is_whole else [rfc_root(leaves)]
    left = split(len(leaves))
    if old <= left:
        return [*rfc_subproof(old, leaves[:left], is_whole), rfc_root(leaves[left:])]
    return [*rfc_subproof(old - left, leaves[left:], False), rfc_root(leaves[:left])]


def their_tree(size: int) -> InmemoryTree:
    tree = InmemoryTree(algorithm="sha256")
    for entry in ENTRIES[:size]:
        tree.append_entry(entry)
    return tree


def test_every_root_up_to_100_leaves_is_that_of_the_rfc_and_of_pymerkle() -> None:
    tree, edge = InmemoryTree(algorithm="sha256"), Frontier()
    assert edge.root == EMPTY_ROOT == tree.get_root() == rfc_root([])
    for size, entry in enumerate(ENTRIES, 1):
        tree.append_entry(entry)
        edge = edge.append(leaf_hash(entry))
        assert edge.size == size
        assert edge.root == tree.get_root() == rfc_root(LEAVES[:size]) == root_of(0, size, SUBTREE)
        assert Frontier.unpacked(size, edge.packed) == edge == frontier_of(LEAVES[:size])


@settings(max_examples=30)
@given(sizes, st.data())
def test_an_inclusion_proof_is_accepted_by_pymerkle_and_proves_one_leaf_at_one_place(
    size: int, data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, size - 1))
    tree, root = their_tree(size), rfc_root(LEAVES[:size])
    proof = inclusion_proof(index, size, SUBTREE)
    assert [LEAVES[index], *proof] == tree.prove_inclusion(index + 1).path
    rule, _ = _inclusion_path_layout(index + 1, size)
    theirs = TheirProof("sha256", True, size, index + 1, rule, [LEAVES[index], *proof])
    verify_inclusion(LEAVES[index], tree.get_root(), theirs, index=index + 1, size=size)
    assert is_included(LEAVES[index], index, size, proof, root)
    for other in range(size):
        assert is_included(LEAVES[index], other, size, proof, root) is (other == index)
        assert is_included(LEAVES[other], index, size, proof, root) is (other == index)
    assert not is_included(LEAVES[index], index, size, [*proof, root], root)
    assert not is_included(LEAVES[index], size, size, proof, root)
    for at in range(len(proof)):
        assert not is_included(LEAVES[index], index, size, proof[:at] + proof[at + 1 :], root)
        changed = [*proof[:at], EMPTY_ROOT, *proof[at + 1 :]]
        assert not is_included(LEAVES[index], index, size, changed, root)


@settings(max_examples=30)
@given(sizes, st.data())
def test_a_consistency_proof_is_that_of_the_rfc_and_pymerkle_agrees(new: int, data: st.DataObject) -> None:
    old = data.draw(st.integers(1, new))
    tree = their_tree(new)
    old_root, new_root = tree.get_root(old), tree.get_root()
    proof = consistency_proof(old, new, SUBTREE)
    assert proof == rfc_subproof(old, LEAVES[:new], True)
    theirs = tree.prove_consistency(old, new)
    verify_consistency(rfc_root(LEAVES[:old]), rfc_root(LEAVES[:new]), theirs, old, new)
    assert is_consistent(old, old_root, new, new_root, proof)
    forked = rfc_root([*LEAVES[: old - 1], EMPTY_ROOT])
    assert not is_consistent(old, forked, new, new_root, proof)
    assert not is_consistent(old, old_root, new, forked, proof)
    assert not is_consistent(old, old_root, new, new_root, [*proof, new_root])
    for at in range(len(proof)):
        assert not is_consistent(old, old_root, new, new_root, proof[:at] + proof[at + 1 :])
        changed = [*proof[:at], EMPTY_ROOT, *proof[at + 1 :]]
        assert not is_consistent(old, old_root, new, new_root, changed)


def test_an_empty_log_is_extended_by_every_log_and_a_shorter_one_extends_none() -> None:
    root = rfc_root(LEAVES[:5])
    assert consistency_proof(0, 5, SUBTREE) == []
    assert is_consistent(0, EMPTY_ROOT, 5, root, [])
    assert not is_consistent(0, root, 5, root, [])
    assert not is_consistent(6, root, 5, root, [])
    assert not is_consistent(5, root, 5, root, [root])
    assert not is_consistent(5, root, 5, EMPTY_ROOT, [])
    assert not is_consistent(3, rfc_root(LEAVES[:3]), 5, root, [])


def test_what_is_no_tree_is_refused() -> None:
    for index, size in ((5, 5), (-1, 5), (0, 0)):
        with pytest.raises(ValueError, match="has no leaf"):
            inclusion_proof(index, size, SUBTREE)
    for old, new in ((6, 5), (-1, 5)):
        with pytest.raises(ValueError, match="extends none"):
            consistency_proof(old, new, SUBTREE)
    with pytest.raises(ValueError, match="peaks"):
        Frontier.unpacked(3, b"x" * 32)
    with pytest.raises(ValueError, match="32 bytes"):
        Frontier.unpacked(1, b"x" * 31)
    with pytest.raises(ValueError, match="not all there"):
        inclusion_proof(0, 8, subtree_of_leaves(LEAVES[:7]))
    with pytest.raises(ValueError, match="not all there"):
        subtree_of_leaves(LEAVES[8:16], first=8)(0, 8)
