"""`BlockTables`: block tables of sequences over the block pool and the prefix tree.

A sequence owns a block table and a `PrefixCursor`; both are changed here and nowhere else. The published
blocks of a table are always its first `cursor.blocks`, and a table that names a published block names those
before it as well: so an unreferenced block has no referenced descendants, and the cached blocks can all be
evicted, the deepest first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.kv.blocks import BlockPool, OutOfBlocks
from engine.kv.host import HostBlocks
from engine.kv.prefix import NO_BLOCK, Match, Node, PrefixCursor, PrefixTree


@dataclass(slots=True)
class KvCounts:
    """Event counts since the cache was created."""

    hit_tokens: int = 0
    adopted_tokens: int = 0
    deferrals: int = 0
    """Steps that a sequence waited for another's blocks."""
    published_blocks: int = 0
    revived_blocks: int = 0
    """Cached blocks that were reused."""
    duplicate_blocks: int = 0
    """Blocks computed though an equal one had been published meanwhile."""
    evicted_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


class BlockTables:
    """Device blocks, their prefix tree and the tables that name them; base of `engine.kv.cache.KvCache`."""

    def __init__(
        self, num_blocks: int, block_tokens: int, num_host_blocks: int, prefix_caching: bool
    ) -> None:
        """Raises ValueError for a size that makes no sense. Without `prefix_caching` nothing is published."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self.counts = KvCounts()
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(block_tokens)
        self._host = HostBlocks(num_host_blocks)

    @property
    def num_blocks(self) -> int:
        """All blocks: blank + cached + referenced + fenced."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: the blank and the cached ones."""
        return self._pool.num_free + self._pool.num_cached

    @property
    def num_blank(self) -> int:
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        return self._pool.num_cached

    @property
    def num_referenced(self) -> int:
        return self._pool.num_referenced

    @property
    def num_fenced(self) -> int:
        return self._pool.num_fenced

    @property
    def num_published(self) -> int:
        """Blocks that can be found by others, whether a table names them or not."""
        return len(self._tree)

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def num_host_free(self) -> int:
        return self._host.num_free

    def match(
        self, token_ids: Sequence[int], salt: str, most_tokens: int, known: Match | None = None
    ) -> Match:
        """The longest published prefix of `token_ids` in whole blocks, at most `most_tokens` tokens: one less
        than a prompt has, as its last token has to be computed. `known`: an earlier match of the same tokens
        and salt; only what was published since is looked up."""
        if not self.prefix_caching:
            return Match(salt, [], 0)
        most_blocks = max(0, min(most_tokens, len(token_ids)) // self.block_tokens)
        nodes = known.nodes[:most_blocks] if known is not None and known.salt == salt else []
        while nodes and nodes[-1].block == NO_BLOCK:
            nodes.pop()
        nodes += self._tree.descend(nodes[-1] if nodes else None, token_ids, salt, most_blocks)
        return Match(salt, nodes, len(nodes) * self.block_tokens)

    def cached_tokens(self, token_ids: Sequence[int], salt: str) -> int:
        return self.match(token_ids, salt, len(token_ids) - 1).tokens

    def locality(self, token_ids: Sequence[int], salt: str, *, blocks: int = 1) -> int:
        """Hash of the first `blocks` blocks under a salt, whatever is cached; the same in every process."""
        first = token_ids[: blocks * self.block_tokens]
        digest = blake2b(repr((salt, list(first))).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def shortage(self, match: Match, count: int, yielded: Sequence[list[int]] = ()) -> int:
        """Blocks that lack (0 or less: none) for a table of `count` blocks that begins with `match`, once the
        tables `yielded` are freed. Blocks that other tables name as well are not gained, referenced ones of
        the match cost nothing. Raises ValueError for an outdated match."""
        _check_match(match)
        wanted = match.blocks
        revived = sum(self._pool.is_cached(block) for block in wanted)
        gained = 0
        if yielded:
            named = Counter(block for table in yielded for block in table)
            kept = set(wanted)
            gained = sum(
                references == self._pool.references(block) and block not in kept
                for block, references in named.items()
            )
        return count - len(wanted) - (self.num_free - revived + gained)

    def attach(self, table: list[int], cursor: PrefixCursor, match: Match) -> None:
        """Starts an empty table with a match. Raises ValueError for a used table, other salt or old match."""
        if table or cursor.blocks:
            raise ValueError("only an empty block table can begin with a match")
        if match.salt != cursor.salt:
            raise ValueError("the match was looked up under another salt")
        _check_match(match)
        table += self._reference(match.blocks)
        if match.nodes:
            self._advance(cursor, match.nodes[-1])
        self.counts.hit_tokens += match.tokens

    def extend(self, table: list[int], count: int) -> None:
        """Adds `count` blocks, blank ones first, then cached ones. Raises `OutOfBlocks`, changing nothing."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        lacking = count - self._pool.num_free
        if lacking > 0:
            self._evict(lacking)
        table += self._pool.allocate(count)

    def extend_each(self, tables: Sequence[list[int]]) -> None:
        """Adds a block to each table, as calls of `extend` would. Raises `OutOfBlocks`, changing nothing."""
        if len(tables) > self.num_free:
            raise OutOfBlocks(f"{len(tables)} blocks wanted, {self.num_free} free")
        blank: list[int] = []
        self.extend(blank, min(len(tables), self.num_blank))
        evicted: list[int] = []
        self.extend(evicted, len(tables) - len(blank))
        # Of several evicted together the last one is taken first.
        for table, block in zip(tables, blank + evicted[::-1], strict=True):
            table.append(block)

    def publish(
        self, table: list[int], cursor: PrefixCursor, token_ids: Sequence[int], computed_tokens: int
    ) -> None:
        """Publishes a table's full, computed blocks. Call between steps, after the forward pass that wrote
        them; visits only blocks completed since the last call.

        Where an equal block was published meanwhile, the table names that one and releases its own. That is
        safe (a full, computed block is never written again, and a step that still reads the old one is
        fenced) and needed: a table that kept its own below the other could run out of memory with a block
        that only it keeps from being evicted.

        Raises ValueError for more computed tokens than there are, before the step's copies were handed over,
        and for another table's cursor.
        """
        full = computed_tokens // self.block_tokens
        if full == cursor.blocks or not self.prefix_caching:
            return
        if computed_tokens > min(len(token_ids), len(table) * self.block_tokens):
            raise ValueError(
                f"{computed_tokens} tokens cannot be computed: {len(token_ids)} are known, and "
                f"{len(table)} blocks of {self.block_tokens} hold them"
            )
        if self._host.has_arriving:
            raise ValueError("a step whose copies were not handed over cannot have been computed")
        self._check_cursor(table, cursor)
        for index in range(cursor.blocks, full):
            key = self._tree.key(cursor.node, token_ids, cursor.salt)
            node = self._tree.child(cursor.node, key)
            own = table[index]
            if node is None:
                node = self._tree.add(cursor.node, key, own)
                self._pool.publish(own)
                self.counts.published_blocks += 1
            elif node.block != own:
                table[index : index + 1] = self._reference([node.block])
                cursor.handed_over = min(cursor.handed_over, index)
                self._pool.free([own])
                self.counts.duplicate_blocks += 1
            self._advance(cursor, node)

    def free(self, table: list[int], cursor: PrefixCursor) -> None:
        """Releases and empties a table, deepest first; unshared published blocks stay cached. Idempotent."""
        self._check_cursor(table, cursor)
        self._release(table)
        cursor.reset()

    @property
    def has_fence(self) -> bool:
        return self._pool.has_fence

    def fence(self, step: int) -> None:
        self._pool.fence(step)

    def lift_fence(self, step: int) -> None:
        self._pool.lift_fence(step)

    def _evict(self, count: int) -> None:
        evict, remove = self._pool.evict, self._tree.remove
        for _ in range(count):
            remove(evict())
        self.counts.evicted_blocks += count

    def _reference(self, blocks: list[int]) -> list[int]:
        cached = self._pool.num_cached
        self._pool.share(blocks)
        self.counts.revived_blocks += cached - self._pool.num_cached
        return blocks

    def _release(self, blocks: list[int]) -> None:
        # Only a block with a single reference can wait for its content.
        self._host.cancel(blocks)
        self._pool.free(blocks)

    def _advance(self, cursor: PrefixCursor, node: Node) -> None:
        cursor.node = node
        cursor.blocks = node.depth

    def _check_cursor(self, table: list[int], cursor: PrefixCursor) -> None:
        if cursor.node is not None and table[cursor.blocks - 1 : cursor.blocks] != [cursor.node.block]:
            raise ValueError("the cursor is not this block table's")


def _check_match(match: Match) -> None:
    if not match.is_current:
        raise ValueError("the match is out of date: blocks of it were evicted")
