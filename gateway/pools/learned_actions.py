"""Applies a learned policy's table to the load of one pool.

The edge of `flow/learned/switch.py`. Without a usable table, and outside of its fit, knobs rest at the
operator's settings, as in `hybrid`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from msgspec.structs import asdict

from engine.scheduling.options import parsed_options
from engine.scheduling.policy import HYBRID_OPTIONS, POLICIES
from gateway.flow.controller import FlowController
from gateway.flow.knobs import DEFAULT_BOUNDS, Knob
from gateway.flow.learned.actions import ACTION_BOUNDS, HYBRID
from gateway.flow.learned.macro_state import Situation, words
from gateway.flow.learned.served import misfit, not_compared
from gateway.flow.learned.switch import MacroStateSwitch
from gateway.flow.learned.table_file import LearnedTable
from gateway.flow.window import NUM_RANKS
from gateway.upstream.base import Upstream
from tenants.admin.platform.policy import StoredPolicy

NOT_LEARNED = "the policy is not learned any more: the knobs rest where the settings put them"
OTHER_OWN = "the policy has other options: the knobs rest where these put them"

log = logging.getLogger("fairgate.gateway.control")


class LearnedActions:
    def __init__(
        self,
        model: str,
        flow: FlowController,
        upstreams: Collection[Upstream],
        own_rests: Callable[[], Mapping[Knob, float]] = dict,
    ) -> None:
        """`own_rests`: the positions by settings and policy, but those of the queue."""
        self.switch: MacroStateSwitch | None = None
        self.problem = ""
        """Why a learned policy has no table in use; empty: it has, or the policy is another."""
        self._model = model
        self._flow = flow
        self._upstreams = upstreams
        self._own_rests = own_rests
        self.is_wanted = False
        self._table: LearnedTable | None = None
        self._rests_then: dict[Knob, float] = {}
        """The positions by settings and policy when the table was taken."""
        self._due: str | None = None
        """Why knobs return to the settings' positions at the next observation; None: they do not."""

    @property
    def is_due(self) -> bool:
        """An observation may move knobs: the policy is, or was until now, a learned one."""
        return self.is_wanted or self._due is not None

    def use(self, table: LearnedTable | None, problem: str = "", *, is_wanted: bool = True) -> None:
        """From the next observation on. `problem`: why there is no table; not `is_wanted`: another policy."""
        rests = self._rests()
        if table is not None and (table, rests) == (self._table, self._rests_then):
            return
        was_wanted, self.is_wanted = self.is_wanted, is_wanted
        self._table, self._rests_then, self.switch = table, rests, None
        self._tell(problem)
        if was_wanted or is_wanted:
            self._due = OTHER_OWN if is_wanted else NOT_LEARNED
        if table is not None and (note := not_compared(table)):
            log.info("learned table of %s: %s", self._model, note)

    def look(self, now_s: float) -> tuple[dict[Knob, float], str] | None:
        """Looks the load up once. The new resting positions and why; None: nothing changed."""
        reason, self._due = self._due, None
        back = None if reason is None else (self._rests(), reason)
        if self._table is None:
            return back
        announced = [upstream.ready.model for upstream in self._upstreams if upstream.ready is not None]
        self._tell(misfit(self._table, self._model, announced))
        if self.problem:
            if self.switch is not None:
                self.switch = None
                return self._rests(), f"learned: {self.problem}"
            return back
        if self.switch is None:
            self.switch = MacroStateSwitch(self._table)
        changed = self.switch.look(self.situation(now_s), now_s)
        if changed is None:
            return back
        actions, why = changed
        return self._rests() if self.switch.is_outside else actions.knobs(), why

    def situation(self, now_s: float) -> Situation:
        up = [upstream for upstream in self._upstreams if upstream.is_up]
        places = sum(upstream.ready.max_sequences for upstream in up if upstream.ready is not None)
        snapshots = [upstream.snapshot for upstream in up if upstream.snapshot is not None]
        blocks = sum(snapshot.num_blocks for snapshot in snapshots)
        return Situation(
            queued_per_place=self._flow.queued_up_to(NUM_RANKS - 1) / max(1, places),
            long_at_head=self._flow.queue.is_long_at_head(now_s),
            kv_share=sum(snapshot.referenced_blocks for snapshot in snapshots) / blocks if blocks else 0.0,
            trend=self._flow.arrivals.value(now_s),
        )

    def as_json(self) -> dict[str, Any] | None:
        """For the status page; None: not a learned policy."""
        if not self.is_wanted:
            return None
        switch = self.switch
        state = None if switch is None else switch.state
        return {
            "problem": self.problem,
            "note": "" if self._table is None else not_compared(self._table),
            "macro_state": state,
            "words": "" if state is None else words(state),
            "is_outside": switch is not None and switch.is_outside,
            "actions": asdict(HYBRID if switch is None else switch.actions),
            "lookups": 0 if switch is None else switch.lookups,
            "switches": 0 if switch is None else switch.switches,
            "times_outside": 0 if switch is None else switch.times_outside,
            "table": None
            if self._table is None
            else {
                "model": self._table.model,
                "machine": self._table.machine,
                "trace": self._table.trace,
                "seed": self._table.seed,
            },
        }

    def _rests(self) -> dict[Knob, float]:
        own = {**self._flow.settings.rests.positions, **self._own_rests()}
        return {
            knob: own.get(knob, DEFAULT_BOUNDS[knob].rest) for knob in (Knob(name) for name in ACTION_BOUNDS)
        }

    def _tell(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.error(
                "policy learned, model %s: %s; the actions of hybrid are in force", self._model, problem
            )
        self.problem = problem


def own_numbers(policy: StoredPolicy) -> dict[Knob, float]:
    """The positions of engine numbers by a policy's options."""
    options = parsed_options(dict(policy.options))
    preset = POLICIES.get(policy.name)
    own = HYBRID_OPTIONS if preset is None else preset().options
    partial = options.max_num_partial_prefills or own.max_num_partial_prefills or 1
    return {Knob.PARTIAL_PREFILLS: float(partial), Knob.RESERVE_PERMILLE: float(options.reserve_permille)}
