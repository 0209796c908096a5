"""Writes the moves of the control loops, made or advised, every second.

While the database is unavailable they wait; beyond `MAX_WAITING` the oldest are dropped, which a metric
reports. A killed process loses the last second.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from itertools import islice

from prometheus_client import Counter

from gateway.background import BackgroundWriter, Site
from gateway.flow.control_rules import Control, Move
from tenants.counts import move_store
from tenants.counts.move_store import MAX_MODEL_CHARACTERS, MAX_REASON_CHARACTERS, StoredMove

PURGE_EVERY_S = 600.0
MAX_WAITING = 5_000
MAX_WRITTEN = 500


class MoveRecorder(BackgroundWriter):
    """Use from one event loop."""

    task_name = "gateway moves"
    failed = "moves of the control loop could not be written; it is tried again"
    unavailable = "moves of the control loop wait"
    purge_every_s = PURGE_EVERY_S

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._gateway_id = site.gateway_id
        self._process = secrets.token_hex(6)
        self._number = 0
        self._waiting: deque[StoredMove] = deque()
        self._dropped = Counter(
            "fairgate_control_moves_dropped",
            "Moves of the control loop that could not be written in time and are in no list.",
            registry=site.prometheus,
        )

    def note(self, model: str, control: Control, moves: Sequence[Move]) -> None:
        at_us = self._now_us()
        knobs = {knob.value: value for knob, value in control.in_force.items()}
        for move in moves:
            self._number += 1
            self._waiting.append(
                StoredMove(
                    f"mov_{at_us:014x}{self._number % 2**24:06x}{self._process}",
                    at_us,
                    self._gateway_id,
                    model[:MAX_MODEL_CHARACTERS],
                    move.knob.value,
                    move.before,
                    move.after,
                    move.reason[:MAX_REASON_CHARACTERS],
                    move.is_made,
                    control.mode.value,
                    knobs,
                )
            )
        while len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()
            self._dropped.inc()

    async def flush(self) -> None:
        """Keeps what is not confirmed, and writes it again. Raises `DatabaseUnavailable`."""
        while self._waiting:
            chunk = list(islice(self._waiting, MAX_WRITTEN))
            await move_store.add(self._database, chunk)
            # Some of them may have been dropped meanwhile.
            written = {move.move_id for move in chunk}
            while self._waiting and self._waiting[0].move_id in written:
                self._waiting.popleft()

    async def purge(self) -> None:
        while await move_store.purge(self._database, self._wall_clock()) >= move_store.MAX_PURGED:
            pass
