"""A virtual runner that is late, as a device is: a launched step is computed when its results are asked for.

Nothing of a step's work is copied before, so that work that is changed after its launch, or a block that is
given away while a step in flight still uses it, changes tokens. Failures are made where a test asks for them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.core.model_runner import OutOfDeviceMemory, StepOutput, StepWork
from engine.virtual.replica import VirtualClock, VirtualRunner, VirtualStep

FAILURES = ("launch", "memory", "collect", "copy")


@dataclass(slots=True)
class LateStep:
    work: StepWork
    fails: bool
    done: VirtualStep | None = None
    is_over: bool = False


class LateRunner(VirtualRunner):
    """Audits slots. What waits is computed in order."""

    def __init__(
        self, clock: VirtualClock, *, is_late: bool = True, copies_first: bool = False, **sizes: Any
    ) -> None:
        """`is_late` False: steps are computed at once. `copies_first`: copies and reads do not wait for the
        steps in flight, as on a stream of their own: they may only touch what no such step writes."""
        super().__init__(clock, audit=True, **sizes)
        self.fail: set[str] = set()
        """Of `FAILURES`, what fails next, once each."""
        self.steps: list[dict[str, tuple[int, int]]] = []
        """What was launched: position and tokens by sequence, in the order of the step."""
        self.chosen: Counter[str] = Counter()
        """Tokens that launched steps choose, by sequence."""
        self.tried = 0
        """Steps launched, those that failed included."""
        self.collected = 0
        self.masked = 0
        """Steps whose choice waited for masks."""
        self._is_late = is_late
        self._copies_first = copies_first
        self._names: dict[int, str] = {}
        self._queue: deque[Callable[[], None]] = deque()

    def launch(self, work: StepWork) -> Any:
        self.tried += 1
        for failure, error in (("launch", RuntimeError), ("memory", OutOfDeviceMemory)):
            if failure in self.fail:
                self.fail.remove(failure)
                # Its rows hold a part of the step: none can be used before it starts anew.
                self._enqueue(partial(self._spoil, [*work.rows]))
                raise error(f"the {failure} fails")
        self._names.update({start.row: start.sequence_id for start in work.starts})
        names = [self._names[row] for row in work.rows]
        self.steps.append(dict(zip(names, zip(work.positions, work.num_tokens, strict=True), strict=True)))
        self.chosen.update(name for name, samples in zip(names, work.samples, strict=True) if samples)
        step = LateStep(work, "collect" in self.fail)
        self.fail.discard("collect")
        self._enqueue(partial(self._compute, step))
        return step

    def collect(self, ticket: Any) -> StepOutput:
        self.collected += 1
        while not ticket.is_over:
            self._queue.popleft()()
        if ticket.done is None:
            raise RuntimeError("the step fails")
        return super().collect(ticket.done)

    def choose(self, ticket: LateStep, masks: Mapping[int, Any]) -> None:
        self.masked += 1
        self._enqueue(partial(self._choose, ticket, masks))

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._copy(partial(super().copy_out, pairs))

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._copy(partial(super().copy_in, pairs))

    def read_kv(self, block_table: list[int], num_tokens: int) -> list[bytes]:
        self._wait()
        return super().read_kv(block_table, num_tokens)

    def read_host_kv(self, host_blocks: list[int], num_tokens: int) -> list[bytes]:
        self._wait()
        return super().read_host_kv(host_blocks, num_tokens)

    def write_kv(self, block_table: list[int], num_tokens: int, kv: list[bytes]) -> None:
        self._wait()
        super().write_kv(block_table, num_tokens, kv)

    def _compute(self, step: LateStep) -> None:
        step.is_over = True
        if step.fails:
            # What it changes in rows is there: later steps in flight go by it. The rest is not.
            super().launch(StepWork(starts=step.work.starts, blocks=step.work.blocks))
        else:
            step.done = super().launch(step.work)
        if step.work.awaits_masks:
            step.is_over = False

    def _choose(self, step: LateStep, masks: Mapping[int, Any]) -> None:
        step.is_over = True
        if step.done is not None:
            super().choose(step.done, masks)

    def _spoil(self, rows: list[int]) -> None:
        for row in rows:
            self._rows.pop(row, None)

    def _copy(self, copy: Callable[[], None]) -> None:
        if "copy" in self.fail:
            self.fail.remove("copy")
            raise RuntimeError("the copy fails")
        if self._copies_first:
            copy()
        else:
            self._enqueue(copy)

    def _wait(self) -> None:
        while self._queue and not self._copies_first:
            self._queue.popleft()()

    def _enqueue(self, launched: Callable[[], None]) -> None:
        self._queue.append(launched)
        if not self._is_late:
            self._queue.popleft()()
