"""Pages of the platform as pure views: changes of an act, replicas, what a drain does, settings."""

from __future__ import annotations

from typing import Any

from gateway.console.formats import without_password
from gateway.console.pages.platform.settings import chosen, grouped
from gateway.console.pages.platform.upstreams import (
    MOST_LINES,
    Row,
    drain_effects,
    kv_by_minute,
    last_minutes,
    replica_row,
)
from gateway.deps import ShownSetting
from tenants.counts.minute_store import MINUTE_US, EngineKey, EngineMinute
from tenants.resources.minutes import EngineRow


def shown(**more: Any) -> dict[str, Any]:
    return {
        "replica_id": "a/b", "kind": "engine", "url": "ipc:///tmp/x", "state": "serving", "refusal": "",
        "in_flight": 2, "window": 8, "drain": None,
    } | more  # fmt: skip


def row(**more: Any) -> Row:
    return replica_row(shown(**more), None, None)


def test_a_replica_shows_what_is_known_of_it() -> None:
    own = replica_row(shown(), 0.5, EngineMinute(steps=4, step_us=80_000, batch_sum=10))
    assert (own["kv_share"], own["step_s"], own["batch"], own["why"]) == (0.5, 0.02, 2.5, "")
    assert own["path"] == "/console/upstreams/a%2Fb"
    server = row(
        kind="openai", server="vllm", url="http://u:pw@h:1/v1", state="away", refusal="", breaker="open",
        failures=3, saturation={"kv_usage": 0.25},
    )  # fmt: skip
    assert (server["kind"], server["url"], server["kv_share"]) == ("server (vllm)", "http://h:1/v1", 0.25)
    assert (server["why"], server["breaker"], server["step_s"], server["batch"]) == (
        "it does not answer", "open", None, None,
    )  # fmt: skip
    assert without_password("ipc:///tmp/x@y") == "ipc:///tmp/x@y"


def test_a_drain_says_who_goes_on_and_who_waits() -> None:
    alone = drain_effects("m", row(in_flight=1), [row(state="away")], 2)
    assert "1 request runs there now: it ends by itself, and no token is lost." in alone
    assert "2 other gateways did not answer" in alone[2]
    assert "No other replica serves m" in alone[-1]
    beside = drain_effects("m", row(in_flight=0), [row()], 0)
    assert beside[1:] == ["No request runs there now.", "What waits goes to the 1 other replica of m."]
    assert (
        "5 requests run there now: they end by themselves" in drain_effects("m", row(in_flight=5), [], 0)[1]
    )
    # Where a gateway did not answer, nothing is called free.
    assert "0 requests run" in drain_effects("m", row(in_flight=0), [], 1)[1]


def minute(number: int, replica: str, share: int) -> EngineRow:
    counts = EngineMinute(seen_us=60_000_000, kv_permille_s=share * 60)
    return EngineRow(EngineKey(number * MINUTE_US, "m", replica), counts)


def test_kv_by_minute_has_a_gap_where_a_replica_was_not_seen() -> None:
    rows = [minute(1, "a", 500), minute(1, "b", 100), minute(2, "b", 200)]
    names, table = kv_by_minute(rows)
    assert names == ["a", "b"]
    assert table == [
        (MINUTE_US, [0.5, 0.1]),
        (2 * MINUTE_US, [None, 0.2]),
    ]
    assert last_minutes(rows)["m", "b"].kv_permille_s == 12_000
    names, table = kv_by_minute([minute(1, f"r{number:02}", 1) for number in range(MOST_LINES + 2)])
    assert len(names) == len(table[0][1]) == MOST_LINES


def test_settings_are_found_by_name_and_meaning_and_grouped() -> None:
    rows = [
        ShownSetting("port", "1", "flag --port", "Port of the gateway."),
        ShownSetting("engine.threads", "1", "", "Threads."),
        ShownSetting("engine.context", "2", "", "Longest CONTEXT."),
    ]
    assert [each.name for each in chosen(rows, "context", only_set=False)] == ["engine.context"]
    assert [each.name for each in chosen(rows, "", only_set=True)] == ["port"]
    assert [(name, len(inner)) for name, inner in grouped(rows)] == [("process", 1), ("engine", 2)]
