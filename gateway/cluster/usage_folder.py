"""Folds the ledger into sums of usage, in the background; a lock lets one gateway work."""

from __future__ import annotations

import logging

from prometheus_client import Gauge

from gateway.background import BackgroundWriter, Site
from tenants.usage.fold import fold, purge_hours, unfolded_since_us

MOST_ROUNDS = 50
"""Transactions per turn, so that others can write while a long ledger is folded."""


class UsageFolder(BackgroundWriter):
    task_name = "gateway usage"
    log = logging.getLogger("fairgate.gateway.usage")
    failed = "usage was not folded; it goes on"
    unavailable = "usage is folded later"
    purge_every_s = 600.0

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._folded_until_s = site.wall_clock()
        """Everything written before is folded."""
        lag = Gauge(
            "fairgate_usage_fold_lag_seconds",
            "Age of the oldest row of the ledger that is not in the sums of usage; without one, of the last "
            "round that found none. It grows while the database is away.",
            registry=site.prometheus,
        )
        lag.set_function(lambda: max(0.0, site.wall_clock() - self._folded_until_s))

    async def flush(self) -> None:
        """Folds up to `MOST_ROUNDS` transactions. Raises `DatabaseUnavailable`."""
        begun_s = self._wall_clock()
        oldest_us = await self._database.read(unfolded_since_us)
        if oldest_us is not None:
            for _ in range(MOST_ROUNDS):
                if not (await self._database.write(fold)).has_more:
                    break
            oldest_us = await self._database.read(unfolded_since_us)
        # A transaction that is left open holds the fold back: then rows are left.
        self._folded_until_s = begun_s if oldest_us is None else min(begun_s, oldest_us / 1e6)

    async def purge(self) -> None:
        now_us = self._now_us()
        while await self._database.write(lambda connection: purge_hours(connection, now_us)):
            pass
