"""A real trace of conversations with the blocks that their prompts share (`data/ATTRIBUTION.md`), scaled.

One prompt token stands for `INPUT_SCALE` of the trace (a block of 512 is a block of 16), one of an answer for
`OUTPUT_SCALE`.
"""

from __future__ import annotations

import csv
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from engine.virtual.replica import VOCABULARY
from gateway.flow.routing import prefix_hashes
from ops.simulate.traffic.requests import SimulatedRequest

DATA = Path(__file__).parent / "data"
TRACE_BLOCK_TOKENS = 512
INPUT_SCALE, OUTPUT_SCALE = 32, 8
BLOCK_TOKENS = TRACE_BLOCK_TOKENS // INPUT_SCALE


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request of the trace."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of its prompt's blocks; two prompts share as much as their leading ids agree."""


def read_trace(most: int) -> list[Conversation]:
    """The first requests, their blocks numbered anew."""
    trace: list[Conversation] = []
    named = 0
    with (DATA / "conversations.csv").open(newline="", encoding="utf-8") as file:
        for row in islice(csv.DictReader(file), most):
            input_tokens = int(row["input_tokens"])
            shared = int(row["shared_blocks"] or 0)
            start = trace[int(row["prefix_of"])].blocks[:shared] if shared else ()
            own = -(-input_tokens // TRACE_BLOCK_TOKENS) - len(start)
            blocks = (*start, *range(named, named + own))
            trace.append(
                Conversation(float(row["arrival_s"]), input_tokens, int(row["output_tokens"]), blocks)
            )
            named += own
    return trace


def shared_cache_hits(trace: Sequence[Conversation], num_blocks: int) -> int:
    """Blocks that one cache of `num_blocks` would have held when each request came, the least recently used
    leaving first. The last token of a prompt is always computed, so its block never counts."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for conversation in trace:
        full = conversation.blocks[: (conversation.input_tokens - 1) // TRACE_BLOCK_TOKENS]
        for block in full:
            if block not in held:
                break
            hits += 1
        for block in reversed(full):
            held[block] = None
            held.move_to_end(block)
        while len(held) > num_blocks:
            held.popitem(last=False)
    return hits


def simulated(conversation: Conversation) -> SimulatedRequest:
    """A request with a prompt whose blocks are equal where the trace's are."""
    base = VOCABULARY - 1
    tokens = [
        1 + block // base**place % base
        for block in conversation.blocks
        for place in (*range(3), *([3] * (BLOCK_TOKENS - 3)))
    ]
    prompt = tuple(tokens[: max(1, conversation.input_tokens // INPUT_SCALE)])
    return SimulatedRequest(
        conversation.at_s,
        "chat",
        len(prompt),
        max(1, conversation.output_tokens // OUTPUT_SCALE),
        prompt=prompt,
        prefix_hashes=prefix_hashes(prompt, "chat", block_tokens=BLOCK_TOKENS),
    )
