"""Counts beside those of `many_requests`, and acts on a server, so that no list is empty."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Table, insert

from tenants.storage import tables

MINUTE_US = 60_000_000
ACTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("POST", "/tenants", {"name": "acme", "weight": 2}),
    ("PATCH", "/tenants/acme", {"labels": {"team": ["search", "ads"]}, "tier": "interactive"}),
    ("POST", "/projects", {"tenant": "acme", "name": "web"}),
    ("POST", "/projects/web/suspend?tenant=acme", {}),
    ("POST", "/keys", {"tenant": "acme", "project": "web", "name": "robot", "allow_from": ["10.0.0.0/8"]}),
    ("POST", "/limits", {"tenant": "t1", "meter": "total_tokens", "window": "day", "amount": 900}),
    ("POST", "/limits", {"platform": True, "meter": "gpu_ms", "window": "hour", "amount": 9, "mode": "soft"}),
    ("POST", "/limits", {"tenant": "t1", "meter": "requests", "rate_per_s": 2.5, "amount": 10}),
    ("POST", "/limits", {"tenant": "t1", "each_end_user": True, "meter": "requests", "window": "minute",
                         "amount": 60, "mode": "shadow", "tier": "batch"}),
    ("POST", "/limits/lim_1/override", {"amount": 9, "reason": "=1+1 <script>", "for_s": 60}),
    ("POST", "/prices", {"model": "model-1", "tier": "batch", "input_nanousd": 1, "output_nanousd": 2}),
    ("POST", "/aliases/stored", {"name": "big", "means": "model-1"}),
    ("POST", "/slos", {"tier": "interactive", "metric": "ttft", "target_s": 0.5}),
    ("POST", "/webhooks", {"url": "https://8.8.8.8/made", "tenant": "t1"}),
    ("PUT", "/brake", {"tier": "batch", "share": 0.1, "for_s": 600, "reason": "a launch"}),
    ("POST", "/upstreams/away/drain", {"reason": "=new card"}),
    ("POST", "/people", {"name": "eve", "role": "auditor"}),
)  # fmt: skip
"""Of every kind of object one, on a database of `many_requests`: method, path and body of each request."""


def fill_counts(connection: Connection, now_us: int) -> None:
    """What was counted by minute and hour, of the first two tenants; commits nothing."""
    last_us = now_us // MINUTE_US * MINUTE_US - 5 * MINUTE_US
    flow = {"pool": "model-1", "gateway_id": "gw", "served_tokens": 10, "fair_tokens": 11,
            "waiting_token_s": 600, "arrivals": 2, "before_line_us": 1_000_000}  # fmt: skip
    engine = {"pool": "model-1", "gateway_id": "gw", "replica": "away", "state": "up", "seen_us": MINUTE_US,
              "up_us": MINUTE_US, "idle_us": 0, "steps": 100, "step_us": 50_000_000, "batch_sum": 800,
              "computed_tokens": 10, "emitted_tokens": 20, "recomputed_tokens": 0, "preemptions": 1,
              "kv_permille_s": 30_000}  # fmt: skip
    kept = {"hour_s": last_us // 3_600_000_000 * 3600 - 3600, "model": "model-1", "tier": "batch",
            "wait_bucket": 3, "kind": "plain", "requests": 10, "within_p50": 5, "within_p90": 9}  # fmt: skip
    refused = {"code": "insufficient_quota", "limit_id": "lim_1", "count": 3}
    for number, figure in enumerate(("wait", "ttft", "e2e")):
        at_us, tenant_id = last_us - number * MINUTE_US, f"ten_{number % 2 + 1}"
        rows: list[tuple[Table, dict[str, Any]]] = [
            (tables.flow_minutes, flow | {"minute_us": at_us, "tier": "batch", "tenant_id": tenant_id}),
            (tables.engine_minutes, engine | {"minute_us": at_us}),
            (tables.refusal_counts, refused | {"minute_s": at_us // 1_000_000, "tenant_id": tenant_id}),
            (tables.calibration_counts, kept | {"figure": figure}),
            (tables.key_uses, {"key_id": f"key_{number + 1}", "last_us": at_us}),
        ]
        for table, row in rows:
            connection.execute(insert(table).values(**row))
