"""What the page of upstreams shows of each replica, and the effects of a drain. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from gateway.console.formats import without_password
from tenants.admin.lists.flow import EngineRow
from tenants.counts.minutes import EngineMinute

MOST_LINES = 8
"""Replicas in the chart of the last hour."""


Row = dict[str, Any]


def replica_row(shown: Mapping[str, Any], kv_share: float | None, minute: EngineMinute | None) -> Row:
    """A replica of `upstreams_of` with what its row shows. `step_s`, `batch`: means of its last whole minute;
    None: no steps, or none reported."""
    saturation = shown.get("saturation") or {}
    steps = minute.steps if minute is not None else 0
    kind = "own engine" if shown["kind"] == "engine" else f"server ({shown.get('server') or 'OpenAI API'})"
    return {
        "breaker": "",
        "failures": None,
        **shown,
        "path": f"/console/upstreams/{quote(shown['replica_id'], safe='')}",
        "kind": kind,
        "url": without_password(shown["url"]),
        "why": "" if shown["state"] != "away" else (shown["refusal"] or "it does not answer"),
        "kv_share": saturation.get("kv_usage") if saturation else kv_share,
        "step_s": minute.step_us / steps / 1e6 if minute is not None and steps else None,
        "batch": minute.batch_sum / steps if minute is not None and steps else None,
    }


def last_minutes(rows: Iterable[EngineRow]) -> dict[tuple[str, str], EngineMinute]:
    """The newest minute by pool and replica; rows are in order of time."""
    return {(row.key.pool, row.key.replica): row.counts for row in rows}


def kv_by_minute(rows: Iterable[EngineRow]) -> tuple[list[str], list[tuple[int, list[float | None]]]]:
    """At most `MOST_LINES` replicas, and their KV use by minute; None: not seen."""
    names: list[tuple[str, str]] = []
    minutes: dict[int, dict[tuple[str, str], float]] = {}
    for row in rows:
        key = row.key.pool, row.key.replica
        if key not in names:
            if len(names) == MOST_LINES:
                continue
            names.append(key)
        minutes.setdefault(row.key.minute_us, {})[key] = row.counts.as_json()["kv_share"]
    shares = [(at_us, [minutes[at_us].get(name) for name in names]) for at_us in sorted(minutes)]
    return [replica for _, replica in names], shares


def drain_effects(pool: str, replica: Row, others: Sequence[Row], missing: int) -> list[str]:
    """What a drain will do, in sentences. `missing`: gateways that did not answer."""
    serving = sum(row["state"] == "serving" for row in others)
    one = replica["in_flight"] == 1
    running = (
        "No request runs there now."
        if not replica["in_flight"] and not missing
        else f"{replica['in_flight']} {'request runs' if one else 'requests run'} there now:"
        f" {'it ends' if one else 'they end'} by {'itself' if one else 'themselves'}, and no token is lost."
    )
    effects = [
        f"{replica['replica_id']} of {pool} gets no new requests, from any gateway, also after restarts,"
        " until you resume it.",
        running,
    ]
    if missing:
        effects.append(
            f"{missing} other {'gateway' if missing == 1 else 'gateways'} did not answer: what runs there"
            " from these is not counted here, and ends by itself as well."
        )
    effects.append(
        f"What waits goes to the {serving} other {'replica' if serving == 1 else 'replicas'} of {pool}."
        if serving
        else f"No other replica serves {pool}: what waits does so for a while longer, and is then refused, as"
        " new requests are, with 503 until one serves again."
    )
    return effects
