"""Whose KV lies where, what of it can be used again, and what has to give way for new?

The one face of `engine.kv` for the scheduler, its only writer. A sequence owns a block table and a
`PrefixCursor`; both are changed here and nowhere else. The published blocks of a table are always its first
`cursor.blocks`, and whoever names a published block names those before it as well: so a block nobody names
has none below it that somebody does, and the cached blocks can all be evicted, the deepest first.

    match, attach      a prompt begins with blocks that are published already
    extend             blocks for what has to be computed; evicts cached ones when none is free
    publish            after the forward pass: full, computed blocks can be found by others
    announce, defer, adopt    two that begin alike and run together compute it once
    free               published blocks become cached, the others free
    swap_out, swap_in  to host memory and back
    close_step         the step is put together: the copies it needs

Per call, work is proportional to the blocks touched; nothing scans the pool (but `check`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from engine.kv.blocks import BlockPool, OutOfBlocks, blocks_for
from engine.kv.host import Copies, HostBlocks, SwapOut
from engine.kv.leaders import Leaders
from engine.kv.prefix import NO_BLOCK, Match, Node, PrefixCursor, PrefixTree


@dataclass(slots=True)
class KvCounts:
    """What has happened since the cache was made."""

    hit_tokens: int = 0
    """Tokens that a sequence found in the cache when it started or came back."""
    adopted_tokens: int = 0
    """Tokens that another one computed while a sequence was running."""
    deferrals: int = 0
    """Steps that a sequence waited for another's blocks."""
    published_blocks: int = 0
    revived_blocks: int = 0
    """Cached blocks that were wanted again."""
    duplicate_blocks: int = 0
    """Blocks computed though an equal one had been published meanwhile."""
    evicted_blocks: int = 0
    swapped_out_blocks: int = 0
    swapped_in_blocks: int = 0


