"""Mutants of what happens when gateways and engines die, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

CHARGE = "tests/unit/gateway/cluster/test_crash_charge.py"
IDENTITY = "tests/integration/test_identity.py"
GIVEN_BACK = (
    "tests/contract/test_quota_store.py::test_what_is_given_back_is_free_again_in_its_own_window_and_epoch"
)

_BROKEN: list[Broken] = [
    (
        "gateway/cluster/crash_charge.py",
        "limits count only what was reported",
        "return CrashCharge(RequestOutcome.LOST, charged, whole, detail)",
        "return CrashCharge(RequestOutcome.LOST, charged, counted_use, detail)",
        CHARGE,
    ),
    (
        "gateway/cluster/crash_charge.py",
        "an engine that was started again is taken for a witness",
        "model in progress.models and progress.engines <= lives",
        "model in progress.models",
        CHARGE,
    ),
    (
        "gateway/cluster/crash_charge.py",
        "the progress record is not billed",
        "if sent is None or sent.output_tokens <= charged.output_tokens:",
        "if sent is None or sent.output_tokens:",
        CHARGE,
    ),
    (
        "tenants/directory/gateways.py",
        "a heartbeat overwrites another process's",
        'gateways.c.instance_id.in_(["", instance.instance_id])',
        'gateways.c.id != ""',
        IDENTITY,
    ),
    (
        "gateway/cluster/identity.py",
        "a live process's id is taken over",
        "        if rival.heartbeat_us != self._first.heartbeat_us:\n",
        "        if False:\n",
        IDENTITY,
    ),
    (
        "tenants/quota/lua/give_back.lua",
        "what a rebuild has filled in is given back again",
        "if is_lost() then\n  return {'lost'}\nend\n",
        "",
        GIVEN_BACK,
    ),
]

CRASH_MUTATIONS = mutations_of("crash", _BROKEN)
