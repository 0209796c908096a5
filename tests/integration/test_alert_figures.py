"""Every kind of alert by figures of a real gateway, on both databases."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from sqlalchemy import insert

from gateway.alerts.look import AlertFigures
from gateway.gateway import Gateway
from tenants.counts import calibration
from tenants.counts import refusal_store as refusals
from tenants.counts.calibration import CalibrationKey, KeptCount
from tenants.counts.refusal_store import RefusalKey
from tenants.nouns.key import KeyCreate
from tenants.nouns.limit import LimitSet
from tenants.outbox.figures import LedgerCheck, note_backup, note_ledger_check
from tenants.outbox.kinds import BY_SUBJECT
from tenants.slo import store as slo_store
from tenants.slo.slo import SloTally
from tenants.slo.store import CountKey
from tenants.slo.target import SloSet
from tenants.storage.flushes import Flush
from tenants.storage.tables import audit_checkpoints
from tests.support.gateway_app import MODEL, OWNER, gateway_app
from tests.support.quota import filled, whole

WHO = "cli:tester"


async def make_all_of_it_so(gateway: Gateway, now_s: float) -> None:
    """All that alerts are about."""
    deps, minute_s = gateway.deps, int(now_s) // 60 * 60
    admin, database = deps.admin, deps.database
    [tenant] = await admin.tenants.all()
    await admin.slos.set(WHO, SloSet(tier="standard", metric="ttft", target_s=0.5))
    tally = {CountKey(tenant.tenant_id, "standard", "ttft"): SloTally(100, 100)}
    await slo_store.add(database, tally, [], now_s)
    await admin.keys.create(WHO, KeyCreate(tenant=OWNER, expires_in_s=3_600))
    for meter, mode in (("total_tokens", "hard"), ("output_tokens", "soft")):
        await admin.limits.set(WHO, LimitSet(tenant=OWNER, meter=meter, mode=mode, window="day", amount=10))
    await deps.directory.refresh()
    await deps.quota_store.reserve("req_1", deps.directory.limits(now_s), whole(10), 60.0)
    told = CalibrationKey(minute_s // 3_600 * 3_600, MODEL, "standard", "ttft", 0, "plain")
    kept = {told: KeptCount(300, 100, 150), told._replace(figure="wait"): KeptCount(300, 300, 300)}
    await calibration.add(database, kept, Flush("test", 1), now_s)
    refused = {RefusalKey(minute_s, "", "queue_full", ""): 20}
    await refusals.add(database, refused, [], Flush("test-refusals", 1), now_s)
    old = {"size": 1, "note": "of long ago", "at_us": round((now_s - 3_600) * 1e6)}
    await database.write(lambda one: one.execute(insert(audit_checkpoints).values(old)))
    await database.write(lambda one: note_backup(one, round((now_s - 3 * 86_400) * 1e6)))
    check = LedgerCheck(round(now_s * 1e6), 2)
    await database.write(lambda one: note_ledger_check(one, check))


async def test_each_kind_is_found_by_its_figures_and_all_are_looked_at(
    database_url: str, tmp_path: Path
) -> None:
    async with gateway_app(database_url, tmp_path / "data") as client:
        app: Any = client._transport.app  # type: ignore[attr-defined]
        gateway: Gateway = app.state.gateway
        await filled(gateway.deps.quota_store)
        now_s = time.time()

        def figures(overdue: int, complaint: str) -> AlertFigures:
            return AlertFigures(
                gateway.deps,
                gateway.fleet.now,
                holds_overdue=lambda: overdue,
                audit_complaint=lambda: complaint,
            )

        found, looked_at = await figures(0, "")(round(now_s * 1e6))
        assert {each.kind.subject for each in found} == {"replica.down"}, "the server of these tests is away"
        assert looked_at == BY_SUBJECT.keys() - {"ledger.drift"}, "no comparison was made yet"
        await make_all_of_it_so(gateway, now_s)
        found, looked_at = await figures(3, "rows differ")(round(now_s * 1e6))
        assert {each.kind.subject for each in found} == looked_at == BY_SUBJECT.keys()
        assert [each.about for each in found if each.kind.subject == "calibration.off"] == [f"{MODEL}:ttft"]
        for each in found:
            assert (await client.get(each.page)).status_code in (200, 303, 401), each.page
        # A comparison that finds nothing, by any process, ends the alert.
        assert (await client.post("/admin/v1/usage/verify")).status_code == 200
        found, looked_at = await figures(0, "")(round(now_s * 1e6))
        assert "ledger.drift" in looked_at
        assert "ledger.drift" not in {each.kind.subject for each in found}
