"""What-ifs of a server: the report is the command line's; one at a time, bounded, and cancelled."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.domain.server_description import packed
from gateway.domain.what_if import RunState, WhatIfAsked, WhatIfBusy, WhatIfRun
from ops.serving.whatif_runner import WhatIfRunner
from ops.settings.settings import load
from tenants.config_file.document import ConfigLimit
from tests.integration.test_whatif import NINE, SERVER, Book, asked, book, house
from tests.support.engine_process import until

__all__ = ["book", "house"]
NINE_US = int(NINE.timestamp() * 1e6)
HOUR_US = 3_600_000_000
SMALL = WhatIfAsked(NINE_US, NINE_US + HOUR_US, model="small")
UNTIL_ITS_INPUT_ENDS = (
    sys.executable,
    "-c",
    'import sys; sys.stderr.write(\'{"policy": "vtc", "number": 2, "done": 1, "total": 4}\\n\'); '
    "sys.stderr.flush(); sys.stdin.read(); print('{}')",
)


@pytest.fixture
async def runner(database_url: str) -> AsyncIterator[WhatIfRunner]:
    made = WhatIfRunner(load({"database_url": database_url}))
    yield made
    await made.close()


async def ended(runner: WhatIfRunner, wanted: WhatIfAsked) -> WhatIfRun:
    run = await runner.start(wanted, "person:ada")
    await until(lambda: run.state is not RunState.RUNNING, 120)
    return run


async def test_the_report_is_that_of_the_command_line(
    book: Book, runner: WhatIfRunner, database_url: str
) -> None:
    for number in range(8):
        await book.answer(number, tenant=("acme", "slow")[number % 2])
    wanted = WhatIfAsked(
        NINE_US,
        NINE_US + HOUR_US,
        policies=("vtc", "fcfs"),
        options={"slots": "2"},
        replicas=2,
        weights={"acme": 4.0},
        rows=7,
    )
    run = await ended(runner, wanted)
    assert (run.state, run.error, run.number, run.part) == (RunState.DONE, "", 3, 1.0)
    told: dict[str, Any] = json.loads((await asked(database_url, *wanted.flags(), "--json")).stdout)
    assert run.report == told
    assert told["recorded"]["requests"] == 7
    assert told["overrides"] == [
        "replicas 2 (served: 1)",
        "option slots 2 (served: 4)",
        "weight of acme 4 (served: 2)",
    ]
    assert [row["options"] for row in told["policies"]] == [{"slots": 4}, {"slots": 2}, {"slots": 2}]

    limits = {"slow": [ConfigLimit(meter="concurrency", amount=1)]}
    limited = await ended(runner, WhatIfAsked(NINE_US, NINE_US + HOUR_US, limits=limits))
    assert limited.report["overrides"] == ["slow: limit concurrency 1 (served: none)"]
    assert runner.runs() == [limited, run]


async def test_a_run_over_a_server_that_changed_says_so_without_flags(
    book: Book, runner: WhatIfRunner
) -> None:
    await book.answer(0)
    await book.answer(1, server=packed(replace(SERVER, policy="fcfs")))
    run = await ended(runner, SMALL)
    assert run.error == "the server changed in that time: replay one stretch of it"


async def test_a_run_that_fails_says_what_the_command_says(house: str, runner: WhatIfRunner) -> None:
    run = await ended(runner, WhatIfAsked(NINE_US, NINE_US + HOUR_US))
    assert run.state is RunState.FAILED
    assert run.error == "several models were served (large, small): say which one with --of-model"
    misspelt = await ended(runner, WhatIfAsked(NINE_US, NINE_US + HOUR_US, ("best",), model="small"))
    assert misspelt.error.startswith("no policy 'best'; there are ")


async def test_one_at_a_time_and_cancelled(database_url: str) -> None:
    runner = WhatIfRunner(load({"database_url": database_url}), command=UNTIL_ITS_INPUT_ENDS)
    run = await runner.start(SMALL, "person:ada")
    with pytest.raises(WhatIfBusy):
        await runner.start(SMALL, "person:bob")
    await until(lambda: run.number, 60)
    assert (run.policy, run.number, run.part) == ("vtc", 2, 0.25)
    await runner.cancel(run.run_id)
    assert run.state is RunState.CANCELLED
    assert run.ended_us is not None
    second = await runner.start(SMALL, "person:bob")
    await runner.close()
    assert second.state is RunState.CANCELLED


async def test_a_run_that_takes_too_long_is_ended(database_url: str) -> None:
    runner = WhatIfRunner(load({"database_url": database_url}), command=UNTIL_ITS_INPUT_ENDS, most_s=0.5)
    run = await ended(runner, SMALL)
    assert run.state is RunState.FAILED
    assert run.error == "It took more than 0.5 s: take a shorter time, or fewer requests."
