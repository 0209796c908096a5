"""The plan of one step: which sequence gets how many tokens; and the work that it makes for the runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.core.model_runner import RowStart, StepWork
from engine.kv.host import Copies
from engine.scheduling.admit.base import Defer
from engine.scheduling.room import Room
from engine.sequence import Sequence


@dataclass(slots=True)
class Plan:
    """Work of one step: tokens by sequence."""

    room: Room
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    paused: list[Sequence] = field(default_factory=list)
    """Sequences that lost their place; their KV is kept."""
    copies: Copies = field(default_factory=lambda: Copies([], []))
    """KV copies to host memory and back, before the step."""
    hold: Defer | None = None

    @property
    def shares(self) -> dict[Sequence, int]:
        """Tokens handed out, by sequence, in the order of hand-out."""
        return self.room.given

    @property
    def num_tokens(self) -> int:
        return self.room.used_tokens


def prepare(shares: Mapping[Sequence, int]) -> StepWork:
    """The work of a step, from the tokens by sequence: its rows, and what changed in them since their last
    step. Notes that the runner has that from now on."""
    work = StepWork(num_tokens=list(shares.values()))
    rows, positions, samples, fed = work.rows, work.positions, work.samples, work.token_ids
    for sequence, tokens in shares.items():
        position, row, token_ids = sequence.computed_tokens, sequence.row, sequence.token_ids
        rows.append(row)
        positions.append(position)
        samples.append(position + tokens == len(token_ids))
        if not sequence.has_begun:
            sequence.has_begun = True
            prompt_tokens, sampling = sequence.prompt_tokens, sequence.submit.sampling
            work.starts.append(
                RowStart(
                    row, sequence.sequence_id, position, prompt_tokens, token_ids, sampling, sequence.seed
                )
            )
        table, cursor = sequence.block_table, sequence.cursor
        if cursor.handed_over != len(table):
            first = cursor.handed_over
            work.blocks += [(row, index, table[index]) for index in range(first, len(table))]
            cursor.handed_over = len(table)
        fed.append([] if sequence.is_chained else token_ids[position : position + tokens])
    return work
