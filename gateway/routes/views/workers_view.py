"""Readiness and status of all workers of one port, from what each says of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

READY = "ready"
OK, LOCAL = "ok", "local"
_SUMS = ("running", "dispatched", "finished", "service_cost", "input_tokens", "output_tokens")
_TENANT_SUMS = (*_SUMS, "running_output_tokens")


def passes(check: str) -> bool:
    """A quota store or queue that is away fails nothing while this gateway decides by itself."""
    return check == OK or check.startswith(f"{LOCAL}:")


def readiness(checks: Mapping[str, str], missing: Sequence[str]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "status": READY if all(map(passes, checks.values())) else "not ready",
        "checks": dict(checks),
    }
    return shown | ({"missing": list(missing)} if missing else {})


def merged_readiness(answers: Mapping[int, dict[str, Any]], count: int) -> dict[str, Any]:
    """By seat. A check fails where it fails at any; of several answers that of the lowest seat is shown."""
    checks: dict[str, str] = {}
    for number in sorted(answers):
        for name, said in answers[number]["checks"].items():
            known = checks.get(name, OK)
            is_worse = known == OK or (passes(known) and not passes(said))
            checks[name] = said if is_worse else known
    missing = sorted({name for answer in answers.values() for name in answer.get("missing", ())})
    up = min(len(answers), count)  # one that takes another's place serves beside it for a while
    return readiness(checks, missing) | {"workers": {"up": up, "of": count}}


def merged_status(parts: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """By seat. What each counts is summed; the rest is as the lowest seat says."""
    numbers = sorted(parts)
    statuses = [parts[number] for number in numbers]
    shown = dict(statuses[0])
    for name in ("running", "settlements_pending"):
        shown[name] = sum(status[name] for status in statuses)
    for name in ("queued", "refusals"):
        shown[name] = _summed([status[name] for status in statuses])
    recovered = [status["recovery"] for status in statuses if status["recovery"] is not None]
    shown["recovery"] = _summed(recovered) if recovered else None
    pools = {}
    for name, pool in shown["models"]["pools"].items():
        same = [status["models"]["pools"].get(name, pool) for status in statuses]
        pools[name] = pool | {
            "queued": _summed([each["queued"] for each in same]),
            "running": sum(each["running"] for each in same),
        }
    shown["models"] = shown["models"] | {"pools": pools}
    shown["tenants"] = _tenants([tenant for status in statuses for tenant in status["tenants"]])
    shown["workers"] = [{"number": number} | parts[number].pop("worker") for number in numbers]
    shown.pop("worker", None)
    return shown


def _tenants(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    whole: dict[str, dict[str, Any]] = {}
    had_of_tier: dict[str, float] = {}
    for row in rows:
        for tier, each in row["tiers"].items():
            had_of_tier[tier] = had_of_tier.get(tier, 0.0) + each["had"]
        known = whole.get(row["tenant_id"])
        if known is None:
            whole[row["tenant_id"]] = row
            continue
        known |= {name: known[name] + row[name] for name in _TENANT_SUMS}
        known |= {
            "counter": max(known["counter"], row["counter"]),
            "queued": _summed([known["queued"], row["queued"]]),
            "limits": known["limits"] or row["limits"],
            "tiers": _tiers(known["tiers"], row["tiers"]),
        }
    for tenant in whole.values():
        for tier, each in tenant["tiers"].items():
            had, due, total = each.pop("had"), each.pop("due"), had_of_tier[tier]
            is_shown = total > 0 and had + due > 0
            each["share"], each["fair_share"] = (had / total, due / total) if is_shown else (None, None)
    return list(whole.values())


def _tiers(mine: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    merged = dict(mine)
    for tier, row in others.items():
        known = merged.get(tier)
        if known is None:
            merged[tier] = row
            continue
        waits = [each for each in (known["waits"], row["waits"]) if each is not None]
        merged[tier] = known | {name: known[name] + row[name] for name in ("queued", "running", "had", "due")}
        merged[tier]["waits"] = max(waits, key=lambda each: each["requests"], default=None)
    return merged


def _summed(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for row in rows:
        for name, value in row.items():
            sums[name] = sums.get(name, 0) + value
    return sums
