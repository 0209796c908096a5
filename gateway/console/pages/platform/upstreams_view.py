"""What the page of upstreams shows of each replica, and the effects of a drain. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from gateway.console.formats import without_password
from tenants.admin.lists.flow import EngineRow
from tenants.counts.minute_store import EngineMinute

MOST_LINES = 8
"""Replicas in the chart of the last hour."""


@dataclass(frozen=True)
class ReplicaRow:
    replica: str
    kind: str
    url: str
    state: str
    why: str
    """Why it does not serve; empty: it does."""
    in_flight: int
    window: int
    kv_share: float | None
    step_s: float | None
    """Mean of its last whole minute; None: no steps, or none reported."""
    batch: float | None
    breaker: str
    failures: int | None
    drained_by: str
    drain_reason: str

    @property
    def path(self) -> str:
        return f"/console/upstreams/{quote(self.replica, safe='')}"


@dataclass(frozen=True)
class KvRow:
    """KV cache use in one minute by replica; None: not seen."""

    at_us: int
    shares: list[float | None]


def replica_row(shown: Mapping[str, Any], kv_share: float | None, minute: EngineMinute | None) -> ReplicaRow:
    drain = shown["drain"] or {}
    saturation = shown.get("saturation") or {}
    steps = minute.steps if minute is not None else 0
    return ReplicaRow(
        replica=shown["replica_id"],
        kind="own engine" if shown["kind"] == "engine" else f"server ({shown.get('server') or 'OpenAI API'})",
        url=without_password(shown["url"]),
        state=shown["state"],
        why="" if shown["state"] != "away" else (shown["refusal"] or "it does not answer"),
        in_flight=shown["in_flight"],
        window=shown["window"],
        kv_share=saturation.get("kv_usage") if saturation else kv_share,
        step_s=minute.step_us / steps / 1e6 if minute is not None and steps else None,
        batch=minute.batch_sum / steps if minute is not None and steps else None,
        breaker=shown.get("breaker", ""),
        failures=shown.get("failures"),
        drained_by=drain.get("by", ""),
        drain_reason=drain.get("reason", ""),
    )


def last_minutes(rows: Iterable[EngineRow]) -> dict[tuple[str, str], EngineMinute]:
    """The newest minute by pool and replica; rows are in order of time."""
    return {(row.key.pool, row.key.replica): row.counts for row in rows}


def kv_by_minute(rows: Iterable[EngineRow]) -> tuple[list[str], list[KvRow]]:
    """At most `MOST_LINES` replicas, and their KV use by minute."""
    names: list[tuple[str, str]] = []
    minutes: dict[int, dict[tuple[str, str], float]] = {}
    for row in rows:
        key = row.key.pool, row.key.replica
        if key not in names:
            if len(names) == MOST_LINES:
                continue
            names.append(key)
        minutes.setdefault(row.key.minute_us, {})[key] = row.counts.as_json()["kv_share"]
    shares = [KvRow(at_us, [minutes[at_us].get(name) for name in names]) for at_us in sorted(minutes)]
    return [replica for _, replica in names], shares


def drain_effects(pool: str, replica: ReplicaRow, others: Sequence[ReplicaRow], missing: int) -> list[str]:
    """What a drain will do, in sentences. `missing`: gateways that did not answer."""
    serving = sum(row.state == "serving" for row in others)
    one = replica.in_flight == 1
    running = (
        "No request runs there now."
        if not replica.in_flight and not missing
        else f"{replica.in_flight} {'request runs' if one else 'requests run'} there now:"
        f" {'it ends' if one else 'they end'} by {'itself' if one else 'themselves'}, and no token is lost."
    )
    effects = [
        f"{replica.replica} of {pool} gets no new requests, from any gateway, also after restarts, until you"
        " resume it.",
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