class KvCache:
    """The blocks on the device, the prefix tree over them, and the blocks in host memory."""

    def __init__(
        self, num_blocks: int, block_tokens: int, *, num_host_blocks: int = 0, prefix_caching: bool = True
    ) -> None:
        """Raises ValueError for a size that makes no sense. Without `prefix_caching` nothing is published."""
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self.counts = KvCounts()
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(block_tokens)
        self._leaders = Leaders()
        self._host = HostBlocks(num_host_blocks)

    # ------------------------------------------------------------ sizes

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
        """Blocks with nothing worth keeping in them."""
        return self._pool.num_free

    @property
    def num_cached(self) -> int:
        """Published blocks that no table names."""
        return self._pool.num_cached

    @property
    def num_referenced(self) -> int:
        """Blocks that at least one table names."""
        return self._pool.num_referenced

    @property
    def num_fenced(self) -> int:
        """Blocks that were let go while a step was executing."""
        return self._pool.num_fenced

    @property
    def num_published(self) -> int:
        """Blocks that can be found by others, whether a table names them or not."""
        return len(self._tree)

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory."""
        return self._host.num_blocks

    @property
    def num_host_free(self) -> int:
        """Host blocks that can be filled now."""
        return self._host.num_free

    # ------------------------------------------------------------ looking

    def match(
        self, token_ids: Sequence[int], salt: str, most_tokens: int, known: Match | None = None
    ) -> Match:
        """The longest published beginning of `token_ids`, in whole blocks and at most `most_tokens` tokens.

        Changes nothing. A prompt whose last token has to be computed, because it chooses the next one, asks
        for one token less than it has. `known` is an earlier match of the same tokens and salt: only what
        was published since is looked up.
        """
        if not self.prefix_caching:
            return Match(salt, [], 0)
        most_blocks = max(0, min(most_tokens, len(token_ids)) // self.block_tokens)
        nodes = known.nodes[:most_blocks] if known is not None and known.salt == salt else []
        while nodes and nodes[-1].block == NO_BLOCK:
            nodes.pop()
        nodes += self._tree.descend(nodes[-1] if nodes else None, token_ids, salt, most_blocks)
        return Match(salt, nodes, len(nodes) * self.block_tokens)

    def cached_tokens(self, token_ids: Sequence[int], salt: str) -> int:
        """How many of a prompt's tokens need not be computed, as things stand."""
        return self.match(token_ids, salt, len(token_ids) - 1).tokens

    def locality(self, token_ids: Sequence[int], salt: str, *, blocks: int = 1) -> int:
        """Equal for prompts that share their first `blocks` blocks under one salt, whatever is cached; else
        almost surely different. The same in every process."""
        first = token_ids[: blocks * self.block_tokens]
        digest = blake2b(repr((salt, list(first))).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def shortage(self, match: Match, count: int, giving_way: Iterable[list[int]] = ()) -> int:
        """Blocks that would lack (0 or less: none) for a table of `count` blocks that begins with `match`,
        once the tables `giving_way` were freed. Changes nothing.

        Blocks that others name as well are not gained, and those of the match cost nothing while somebody
        names them: neither a table's length nor `num_free` alone says what fits. Raises ValueError for a
        match that is out of date.
        """
        _check_match(match)
        wanted = match.blocks
        revived = sum(self._pool.is_cached(block) for block in wanted)
        gained = 0
        if not self._pool.is_fenced:
            named = Counter(block for table in giving_way for block in table)
            kept = set(wanted)
            gained = sum(
                references == self._pool.references(block) and block not in kept
                for block, references in named.items()
            )
        return count - len(wanted) - (self.num_free - revived + gained)

    # ------------------------------------------------------------ a table's life

    def attach(self, table: list[int], cursor: PrefixCursor, match: Match) -> None:
        """Begins an empty table with a match.

        Raises ValueError if the table is not empty, the salt is another's, or the match is out of date.
        """
        if table or cursor.blocks:
            raise ValueError("only an empty block table can begin with a match")
        if match.salt != cursor.salt:
            raise ValueError("the match was looked up under another salt")
        _check_match(match)
        table += self._name(match.blocks)
        if match.nodes:
            self._advance(cursor, match.nodes[-1])
        self.counts.hit_tokens += match.tokens

    def extend(self, table: list[int], count: int) -> None:
        """Adds `count` blocks: blank ones first, then cached ones are evicted, the one let go first, first.

        Raises `OutOfBlocks` and changes nothing when there are not enough.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        for _ in range(count - self._pool.num_free):
            self._tree.remove(self._pool.evict())
            self.counts.evicted_blocks += 1
        table += self._pool.allocate(count)

    def publish(
        self, table: list[int], cursor: PrefixCursor, token_ids: Sequence[int], computed_tokens: int
    ) -> None:
        """Lets others find a table's full, computed blocks. Called between steps, after the forward pass that
        wrote them; looks only at blocks that were completed since the last time.

        Where an equal block was published meanwhile, the table names that one from now on and its own is let
        go. That is safe at any time: nothing is written to a full, computed block any more, both hold keys
        and values of the same tokens after the same tokens, and a step that still reads the old one is
        fenced. It is needed as well: a table that kept its own but stood below the other could run out of
        memory with a block that only it keeps from being evicted.

        Raises ValueError for more computed tokens than there are, before the copies of the step were handed
        over, and for a cursor that is not this table's.
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
                table[index : index + 1] = self._name([node.block])
                self._pool.free([own])
                self.counts.duplicate_blocks += 1
            self._advance(cursor, node)

    def free(self, table: list[int], cursor: PrefixCursor) -> None:
        """Lets a table's blocks go, the deepest first, and empties it; a second time is harmless.

        Published blocks that nobody else names are cached, the others free; behind a fence neither, until it
        is lifted.
        """
        self._check_cursor(table, cursor)
        self._let_go(table)
        self._leaders.retract(cursor)
        cursor.reset()

    def fence(self) -> None:
        """A step begins to execute: blocks that are let go from now on may still be read or written by it."""
        self._pool.fence()

    def lift_fence(self) -> None:
        """The step is over: the blocks let go meanwhile are cached or free."""
        self._pool.lift_fence()

    def evict_cached(self) -> int:
        """Forgets everything that no table names (a cold start, to measure). Returns how many blocks."""
        count = self._pool.num_cached
        for _ in range(count):
            self._tree.remove(self._pool.evict())
        self.counts.evicted_blocks += count
        return count

    # ------------------------------------------------------------ computing a common beginning once

    def announce(
        self, cursor: PrefixCursor, token_ids: Sequence[int], computed_tokens: int, tokens: int
    ) -> None:
        """A sequence gets `tokens` tokens in the step that is being put together: others may wait for the
        next block that it completes. Ends with the step, with `retract` or with the table."""
        ends = (cursor.blocks + 1) * self.block_tokens
        if self.prefix_caching and computed_tokens < ends <= computed_tokens + tokens:
            self._leaders.announce(cursor, self._tree.key(cursor.node, token_ids, cursor.salt))

    def retract(self, cursor: PrefixCursor) -> None:
        """It does not get its tokens in this step after all."""
        self._leaders.retract(cursor)

    def defer(
        self,
        cursor: PrefixCursor,
        token_ids: Sequence[int],
        computed_tokens: int,
        match: Match | None = None,
    ) -> bool:
        """Whether a sequence had better get no tokens in this step, because another one is computing the
        block that it needs next. `match`: what it would start with, if it has no table yet.

        It says so at most once for each number of tokens that could be had so far, so a sequence waits at
        most once for each block gained; who waited in vain (the other was cancelled) computes for itself.
        """
        node, at = cursor.node, cursor.blocks * self.block_tokens
        if match is not None:
            node, at = match.nodes[-1] if match.nodes else None, match.tokens
        elif computed_tokens - at >= self.block_tokens:
            return False
        if not self.prefix_caching or at + self.block_tokens >= len(token_ids) or at <= cursor.deferred_at:
            return False
        if not self._leaders.is_led(node, self._tree.key(node, token_ids, cursor.salt), cursor):
            return False
        cursor.deferred_at = at
        self.counts.deferrals += 1
        return True

    def adopt(
        self,
        table: list[int],
        cursor: PrefixCursor,
        token_ids: Sequence[int],
        computed_tokens: int,
        most_tokens: int,
    ) -> int:
        """Takes over blocks that others published where a running sequence would compute next, in place of
        its own. Returns how many tokens it need not compute; 0 if there are none, or if not all its full,
        computed blocks are published. Called between steps, `most_tokens` as in `match`.
        """
        first = cursor.blocks
        most_blocks = min(most_tokens, len(token_ids)) // self.block_tokens
        if most_blocks <= first or computed_tokens // self.block_tokens != first:
            return 0
        nodes = list(self._tree.descend(cursor.node, token_ids, cursor.salt, most_blocks))
        if not nodes:
            return 0
        self._check_cursor(table, cursor)
        own = table[first : first + len(nodes)]
        table[first : first + len(own)] = self._name([node.block for node in nodes])
        self._let_go(own)
        self._advance(cursor, nodes[-1])
        gained = cursor.blocks * self.block_tokens - computed_tokens
        self.counts.adopted_tokens += gained
        return gained

    # ------------------------------------------------------------ host memory

    def swap_out(self, table: list[int], cursor: PrefixCursor, computed_tokens: int) -> SwapOut | None:
        """Moves a table's KV to host memory: plans the copies, frees the table.

        None, and nothing is changed, when there is nothing to keep, when host memory has no room, or when
        the table was swapped in in this very step. Published blocks are copied too: what stays of them in
        the cache may be evicted.
        """
        count = blocks_for(computed_tokens, self.block_tokens)
        if not 0 <= count <= len(table):
            raise ValueError(f"{computed_tokens} computed tokens do not lie in {len(table)} blocks")
        swapped = self._host.put(table[:count], computed_tokens) if count else None
        if swapped is not None:
            self.free(table, cursor)
            self.counts.swapped_out_blocks += count
        return swapped

    def swap_in(self, swapped: SwapOut, table: list[int]) -> None:
        """Gives a sequence's KV its device blocks back, and plans the copies.

        The table may begin with a match (of at most `swapped.tokens` tokens): only the rest is copied. Raises
        `OutOfBlocks` when there are too few blocks, ValueError when nothing lies in host memory or the table
        is longer than that; nothing is changed then. The next `publish` lets others find what came back.
        """
        lacking = len(swapped.blocks) - len(table)
        if not swapped.blocks or lacking < 0:
            raise ValueError(f"a table of {len(table)} blocks cannot take {len(swapped.blocks)} host blocks")
        attached = len(table)
        self.extend(table, lacking)
        self._host.take(swapped, table[attached:])
        self.counts.swapped_in_blocks += lacking

    def drop(self, swapped: SwapOut) -> None:
        """Gives a sequence's host blocks back without reading them; a second time is harmless."""
        self._host.drop(swapped)

    def close_step(self) -> Copies:
        """The step is put together: announcements end, and its copies are the caller's. They must be executed
        before the step's forward pass, all that go out before all that come back; if that fails, the KV of
        every sequence swapped out in this step is lost and has to be dropped."""
        self._leaders.clear()
        return self._host.close()

    # ------------------------------------------------------------ audit

    def check(
        self, holders: Iterable[tuple[list[int], PrefixCursor]], swapped: Iterable[SwapOut] = ()
    ) -> None:
        """Full self-audit against all tables with their cursors, and all that is swapped out. Raises
        AssertionError. Takes time proportional to the whole cache."""
        held = list(holders)
        self._pool.check(table for table, _ in held)
        self._tree.check()
        self._host.check(swapped)
        assert self.num_free + self.num_referenced + self.num_fenced == self.num_blocks
        private: set[int] = set()
        for table, cursor in held:
            way = [] if cursor.node is None else self._tree.way(cursor.node)
            assert way == table[: cursor.blocks], "a table does not begin with its cursor's way"
            rest = table[cursor.blocks :]
            assert len(set(table)) == len(table), "a table names a block twice"
            assert not any(self._tree.holds(block) for block in rest), "a table names what it did not publish"
            assert private.isdisjoint(rest), "two tables name a block that is not published"
            private.update(rest)
        for block in range(self.num_blocks):
            is_published = self._pool.is_published(block)
            assert is_published == self._tree.holds(block), "a block is published, but not in the tree"
        before: set[int] = set()
        for block in self._pool.cached_blocks():
            assert before.issuperset(self._tree.below(block)), "a block is evicted before those below it"
            before.add(block)

    # ------------------------------------------------------------ inside

    def _name(self, blocks: list[int]) -> list[int]:
        """Adds a reference to published blocks."""
        cached = self._pool.num_cached
        self._pool.share(blocks)
        self.counts.revived_blocks += cached - self._pool.num_cached
        return blocks

    def _let_go(self, blocks: list[int]) -> None:
        # Only a block that one table alone names can wait for its content.
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
