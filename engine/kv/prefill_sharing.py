"""Which sequence will have computed which block when the step is over?

Two prompts that begin alike and start together would compute the same blocks twice. The one that gets
tokens first says which block it completes in this step; another that needs that very block next may wait one
step and take it over. An announcement holds for the step that is being put together and no longer: a leader
that was cancelled or lost its place leads nobody in the next one.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.kv.prefix import Node, PrefixCursor


class PrefillSharing:
    """The announcements of one step. One block for each leader: behind it, its followers stand again."""

    def __init__(self) -> None:
        self._leaders: dict[tuple[Node | None, bytes], PrefixCursor] = {}

    def announce(self, cursor: PrefixCursor, key: bytes) -> None:
        """The first to name a block leads."""
        cursor.announced = (cursor.node, key)
        self._leaders.setdefault(cursor.announced, cursor)

    def retract(self, cursor: PrefixCursor) -> None:
        """It gets no tokens in this step after all."""
        announced = cursor.announced
        cursor.announced = None
        if announced is not None and self._leaders.get(announced) is cursor:
            del self._leaders[announced]

    def is_led(self, node: Node | None, key: bytes, follower: PrefixCursor) -> bool:
        """Whether another sequence computes that block in this step."""
        return self._leaders.get((node, key), follower) is not follower

    def clear(self) -> None:
        """The step is put together."""
        self._leaders.clear()

    def __len__(self) -> int:
        return len(self._leaders)

    def check(self, cursors: Iterable[PrefixCursor]) -> None:
        """Self-audit: whoever leads says so itself, and is one of `cursors`. Raises AssertionError."""
        live = {id(cursor) for cursor in cursors}
        for announced, leader in self._leaders.items():
            assert id(leader) in live, "one that is gone leads others"
            assert leader.announced == announced, "one leads with a block that it did not announce"
