"""A database with many tenants, keys, limits, requests, misses, refusals and acts, filled quickly."""

from __future__ import annotations

import json
from dataclasses import dataclass

from sqlalchemy import Connection, Engine, LargeBinary, bindparam, text

from gateway.domain.timeline import Event, TimelineKind, pack
from tenants.usage.fold import fold, is_behind

MISSES = 2
"""One request in so many missed a target."""
MODELS, TIERS = 3, ("interactive", "standard", "batch")
CAUSES = ("capacity", "scheduling", "quota")
BEYOND_LOG = 1_000_000_000
"""Rows of the audit have numbers from here on: they are no leaves, and acts go on from 0."""
SPAN_US = 25 * 86_400 * 1_000_000
"""The requests ended within so long before now, evenly."""


@dataclass(frozen=True)
class Sizes:
    """How many there are. Tenants are called `t1` and so on, their keys `key_1`, their requests `req_1`."""

    requests: int
    tenants: int
    keys: int
    """Each has a limit, too."""
    rare: int = 997
    """One request in so many failed, one refusal in so many was the platform's, one move was made."""


def fill(connection: Connection, sizes: Sizes, now_us: int) -> None:
    """Fills an empty, migrated database; commits nothing."""
    nothing = "''" if connection.dialect.name == "postgresql" else "x''"
    as_json = "::json" if connection.dialect.name == "postgresql" else ""
    packed = pack([Event(TimelineKind.DISPATCHED, 1_000), Event(TimelineKind.ENDED, 9_000, (0,))])
    values = {
        "now_us": now_us, "begin_us": now_us - SPAN_US, "step_us": SPAN_US // sizes.requests,
        "tenants": sizes.tenants, "keys": sizes.keys, "digest": b"0" * 32, "packed": packed,
    }  # fmt: skip

    def insert(table: str, columns: str, row: str, count: int, where: str = "") -> None:
        rows = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count})"
        statement = text(f"INSERT INTO {table} ({columns}) {rows} SELECT {row} FROM n {where}")
        known = {name: value for name, value in values.items() if f":{name}" in str(statement)}
        binary = [bindparam(name, type_=LargeBinary) for name in ("digest", "packed") if name in known]
        connection.execute(statement.bindparams(*binary), known)

    def literal(value: object) -> str:
        return f"'{json.dumps(value)}'{as_json}".replace(":", r"\:")

    def one_of(values: tuple[str, ...], number: str) -> str:
        cases = " ".join(f"WHEN {index} THEN '{value}'" for index, value in enumerate(values))
        return f"CASE ({number}) % {len(values)} {cases} END"

    tenant, key = "1 + (i - 1) % :tenants", "1 + (i - 1) % :keys"
    of_key = "1 + (i - 1) % :keys % :tenants"
    at_us = "(:begin_us + i * CAST(:step_us AS BIGINT))"
    tier, model = one_of(TIERS, "i / 7"), f"'model-' || (i % {MODELS})"
    insert(
        "tenants",
        "id, name, status, weight, default_tier, tiers, created_us, revision",
        f"'ten_' || i, 't' || i, 'active', 1.0, 'standard', {literal(list(TIERS))}, :begin_us, 1",
        sizes.tenants,
    )
    insert(
        "projects",
        "id, tenant_id, name, status, created_us",
        "'prj_' || i, 'ten_' || i, 'default', 'active', :begin_us",
        sizes.tenants,
    )
    insert(
        "api_keys",
        "id, tenant_id, project_id, name, scopes, created_us",
        f"'key_' || i, 'ten_' || ({tenant}), 'prj_' || ({tenant}), 'robot', {literal(['inference'])},"
        " :begin_us + i",
        sizes.keys,
    )
    insert(
        "key_secrets",
        "public_id, key_id, digest, created_us",
        "'public' || i, 'key_' || i, :digest, :begin_us",
        sizes.keys,
    )
    insert(
        "limits",
        "id, tenant_id, kind, subject_id, meter, shape, tier, time_zone, amount, mode, created_us",
        f"'lim_' || i, 'ten_' || ({tenant}), 'key', 'key_' || i, 'requests', 'day', '', 'UTC', 1000, 'hard',"
        " :begin_us + i",
        sizes.keys,
    )
    insert(
        "slos",
        "id, tenant_id, tier, metric, target_us, per_mille, created_us",
        "'slo_' || i, 'ten_' || i, 'standard', 'e2e', 1000000, 950, :begin_us",
        sizes.tenants,
    )
    insert(
        "model_aliases",
        "id, name, means, max_price",
        "'ali_' || i, 'alias-' || i, 'model-1', 1",
        sizes.tenants,
    )
    insert(
        "webhooks",
        "id, tenant_id, host, subjects, sealed, created_us, by",
        f"'whk_' || i, 'ten_' || i, 'https://hooks.example/' || i, {literal([])}, :digest, :begin_us, 'cli'",
        sizes.tenants,
    )
    insert(
        "outbox",
        "seq, event_id, webhook_id, tenant_id, subject, body, made_us, state, attempts, next_us, until_us,"
        " sender, claimed_until_us, error, ended_us",
        "i, 'evt_' || i, 'whk_1', 'ten_1', 'slo.burn', '{}', :begin_us, 'dead', 3, :begin_us, :begin_us,"
        " '', 0, 'it answered 503', :begin_us",
        sizes.tenants,
    )
    connection.execute(text("UPDATE outbox_head SET seq = :seq"), {"seq": sizes.tenants})
    insert(
        "incidents",
        "id, key, subject, tenant_id, severity, summary, evidence, page, fired_us, resolved_us",
        f"'inc_' || i, 'slo.burn:' || i, 'slo.burn', 'ten_' || i, 'page', 'it burns', {literal({})},"
        " '/console/slo', :begin_us + i, CASE WHEN i % 2 = 0 THEN :begin_us + i + 1 END",
        sizes.tenants,
    )
    amounts = "requests, input_tokens, output_tokens, cost_nanousd"
    common = f"request_id, tenant_id, project_id, key_id, gateway_id, tier, model, {amounts}, at_us, detail"
    row = (
        f"'req_' || i, 'ten_' || ({of_key}), 'prj_' || ({of_key}), 'key_' || ({key}), 'gw', {tier}, {model},"
        f" 1, 100, 20, 3000, {at_us}, {literal({})}"
    )
    insert("ledger", f"kind, outcome, {common}", f"'reserve', '', {row}", sizes.requests)
    outcome = f"CASE WHEN i % {sizes.rare} = 0 THEN 'failed' ELSE 'completed' END"
    insert("ledger", f"kind, outcome, {common}", f"'settle', {outcome}, {row}", sizes.requests)
    insert(
        "timelines",
        "request_id, tenant_id, ended_us, packed, session",
        f"'req_' || i, 'ten_' || ({of_key}), {at_us}, :packed, 'run-' || (i / (1 + :tenants) % 2)",
        sizes.requests,
    )
    insert(
        "slo_misses",
        "request_id, metric, tenant_id, tier, cause, target_us, actual_us, at_us, evidence",
        f"'req_' || i, 'e2e', 'ten_' || ({of_key}), {tier}, {one_of(CAUSES, f'i / {MISSES}')}, 1000000,"
        f" 2000000, {at_us}, {literal({})}",
        sizes.requests,
        f"WHERE i % {MISSES} = 0",
    )
    code = one_of(("insufficient_quota", "rate_limit_exceeded"), "i / 3")
    insert(
        "refusals",
        "request_id, at_us, tenant_id, project_id, key_id, tier, model, code, limit_id, of_platform, wanted,"
        " available",
        f"'ref_' || i, {at_us}, 'ten_' || ({of_key}), 'prj_' || ({of_key}), 'key_' || ({key}), {tier},"
        f" {model}, {code}, 'lim_' || ({key}), i % {sizes.rare} = 0, 50, 7",
        sizes.requests,
    )
    knob = one_of(("admission", "batch_cap", "ageing"), "i / 5")
    insert(
        "control_moves",
        "move_id, at_us, gateway_id, model, knob, before, after, reason, is_made, mode, knobs",
        f"'mov_' || i, {at_us}, 'gw_1', {model}, {knob}, 1.0, 0.5, 'KV nearly full (0.95)',"
        f" i % {sizes.rare} = 0, 'acting', '{{}}'",
        sizes.requests,
    )
    insert(
        "audit",
        "seq, entry, at_us, actor, origin, action, target, tenant_id",
        f"{BEYOND_LOG} + i, {nothing}, {at_us}, 'cli:root', 'cli', 'limit.set', 'lim_' || ({key}),"
        f" 'ten_' || ({of_key})",
        sizes.requests,
    )


def fold_all(engine: Engine) -> None:
    """Brings the sums of usage up to date, as a gateway does beside its requests."""
    behind = True
    while behind:
        with engine.begin() as connection:
            fold(connection, most=50_000)
            behind = is_behind(connection)
