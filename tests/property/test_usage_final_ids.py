"""No history of transactions brings a ledger row below an id that was said to be final.

A transaction locks the table, takes ids one by one from a common sequence, and ends: committed or not. A look
reads the newest visible id first and the running transactions afterwards, with anything happening between.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tenants.usage.fold import WaitingIds, step


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.next_id = 1
        self.begun = 0
        self.running: dict[str, list[int]] = {}
        self.visible: set[int] = set()
        self.final_id = 0
        self.waiting = WaitingIds()
        self.noted: int | None = None
        self.folded: set[int] = set()

    @precondition(lambda self: len(self.running) < 4)
    @rule()
    def begin(self) -> None:
        self.begun += 1
        self.running[f"3/{self.begun}"] = []

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3))
    def insert(self, which: int) -> None:
        self.running[sorted(self.running)[which % len(self.running)]].append(self.next_id)
        self.next_id += 1

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 3), is_committed=st.booleans())
    def end(self, which: int, is_committed: bool) -> None:
        ids = self.running.pop(sorted(self.running)[which % len(self.running)])
        if is_committed:
            self.visible |= set(ids)
            assert not ids or min(ids) > self.final_id, "a row appeared below what was folded"

    @precondition(lambda self: self.noted is None)
    @rule()
    def read_newest(self) -> None:
        self.noted = max(self.visible, default=0)

    @precondition(lambda self: self.noted is not None)
    @rule()
    def read_running_and_fold(self) -> None:
        assert self.noted is not None
        final_id, self.waiting = step(self.final_id, self.waiting, self.noted, frozenset(self.running))
        assert final_id >= self.final_id
        new = {each for each in self.visible if self.final_id < each <= final_id}
        assert not new & self.folded
        self.folded |= new
        self.final_id, self.noted = final_id, None

    @invariant()
    def what_is_final_is_folded(self) -> None:
        assert {each for each in self.visible if each <= self.final_id} == self.folded

    def teardown(self) -> None:
        for which in list(self.running):
            self.visible |= set(self.running.pop(which))
        for _ in range(2):
            self.noted = max(self.visible, default=0)
            self.read_running_and_fold()
        assert self.folded == self.visible


TestHistories = Histories.TestCase
