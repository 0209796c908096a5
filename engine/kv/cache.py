"""`KvCache`: block tables, prefix cache and host memory of an engine.

The interface of `engine.kv` for the sequence table, its only writer.

    match, attach      start a table with published blocks of a prompt
    extend             allocate blocks; evicts cached ones when none is free
    publish            after the forward pass: full, computed blocks can be found by others
    announce, defer, adopt    compute a common prefix of running sequences once
    free               published blocks become cached, the others free
    swap_out, swap_in  to host memory and back
    close_step         returns the copies of the step

Per call, work is proportional to the blocks touched; nothing scans the pool (but `check`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.kv.blocks import BlockPool, blocks_for
from engine.kv.host import Copies, HostBlocks, SwapOut
from engine.kv.prefix import Match, Node, PrefixCursor, PrefixTree
from engine.kv.tables import BlockTables


class PrefillSharing:
    """Computes the common prefix of concurrent prompts once: the sequence that gets tokens first announces
    the block that it completes; another that needs that block next may wait for one step and adopt it."""

    def __init__(self) -> None:
        self._leaders: dict[tuple[Node | None, bytes], PrefixCursor] = {}
        self._in_flight: list[set[tuple[Node | None, bytes]]] = []
        """The blocks that steps in flight complete, the oldest step first."""
        self._closed: set[tuple[Node | None, bytes]] = set()

    def announce(self, cursor: PrefixCursor, key: bytes) -> None:
        cursor.announced = (cursor.node, key)
        self._leaders.setdefault(cursor.announced, cursor)

    def retract(self, cursor: PrefixCursor) -> None:
        announced = cursor.announced
        cursor.announced = None
        if announced is not None and self._leaders.get(announced) is cursor:
            del self._leaders[announced]

    def is_led(self, node: Node | None, key: bytes, follower: PrefixCursor) -> bool:
        """Whether another sequence computes that block in this step."""
        return self._leaders.get((node, key), follower) is not follower

    @property
    def has_in_flight(self) -> bool:
        return any(self._in_flight)

    def is_in_flight(self, node: Node | None, key: bytes) -> bool:
        """Whether a step that is not over computes that block."""
        return any((node, key) in completed for completed in self._in_flight)

    def close(self) -> None:
        """The step is put together: what it announced is computed by the next step in flight."""
        self._closed = {*self._leaders}
        self._leaders.clear()

    def launched(self) -> None:
        self._in_flight.append(self._closed)

    def over(self) -> None:
        self._in_flight.pop(0)

    def __len__(self) -> int:
        return len(self._leaders)

    def check(self, cursors: Iterable[PrefixCursor]) -> None:
        """Self-audit: every leader is one of `cursors` and announced its block. Raises AssertionError."""
        live = {id(cursor) for cursor in cursors}
        for announced, leader in self._leaders.items():
            assert id(leader) in live, "a leader is gone"
            assert leader.announced == announced, "a leader did not announce its block"


def check_consistency(
    pool: BlockPool,
    tree: PrefixTree,
    host: HostBlocks,
    sharing: PrefillSharing,
    holders: Iterable[tuple[list[int], PrefixCursor]],
    swapped: Iterable[SwapOut],
    block_tokens: int,
) -> None:
    """Raises AssertionError for a block that leaked, has two owners, or is not where it should be. `holders`:
    all tables with their cursors; `swapped`: all KV in host memory. O(cache size)."""
    held = list(holders)
    pool.check(table for table, _ in held)
    tree.check()
    host.check(swapped, block_tokens)
    sharing.check(cursor for _, cursor in held)
    _check_tables(tree, held)
    for block in range(pool.num_blocks):
        assert pool.is_published(block) == tree.holds(block), "a block is published, but not in the tree"
    before: set[int] = set()
    for block in pool.cached_blocks():
        assert before.issuperset(tree.below(block)), "a block is evicted before those below it"
        before.add(block)


def _check_tables(tree: PrefixTree, held: list[tuple[list[int], PrefixCursor]]) -> None:
    private: set[int] = set()
    for table, cursor in held:
        path = [] if cursor.node is None else tree.path(cursor.node)
        assert path == table[: cursor.blocks], "a table does not begin with its cursor's path"
        rest = table[cursor.blocks :]
        assert len(set(table)) == len(table), "a table names a block twice"
        assert not any(tree.holds(block) for block in rest), "a table names what it did not publish"
        assert private.isdisjoint(rest), "two tables name a block that is not published"
        private.update(rest)


class KvCache(BlockTables):
    """Block tables, shared prefixes, and host memory."""

    def __init__(
        self, num_blocks: int, block_tokens: int, *, num_host_blocks: int = 0, prefix_caching: bool = True
    ) -> None:
        super().__init__(num_blocks, block_tokens, num_host_blocks, prefix_caching)
        self._sharing = PrefillSharing()

    def free(self, table: list[int], cursor: PrefixCursor) -> None:
        super().free(table, cursor)
        self._sharing.retract(cursor)

    def announce(
        self, cursor: PrefixCursor, token_ids: Sequence[int], computed_tokens: int, tokens: int
    ) -> None:
        """Announces the block that a sequence's `tokens` tokens complete in this step: others may wait."""
        ends = (cursor.blocks + 1) * self.block_tokens
        if self.prefix_caching and computed_tokens < ends <= computed_tokens + tokens:
            self._sharing.announce(cursor, self._tree.key(cursor.node, token_ids, cursor.salt))

    def retract(self, cursor: PrefixCursor) -> None:
        """Withdraws an announcement: the sequence gets no tokens in this step."""
        self._sharing.retract(cursor)

    def defer(
        self,
        cursor: PrefixCursor,
        token_ids: Sequence[int],
        computed_tokens: int,
        match: Match | None = None,
    ) -> bool:
        """Whether a sequence should get no tokens in this step, as another one computes the block that it
        needs next. `match`: its prefix, if it has no table yet. Beyond the steps in flight, true at most once
        for each number of available tokens: one that waited in vain (the leader was cancelled) computes for
        itself."""
        node, at = cursor.node, cursor.blocks * self.block_tokens
        if match is not None:
            node, at = match.nodes[-1] if match.nodes else None, match.tokens
        elif computed_tokens - at >= self.block_tokens:
            return False
        if not self.prefix_caching or at + self.block_tokens >= len(token_ids):
            return False
        key = None
        if at > cursor.deferred_at:
            key = self._tree.key(node, token_ids, cursor.salt)
            if self._sharing.is_led(node, key, cursor):
                cursor.deferred_at = at
                self.counts.deferrals += 1
                return True
        if not self._sharing.has_in_flight:
            return False
        if not self._sharing.is_in_flight(node, key or self._tree.key(node, token_ids, cursor.salt)):
            return False
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
        """Replaces blocks that a running sequence would compute next by published ones; returns the tokens
        saved, 0 unless its full, computed blocks are all published. Call between steps."""
        first = cursor.blocks
        most_blocks = min(most_tokens, len(token_ids)) // self.block_tokens
        if most_blocks <= first or computed_tokens // self.block_tokens != first:
            return 0
        nodes = list(self._tree.descend(cursor.node, token_ids, cursor.salt, most_blocks))
        if not nodes:
            return 0
        self._check_cursor(table, cursor)
        own = table[first : first + len(nodes)]
        table[first : first + len(own)] = self._reference([node.block for node in nodes])
        cursor.handed_over = min(cursor.handed_over, first)
        self._release(own)
        self._advance(cursor, nodes[-1])
        gained = cursor.blocks * self.block_tokens - computed_tokens
        self.counts.adopted_tokens += gained
        return gained

    def swap_out(self, table: list[int], cursor: PrefixCursor, computed_tokens: int) -> SwapOut | None:
        """Plans a table's copies to host memory and frees it. None, changing nothing: no KV, no room, or
        swapped in in this step. Published blocks are copied too, as the cache may evict them."""
        count = blocks_for(computed_tokens, self.block_tokens)
        if not 0 <= count <= len(table):
            raise ValueError(f"{computed_tokens} computed tokens do not lie in {len(table)} blocks")
        swapped = self._host.put(table[:count], computed_tokens) if count else None
        if swapped is not None:
            self.free(table, cursor)
            self.counts.swapped_out_blocks += count
        return swapped

    def swap_in(self, swapped: SwapOut, table: list[int]) -> None:
        """Allocates device blocks for a swapped sequence, and plans the copies of what lies past the table's
        match (at most `swapped.tokens` tokens). Raises `OutOfBlocks`, and ValueError when nothing lies in
        host memory or the table is longer; nothing is changed then."""
        lacking = len(swapped.blocks) - len(table)
        if not swapped.blocks or lacking < 0:
            raise ValueError(f"a table of {len(table)} blocks cannot take {len(swapped.blocks)} host blocks")
        attached = len(table)
        self.extend(table, lacking)
        self._host.take(swapped, table[attached:])
        self.counts.swapped_in_blocks += lacking

    def drop(self, swapped: SwapOut) -> None:
        self._host.drop(swapped)

    def close_step(self) -> Copies:
        """Ends announcements and returns the step's copies, to be executed before its forward pass, outbound
        ones first; if that fails, KV swapped out in this step is lost and has to be dropped."""
        self._sharing.close()
        return self._host.close()

    def fence(self, step: int) -> None:
        super().fence(step)
        self._sharing.launched()

    def lift_fence(self, step: int) -> None:
        super().lift_fence(step)
        self._sharing.over()

    @property
    def is_step_open(self) -> bool:
        """Whether a step is being put together: announcements or copies wait for `close_step`."""
        return bool(len(self._sharing) or self._host.has_planned)

    def check(
        self, holders: Iterable[tuple[list[int], PrefixCursor]], swapped: Iterable[SwapOut] = ()
    ) -> None:
        """Self-audit against all tables and swapped KV. Raises AssertionError. O(cache size)."""
        check_consistency(
            self._pool, self._tree, self._host, self._sharing, holders, swapped, self.block_tokens
        )
        assert self.num_free + self.num_referenced + self.num_fenced == self.num_blocks
