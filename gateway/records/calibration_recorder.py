"""Counts how often stated figures held, off the request path.

Exact counts, written every second; while the database is unavailable they wait, and beyond `MAX_COUNTS` keys
their hours are merged. A killed process loses the last second.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.background import Site
from gateway.records.exact_writer import ExactWriter
from tenants.counts import calibration
from tenants.counts.calibration import CalibrationKey, KeptCount
from tenants.storage.flushes import Flush

MAX_COUNTS = 50_000
PURGE_EVERY_S = 3600.0

CalibrationCounts = dict[CalibrationKey, KeptCount]


class CalibrationRecorder(ExactWriter[CalibrationCounts]):
    """Use from one event loop."""

    task_name = "gateway calibration"
    failed = "kept figures could not be counted; it is tried again"
    unavailable = "counts of kept figures wait"
    purge_every_s = PURGE_EVERY_S

    def __init__(self, site: Site) -> None:
        super().__init__(site, "calibration")
        self._counts: CalibrationCounts = {}

    def note(self, kept: Mapping[CalibrationKey, KeptCount]) -> None:
        _add(self._counts, kept)
        if len(self._counts) > MAX_COUNTS:
            first_s = min(key.hour_s for key in self._counts)
            merged: CalibrationCounts = {}
            for key, count in self._counts.items():
                _add(merged, {key._replace(hour_s=first_s): count})
            self._counts = merged

    def take(self) -> CalibrationCounts | None:
        if not self._counts:
            return None
        batch, self._counts = self._counts, {}
        return batch

    async def write(self, batch: CalibrationCounts, flush: Flush) -> None:
        await calibration.add(self._database, batch, flush, self._wall_clock())

    async def purge(self) -> None:
        await calibration.purge(self._database, self._wall_clock())


def _add(counts: CalibrationCounts, more: Mapping[CalibrationKey, KeptCount]) -> None:
    for key, kept in more.items():
        found = counts.get(key)
        counts[key] = kept if found is None else found.plus(kept)
