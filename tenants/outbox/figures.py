"""The database's figures for alerts: burn rates, keys, soft limits, calibration, refusals, audit, backups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Connection, cast, func, select

from tenants.audit import checkpoints
from tenants.directory import queries
from tenants.outbox.conditions import KEY_EXPIRES_US, ExpiringKey, Kept
from tenants.outbox.limit_conditions import SOFT_SHOWN_US, SoftEvent
from tenants.quota.alerts import EventKind
from tenants.slo import store as slo_store
from tenants.slo.slo import DAY_S, SloTally
from tenants.slo.target import Slo
from tenants.storage.tables import (
    api_keys,
    audit,
    audit_head,
    calibration_counts,
    limit_events,
    refusal_counts,
)

SATURATED_MINUTES = 5
SATURATED_CODE = "queue_full"
MOST_KEYS = 1_000
MOST_SOFT_EVENTS = 5_000
CALIBRATED_S = DAY_S
LEDGER_CHECK_SETTING = "usage_check"
BACKUP_SETTING = "backup.at_us"


class LedgerCheck(msgspec.Struct, frozen=True):
    """The last comparison of the sums of usage with the ledger, by any process."""

    at_us: int
    problems: int


@dataclass(frozen=True, slots=True)
class DatabaseFigures:
    """One consistent snapshot."""

    windows: dict[tuple[str, str, str], dict[int, SloTally]]
    targets: list[Slo]
    keys: list[ExpiringKey]
    soft_events: list[SoftEvent]
    calibration: list[Kept]
    refused: int
    ledger_check: LedgerCheck | None
    audit_size: int
    audit_signed: int
    audit_signed_us: int | None
    backup_us: int | None


def read(connection: Connection, now_us: int) -> DatabaseFigures:
    newest = checkpoints.newest(connection)
    counts = slo_store.windows(connection, now_us / 1e6)
    return DatabaseFigures(
        windows={(key.tenant_id, key.tier, key.metric): found for key, found in counts.items()},
        targets=slo_store.slos_where(connection),
        keys=_keys(connection, now_us),
        soft_events=_soft_events(connection, now_us),
        calibration=_calibration(connection, now_us // 1_000_000),
        refused=_refused(connection, now_us // 1_000_000),
        ledger_check=_ledger_check(connection),
        audit_size=connection.execute(select(audit_head.c.size)).scalar() or 0,
        audit_signed=0 if newest is None else newest.size,
        audit_signed_us=None if newest is None else newest.at_us,
        backup_us=backup_us(connection),
    )


def note_ledger_check(connection: Connection, check: LedgerCheck) -> None:
    queries.put_setting(connection, LEDGER_CHECK_SETTING, msgspec.json.encode(check).decode())


def note_backup(connection: Connection, at_us: int) -> None:
    """When the newest finished backup was taken."""
    queries.put_setting(connection, BACKUP_SETTING, str(at_us))


def backup_us(connection: Connection) -> int | None:
    """When the newest backup was taken; without one, when the database's first act was; None: it has none."""
    if (text := queries.setting(connection, BACKUP_SETTING)) is not None:
        return int(text)
    return connection.execute(select(audit.c.at_us).order_by(audit.c.seq).limit(1)).scalar()


def _ledger_check(connection: Connection) -> LedgerCheck | None:
    text = queries.setting(connection, LEDGER_CHECK_SETTING)
    return None if text is None else msgspec.json.decode(text, type=LedgerCheck)


def _keys(connection: Connection, now_us: int) -> list[ExpiringKey]:
    columns = api_keys.c
    query = select(columns.id, columns.name, columns.tenant_id, columns.expires_us).where(
        columns.revoked_us.is_(None),
        columns.expires_us > now_us,
        columns.expires_us <= now_us + KEY_EXPIRES_US,
    )
    query = query.order_by(columns.expires_us, columns.id).limit(MOST_KEYS)
    return [ExpiringKey(*row) for row in connection.execute(query)]


def _soft_events(connection: Connection, now_us: int) -> list[SoftEvent]:
    columns = limit_events.c
    query = select(columns.limit_id, columns.level, columns.last_us).where(
        columns.kind == EventKind.THRESHOLD.value, columns.last_us > now_us - SOFT_SHOWN_US
    )
    query = query.order_by(columns.last_us.desc()).limit(MOST_SOFT_EVENTS)
    return [SoftEvent(*row) for row in connection.execute(query)]


def _calibration(connection: Connection, now_s: int) -> list[Kept]:
    """Of the last day, without waits stated as none, which are always kept."""
    columns = calibration_counts.c
    groups = (columns.model, columns.figure)
    sums: list[Any] = [cast(func.sum(sum_), BigInteger) for sum_ in (columns.requests, columns.within_p90)]
    says = (columns.figure != "wait") | (columns.wait_bucket > 0)
    query = select(*groups, *sums).where(columns.hour_s > now_s - CALIBRATED_S, says).group_by(*groups)
    return [Kept(*row) for row in connection.execute(query.order_by(*groups))]


def _refused(connection: Connection, now_s: int) -> int:
    columns = refusal_counts.c
    total = cast(func.coalesce(func.sum(columns["count"]), 0), BigInteger)
    since_s = now_s - SATURATED_MINUTES * 60
    query = select(total).where(columns.minute_s > since_s, columns.code == SATURATED_CODE)
    return connection.execute(query).scalar_one()
