"""`PrefillSharing`: computes the common prefix of concurrent prompts once.

The sequence that gets tokens first announces the block that it completes in this step; another that needs
that block next may wait one step and adopt it. An announcement holds for one step only.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.prefix import Node, PrefixCursor


class PrefillSharing:
    """The announcements of one step, one block for each leader."""

    def __init__(self) -> None:
        self._leaders: dict[tuple[Node | None, bytes], PrefixCursor] = {}

    def announce(self, cursor: PrefixCursor, key: bytes) -> None:
        """Announces a block; the first sequence to do so leads."""
        cursor.announced = (cursor.node, key)
        self._leaders.setdefault(cursor.announced, cursor)

    def retract(self, cursor: PrefixCursor) -> None:
        """Withdraws an announcement: the sequence gets no tokens in this step."""
        announced = cursor.announced
        cursor.announced = None
        if announced is not None and self._leaders.get(announced) is cursor:
            del self._leaders[announced]

    def is_led(self, node: Node | None, key: bytes, follower: PrefixCursor) -> bool:
        """Whether another sequence computes that block in this step."""
        return self._leaders.get((node, key), follower) is not follower

    def clear(self) -> None:
        """Ends the step's announcements."""
        self._leaders.clear()

    def __len__(self) -> int:
        return len(self._leaders)

    def check(self, cursors: Iterable[PrefixCursor]) -> None:
        """Self-audit: every leader is one of `cursors` and announced its block. Raises AssertionError."""
        live = {id(cursor) for cursor in cursors}
        for announced, leader in self._leaders.items():
            assert id(leader) in live, "a leader is gone"
            assert leader.announced == announced, "a leader did not announce its block"
