"""Fills what migrations have added, in the background; a lock lets one gateway work at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal

LEAST_PAUSE_S = 0.05
RETRY_S = 10.0

log = logging.getLogger("fairgate.gateway.backfills")


async def run_backfills(batch: Callable[[], Literal["filled", "busy", "done"]]) -> None:
    """Until all are done. `batch` blocks."""
    begun = False
    while True:
        begun_s = time.monotonic()
        try:
            found = await asyncio.to_thread(batch)
        except Exception as error:
            why = getattr(error.__cause__, "orig", error)
            log.warning("a batch of a backfill failed, and is tried again: %s", type(why).__name__)
            found = "busy"
        if found == "done":
            if begun:
                log.info("the backfills are done")
            return
        begun = begun or found == "filled"
        # The database is others' for as long as the batch took.
        took_s = time.monotonic() - begun_s
        await asyncio.sleep(RETRY_S if found == "busy" else max(LEAST_PAUSE_S, took_s))
