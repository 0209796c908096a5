"""Readiness and status of several workers as one."""

from __future__ import annotations

from typing import Any

from gateway.routes.views.workers_view import merged_readiness, merged_status


def said(**checks: str) -> dict[str, Any]:
    return {"checks": {"database": "ok", "engine": "ok"} | checks}


def test_a_check_fails_where_it_fails_at_any_and_words_are_those_of_the_lowest_seat() -> None:
    assert merged_readiness({0: said(), 2: said()}, 2) == {
        "status": "ready",
        "checks": {"database": "ok", "engine": "ok"},
        "workers": {"up": 2, "of": 2},
    }
    away = merged_readiness({1: said(database="local: alone"), 0: said(), 2: said(database="local: too")}, 3)
    assert (away["status"], away["checks"]["database"]) == ("ready", "local: alone")
    broken = {2: said(engine="gone") | {"missing": ["b"]}, 1: said(engine="local: x") | {"missing": ["a"]}}
    shown = merged_readiness(broken, 4)
    assert (shown["status"], shown["checks"]["engine"]) == ("not ready", "gone")
    assert (shown["missing"], shown["workers"]) == (["a", "b"], {"up": 2, "of": 4})


def part(pid: int, had: float, due: float, requests: int) -> dict[str, Any]:
    tier = {"queued": 1, "running": 1, "share": 1.0, "fair_share": 1.0, "waits": {"requests": requests}}
    counts = ("dispatched", "finished", "service_cost", "input_tokens", "output_tokens")
    tenants = [
        {
            "tenant_id": "t",
            "counter": pid,
            "queued": {"standard": 1},
            "limits": [],
            "running_output_tokens": 2,
        }
        | dict.fromkeys(counts, 1)
        | {"running": 1, "tiers": {"standard": tier | {"had": had, "due": due}}}
    ]
    return {
        "worker": {"pid": pid, "gateway_id": f"gw_{pid}"},
        "gateway_id": f"gw_{pid}",
        "queued": {"standard": 2},
        "running": 1,
        "settlements_pending": 1,
        "refusals": {f"code_{pid}": 1, "same": 1},
        "recovery": None if pid == 1 else {"lost": 2},
        "models": {"pools": {"m": {"queued": {"standard": 2}, "running": 1, "is_up": True}}},
        "tenants": tenants,
    }


def test_what_each_counts_is_summed_and_shares_are_of_the_whole() -> None:
    other = part(2, 30.0, 20.0, 9)
    other["tenants"].append(part(2, 60.0, 70.0, 1)["tenants"][0] | {"tenant_id": "u"})
    shown = merged_status({1: other, 0: part(1, 10.0, 10.0, 3)})
    assert (shown["gateway_id"], shown["running"], shown["queued"]) == ("gw_1", 2, {"standard": 4})
    assert (shown["refusals"], shown["recovery"]) == ({"code_1": 1, "same": 2, "code_2": 1}, {"lost": 2})
    assert shown["models"]["pools"]["m"] == {"queued": {"standard": 4}, "running": 2, "is_up": True}
    assert [(each["number"], each["pid"]) for each in shown["workers"]] == [(0, 1), (1, 2)]
    tenant, another = shown["tenants"]
    assert (tenant["dispatched"], tenant["running_output_tokens"], tenant["counter"]) == (2, 4, 2)
    assert tenant["tiers"]["standard"] == {
        "queued": 2,
        "running": 2,
        "share": 0.4,
        "fair_share": 0.3,
        "waits": {"requests": 9},
    }
    assert (another["tenant_id"], another["tiers"]["standard"]["share"]) == ("u", 0.6)
