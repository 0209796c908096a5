"""Prefix tree of published KV blocks.

A node is one full, published block; the path to it is the token ids of all blocks up to it, compared
verbatim. The first edge carries a salt as well: blocks computed under one salt cannot be found under another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct, error
from typing import Final

NO_BLOCK: Final = -1


class Node:
    """A published block, or the root, which has none."""

    __slots__ = ("block", "children", "depth", "key", "parent")

    def __init__(self, parent: Node | None, key: bytes, block: int) -> None:
        self.parent = parent
        self.key = key
        self.block = block
        """`NO_BLOCK` for the root, and when the block was evicted."""
        self.depth: int = 0 if parent is None else parent.depth + 1
        """Blocks from the root to here."""
        self.children: dict[bytes, Node] = {}


@dataclass(frozen=True, slots=True)
class Match:
    """The longest published prefix of a prompt, as of its look-up."""

    salt: str
    nodes: list[Node]
    tokens: int

    @property
    def blocks(self) -> list[int]:
        return [node.block for node in self.nodes]

    @property
    def is_current(self) -> bool:
        """Whether it can still be attached. (No node is evicted before its descendants.)"""
        return not self.nodes or self.nodes[-1].block != NO_BLOCK


@dataclass(slots=True, eq=False)
class PrefixCursor:
    """Position of a sequence's block table in the tree. One for each table, changed by the cache alone."""

    salt: str
    node: Node | None = None
    """The node of the table's last published block; None: none is."""
    blocks: int = 0
    deferred_at: int = -1
    """Tokens available from the cache when it last waited for another sequence."""
    announced: tuple[Node | None, bytes] | None = field(default=None, repr=False)
    handed_over: int = 0
    """Entries of the table, from its start, that the model runner has as they are."""

    def reset(self) -> None:
        self.handed_over = 0
        self.node = None
        self.blocks = 0
        self.deferred_at = -1


class PrefixTree:
    """The published blocks. References are counted by the block pool."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # Bytes rather than tuples: a quarter of the memory, a cached hash, and clients cannot choose
        # prompts whose hashes collide.
        self._pack = Struct(f"<{block_tokens}I").pack
        self._root = Node(None, b"", NO_BLOCK)
        self._nodes: dict[int, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def key(self, parent: Node | None, token_ids: Sequence[int], salt: str) -> bytes:
        """Key of the full block of `token_ids` after `parent`. Raises ValueError for an id beyond 32 bits."""
        depth = 0 if parent is None else parent.depth
        first = depth * self._block_tokens
        try:
            key = self._pack(*token_ids[first : first + self._block_tokens])
        except error:
            raise ValueError("token ids must lie between 0 and 4294967295") from None
        # The tokens' part has a fixed size, so that no salt can pass for tokens.
        return key + salt.encode() if depth == 0 else key

    def child(self, parent: Node | None, key: bytes) -> Node | None:
        return (self._root if parent is None else parent).children.get(key)

    def descend(
        self, start: Node | None, token_ids: Sequence[int], salt: str, most_blocks: int
    ) -> Iterator[Node]:
        """Published blocks of `token_ids` after `start` (None: root), in order; `most_blocks` in all."""
        node = start
        for _ in range(0 if start is None else start.depth, most_blocks):
            node = self.child(node, self.key(node, token_ids, salt))
            if node is None:
                return
            yield node

    def add(self, parent: Node | None, key: bytes, block: int) -> Node:
        """Publishes a block. Raises ValueError if that key or that block is taken."""
        under = self._root if parent is None else parent
        if key in under.children or block in self._nodes:
            raise ValueError(f"block {block} or its tokens are published already")
        node = Node(under, key, block)
        under.children[key] = node
        self._nodes[block] = node
        return node

    def remove(self, block: int) -> None:
        """Removes an evicted block. Raises ValueError if it has published descendants."""
        node = self._nodes[block]
        if node.children:
            raise ValueError(f"block {block} has published blocks below it")
        del self._nodes[block]
        assert node.parent is not None
        del node.parent.children[node.key]
        node.block = NO_BLOCK

    def holds(self, block: int) -> bool:
        return block in self._nodes

    def below(self, block: int) -> list[int]:
        return [child.block for child in self._nodes[block].children.values()]

    def path(self, node: Node) -> list[int]:
        blocks = []
        at: Node | None = node
        while at is not None and at is not self._root:
            blocks.append(at.block)
            at = at.parent
        return blocks[::-1]

    def check(self) -> None:
        """Every node is found from the root by its key, and under its block. Raises AssertionError."""
        found = 0
        below = [self._root]
        while below:
            node = below.pop()
            for key, child in node.children.items():
                assert child.parent is node, "a node's parent is another"
                assert child.key == key, "a node stands under another key"
                assert child.depth == node.depth + 1, "a node's depth is wrong"
                assert self._nodes.get(child.block) is child, "a block stands for two nodes, or for none"
                below.append(child)
                found += 1
        assert found == len(self._nodes), f"{len(self._nodes) - found} published blocks cannot be found"
