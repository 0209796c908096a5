"""What a running server refuses is said in commands, and its top fits a narrow terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from rich.console import Console

import gateway.errors
from ops.cli.inspect.top import frame_of
from ops.cli.inspect.waterfall import decoded_in_words
from ops.cli.live import COMMANDS, in_commands

WAITS = {
    "requests": 64, "told_p50_s": 12.34, "told_p90_s": 123.4, "had_p50_s": 0.0123, "had_p90_s": 99.94,
    "within_told_p90": 0.9,
}  # fmt: skip


def status(tenants: int = 2, **fields: Any) -> dict[str, Any]:
    tier = {"queued": 1_234, "running": 100, "share": 1.0, "fair_share": 0.995, "waits": WAITS}
    replica = {"replica_id": "engine-0", "is_up": True, "is_drained": False, "refusal": ""}
    replica |= {"running": 32, "window": 256}
    return {
        "model": "a-model-with-a-long-name",
        "policy": "hybrid",
        "queued": {"interactive": 12_345, "standard": 12_345, "batch": 12_345},
        "running": 256,
        "refusals": {"insufficient_quota": 12_345, "rate_limit_exceeded": 7, "invalid_api_key": 1},
        "engines": [{"replica_id": "engine-0", "waiting": 3, "kv_blocks": {"total": 100, "referenced": 21}}],
        "models": {"pools": {"a-model-with-a-long-name": {"replicas": [replica]}}},
        "tenants": [
            {
                "tenant_id": f"ten_{number}",
                "name": f"tenant-with-a-long-name-{number}",
                "weight": 1.0,
                "tiers": {"interactive": tier | {"queued": number}, "standard": tier},
            }
            for number in range(tenants)
        ],
    } | fields


def drawn(shown: dict[str, Any], width: int = 80, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    with console.capture() as capture:
        console.print(frame_of(shown))
    return capture.get().splitlines()


def test_a_frame_fits_eighty_columns_and_cuts_no_figure() -> None:
    lines = drawn(status())
    assert max(map(len, lines)) <= 80
    row = next(line for line in lines if "standard" in line and "tenant-" in line)
    for figure in ("1234", "100 %", "12.3s/123s", "12ms/99.9s"):
        assert figure in row, row
    assert "21 %" in next(line for line in lines if line.startswith("engine-0"))
    assert "insufficient_quota 12,345" in " ".join(lines)


def test_a_wider_terminal_shows_whole_names() -> None:
    assert any(line.startswith("tenant-with-a-long-name-1 ") for line in drawn(status(), width=100))


def test_what_does_not_fit_the_screen_is_counted_and_the_busiest_stay() -> None:
    lines = drawn(status(40))
    assert len(lines) <= 24
    assert any(re.fullmatch(r"… and \d+ more", line.strip()) for line in lines)
    busiest = next(line for line in lines if line.startswith("tenant-"))
    assert "interactive" in busiest
    assert " 39 " in busiest


def test_nothing_to_show_is_said() -> None:
    text = "\n".join(drawn(status(0, refusals={}, queued={"interactive": 0, "standard": 0, "batch": 0})))
    assert "waiting: nothing" in text
    assert "no tenant is active" in text
    assert "refused since the start: none" in text


def test_every_route_that_an_error_names_has_a_command() -> None:
    text = Path(gateway.errors.__file__).read_text()
    named = set(re.findall(r"(?:GET|POST|DELETE) /[\w/{}]+", text)) | {"GET /admin/v1/requests"}
    assert named <= set(COMMANDS)
    for route in named:
        assert route not in in_commands(f"See {route} for more.")


def test_how_tokens_came_is_said_over_all_sequences() -> None:
    decoded = {"event": "decoded", "floor_tokens": 40, "turn_tokens": 8, "sat_out_share_steps": 3}
    text = decoded_in_words([{"event": "queued"}, decoded, decoded])
    assert "80 one each step, 16 in turns" in text
    assert "6 for the share of other tenants, 0 for higher tiers" in text
    assert decoded_in_words([{"event": "queued"}]) == ""
