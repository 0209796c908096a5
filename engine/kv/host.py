"""Bookkeeping of KV in host memory: host blocks and planned copies (made by `engine.model.host_pool`).

Copies are executed before a step's forward pass, **all outbound ones before all inbound ones**. So a host
block released while a step is put together must not be reused in the same step, and device blocks released
before their content arrived must no longer receive it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.kv.blocks import blocks_for


@dataclass(slots=True, eq=False)
class SwapOut:
    """A sequence's KV in host memory."""

    blocks: list[int]
    """Host blocks in token order; empty once swapped in or dropped."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Copies:
    """Block copies of a step before its forward pass: first all of `out`, then all of `back`."""

    out: list[tuple[int, int]]
    """(device block, host block)"""
    back: list[tuple[int, int]]
    """(host block, device block)"""

    def __bool__(self) -> bool:
        return bool(self.out or self.back)


class HostBlocks:
    """A fixed number of blocks in host memory, and the copies planned for the next step."""

    def __init__(self, num_blocks: int) -> None:
        """0: nothing can be swapped out. Raises ValueError for a negative number."""
        if num_blocks < 0:
            raise ValueError(f"num_host_blocks must not be negative, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._released: list[int] = []
        self._out: list[tuple[int, int]] = []
        self._back: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def has_arriving(self) -> bool:
        """Whether device blocks wait for their content."""
        return bool(self._back)

    @property
    def has_planned(self) -> bool:
        """Whether copies, or blocks released beside them, wait for `close`."""
        return bool(self._out or self._back or self._released)

    def put(self, device_blocks: list[int], tokens: int) -> SwapOut | None:
        """Plans copies to host memory; None without room, or when a block has yet to receive its content."""
        count = len(device_blocks)
        if count > len(self._free) or any(block in self._back for block in device_blocks):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._out += zip(device_blocks, blocks, strict=True)
        return SwapOut(blocks, tokens)

    def take(self, swapped: SwapOut, device_blocks: list[int]) -> None:
        """Plans copies of the last blocks back to `device_blocks`, and releases the host blocks."""
        first = len(swapped.blocks) - len(device_blocks)
        self._back.update(zip(device_blocks, swapped.blocks[first:], strict=True))
        self.drop(swapped)

    def drop(self, swapped: SwapOut) -> None:
        """Releases a sequence's host blocks. Idempotent."""
        # Without planned copies no inbound copy can read them: free immediately.
        (self._released if self._out or self._back else self._free).extend(reversed(swapped.blocks))
        swapped.blocks = []
        swapped.tokens = 0

    def cancel(self, device_blocks: Iterable[int]) -> None:
        """Cancels inbound copies to device blocks that were released."""
        for block in device_blocks:
            self._back.pop(block, None)

    def close(self) -> Copies:
        """Returns the planned copies and frees the released blocks."""
        copies = Copies(self._out, [(host, device) for device, host in self._back.items()])
        self._free += self._released
        self._released = []
        self._out = []
        self._back = {}
        return copies

    def check(self, swapped: Iterable[SwapOut], block_tokens: int) -> None:
        """Self-audit of owners, sizes and planned copies. Raises AssertionError."""
        held: list[int] = []
        for sequence in swapped:
            assert len(sequence.blocks) == blocks_for(sequence.tokens, block_tokens), (
                f"{sequence.tokens} tokens do not fill {len(sequence.blocks)} host blocks"
            )
            held += sequence.blocks
        everywhere = self._free + self._released + held
        assert not {host for _, host in self._out} & {*self._free}, "a free host block is written"
        assert not {*self._back.values()} & {*self._free}, "a free host block is read"
        assert len(set(everywhere)) == len(everywhere), "a host block has two owners"
        missing = self.num_blocks - len(everywhere)
        assert missing == 0, f"{missing} host blocks leaked"
