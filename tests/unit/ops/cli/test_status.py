"""The page of `fairgate status`: what stands on it, and that it fits a narrow terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ops.cli.inspect.status import ago, knobs_in_words, page_of
from tests.unit.ops.cli.test_live import status

URL = "http://127.0.0.1:8000"


def control(mode: str = "advice", **more: Any) -> dict[str, Any]:
    moves = [
        {
            "at_s": 1_000.0 - ago_s, "knob": "batch_cap", "before": 1.0, "after": 0.875,
            "reason": f"KV nearly full (0.9{number})", "is_made": mode == "acting",
        }
        for number, ago_s in enumerate((90_000, 7_200, 360, 120, 60, 3))
    ]  # fmt: skip
    return {"mode": mode, "knobs": {"batch_cap": 0.875, "ageing": 1.0}, "moves": moves} | more


def document(its: dict[str, Any], **fields: Any) -> dict[str, Any]:
    shown = status(
        gateway_id="gw_82f0b1439bba",
        clock_s=1_000.0,
        policy_from="settings",
        policy_problem="",
        settlements_pending=2,
        brakes=[],
        readiness={"status": "ready", "checks": {"database": "ok", "quota_store": "ok", "engine": "ok"}},
    )
    shown["models"]["pools"]["a-model-with-a-long-name"]["control"] = its
    return shown | fields


def drawn(shown: dict[str, Any], width: int = 80, *, is_terminal: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=is_terminal)
    with console.capture() as capture:
        for part in page_of(shown, URL, width):
            console.print(part)
    return capture.get().splitlines()


def test_the_page_fits_eighty_columns_and_says_who_waits_and_runs() -> None:
    lines = drawn(document(control()))
    assert max(map(len, lines)) <= 80
    assert lines[0] == f"gw_82f0b1439bba at {URL}: ready"
    assert lines[1] == "a-model-with-a-long-name; policy hybrid"
    text = "\n".join(lines)
    assert "waiting: interactive 12,345, standard 12,345, batch 12,345; running: 256;" in text
    assert "settlements pending: 2" in text
    assert "refused since the start: insufficient_quota 12,345, rate_limit_exceeded 7" in text
    assert "21 %" in next(line for line in lines if line.startswith("engine-0"))
    assert "100 %" in next(line for line in lines if "standard" in line and "tenant-" in line)


def test_colours_are_for_terminals() -> None:
    not_ready = {"status": "not ready", "checks": {"database": "cannot be reached", "engine": "ok"}}
    shown = document(control(), readiness=not_ready)
    assert "\x1b" not in "\n".join(drawn(shown))
    assert "\x1b" in "\n".join(drawn(shown, is_terminal=True))
    assert "NOT READY (database: cannot be" in drawn(shown)[0]
    assert drawn(shown, width=120)[0].endswith("NOT READY (database: cannot be reached)")


def test_the_last_moves_stand_there_with_their_reasons() -> None:
    lines = drawn(document(control()))
    moves = [line.strip() for line in lines if "KV nearly full" in line]
    assert [line.split("  ")[0] for line in moves] == [
        "2h ago advises batch_cap 100 % -> 87.5 % KV nearly full (0.91)",
        "6m ago advises batch_cap 100 % -> 87.5 % KV nearly full (0.92)",
        "2m ago advises batch_cap 100 % -> 87.5 % KV nearly full (0.93)",
        "1m ago advises batch_cap 100 % -> 87.5 % KV nearly full (0.94)",
        "3s ago advises batch_cap 100 % -> 87.5 % KV nearly full (0.95)",
    ]
    made = "\n".join(drawn(document(control("acting"))))
    assert "3s ago changed batch_cap" in made
    assert "advises" not in made


def test_who_decides_and_which_knobs_stand_off_their_rest() -> None:
    its = control("acting", holder="gw_2", term=7, rests={"batch_cap": 1.0, "ageing": 1.0})
    text = "\n".join(drawn(document(its)))
    assert "control loop of a-model-with-a-long-name: acting; gw_2 decides (term 7)" in text
    assert "changed batch_cap from 100 % to 87.5 %\n" in text
    assert knobs_in_words(control(rests={"batch_cap": 0.875, "ageing": 1.0})) == "no change needed"
    assert knobs_in_words(control()) == "settings: batch_cap 87.5 %, ageing 1 x ageing times"
    admits = control(knobs={"admission": 1.5}, rests={"admission": 0.0})
    words = "would change admission from 0 x expected time to 1.5 x expected time"
    assert knobs_in_words(admits) == words
    follows = "\n".join(drawn(document(its | {"moves": []})))
    assert "no move decided here (fairgate policy moves)" in follows
    assert "no move yet" in "\n".join(drawn(document(control(moves=[]))))
    off = "\n".join(drawn(document(control("off", moves=[]))))
    assert "control loop of a-model-with-a-long-name: off" in off
    assert "settings" not in off


def test_brakes_and_a_stored_policy_that_cannot_be_used_are_said() -> None:
    brake = {"tier": "batch", "share": 0.1, "until": "2026-03-02T12:30:00+00:00", "by": "cli:root"}
    shown = document(
        control(),
        brakes=[brake | {"reason": "nightly"}, brake | {"reason": ""}],
        policy_from="stored",
        policy_problem="the stored policy learned cannot be used: no table",
        tenants=[],
        queued={"interactive": 0, "standard": 0, "batch": 0},
        refusals={f"code_{number}": number for number in range(1, 12)},
    )
    text = "\n".join(drawn(shown, width=120))
    assert "brake on batch: at most 10 % until 2026-03-02 12:30 UTC, by cli:root: nightly\n" in text
    assert "by cli:root\n" in text
    assert "policy hybrid (stored by `fairgate policy set`)\n" in text
    assert "the stored policy learned cannot be used: no table\n" in text
    assert "waiting: nothing; running" in text
    assert "no tenant waits or runs" in text
    assert "code_11 11, " in text
    assert ", and 3 more" in text


def test_of_many_tenants_the_busiest_stand_there_and_the_rest_is_counted() -> None:
    text = "\n".join(drawn(document(control(), tenants=status(15)["tenants"])))
    assert "… and 10 more tenants and tiers (fairgate top)" in text


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0s ago"), (59.4, "59s ago"), (60, "1m ago"), (7_200, "2h ago"), (200_000, "2d ago")],
)
def test_how_long_ago_something_was(seconds: float, words: str) -> None:
    assert ago(seconds) == words
