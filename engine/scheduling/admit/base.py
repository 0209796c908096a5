"""Admission decision: may the next candidate start now, beside what runs.

*May it join* the batch as it is, and *does it fit* into memory with what the running ones will still need.
That no candidate is skipped is the scheduler's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from engine.entry import QueueEntry
from engine.messages import StepTime
from engine.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """What a candidate would join, as it stands now."""

    now_s: float
    running: SequenceOf[Sequence]
    """In order of admission, those admitted in this step included."""
    num_waiting: int
    max_sequences: int
    block_tokens: int
    num_blocks: int
    free_blocks: int
    """Blocks that can be had without taking any from a sequence."""
    step_time: StepTime
    kept_blocks: int = 0
    """Of the free ones: those that no start may take."""
    most_promised_blocks: int | None = None
    """What the running ones can take at the very most beyond the blocks they hold; None: not known."""
    admitted_now: int = 0
    waiting: Callable[[], Iterable[QueueEntry]] = tuple
    """All that wait, the candidate included, in no particular order; to go through them takes its time."""
    memo: dict[str, Any] = field(default_factory=dict)
    """What a choice computes once a step; emptied when the batch changes other than by an admission."""


@dataclass(frozen=True, slots=True)
class Defer:
    """Not now. `until_s`: when to ask again even if nothing else happens; None: when the batch changes."""

    rule: str
    until_s: float | None = None


class Admit(Protocol):
    """Contract: with nothing running, and after at most the longest wait it declares, a candidate joins; what
    it wants of an empty pool is never more than the candidate can ever need."""

    @property
    def name(self) -> str: ...

    @property
    def claims(self) -> frozenset[str]:
        """See `engine.scheduling.claims`."""
        ...

    @property
    def longest_wait_s(self) -> float:
        """With nothing running, a candidate joins after this time at the latest."""
        ...

    def arrived(self, now_s: float) -> None:
        """A new sequence waits."""
        ...

    def joins(self, candidate: Sequence, batch: Batch) -> Defer | None:
        """None: it may start. A `Defer` also holds the entries behind it."""
        ...

    def blocks_wanted(self, candidate: Sequence, batch: Batch) -> int:
        """Free blocks there must be for the candidate to start beside `batch.running`; may be more where
        `batch.free_blocks` less `batch.kept_blocks` are enough for more than that."""
        ...

    def suspends(self, candidate: Sequence, batch: Batch) -> list[Sequence]:
        """Running sequences of the candidate's tier to pause (KV kept) so that it may join; mostly none."""
        ...

    def admitted(self, candidate: Sequence, batch: Batch) -> None:
        """The candidate was admitted: `batch.running` holds it now."""
        ...

    def preempted(self) -> None:
        """A running sequence lost its KV for want of memory: too much had been let in."""
        ...

    def stepped(self) -> None:
        """A step was put together."""
        ...

    def turned(self, fresh: Self) -> Self:
        """This choice with the numbers of `fresh` that knobs turn: the same object where it keeps state."""
        ...


class QuietAdmit:
    """A choice that only answers: arrivals, evictions and steps mean nothing to it, it suspends none, has no
    knob."""

    __slots__ = ()

    def arrived(self, now_s: float) -> None: ...

    def suspends(self, candidate: Sequence, batch: Batch) -> list[Sequence]:
        return []

    def preempted(self) -> None: ...

    def stepped(self) -> None: ...

    def turned(self, fresh: Self) -> Self:
        return self
