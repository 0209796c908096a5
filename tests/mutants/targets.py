"""Mutants of targets, and the test that has to notice each: what is promised, what a client asks for."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

DOMAIN = "tests/unit/gateway/domain/test_targets.py"
LIFECYCLE = "tests/integration/test_targets.py"
ORDERS = "tests/unit/engine/scheduling/order/test_by_size.py"
SLACK = "tests/unit/engine/scheduling/compose/test_slack.py"

_BROKEN: list[Broken] = [
    (
        "engine/scheduling/order/edf.py",
        "a client's word takes places from other tenants",
        "    def _terms(self, entry: QueueEntry) -> Terms:\n",
        "    def _terms(self, entry: QueueEntry) -> Terms:\n"
        "        if entry.own_deadline_s is not None:\n"
        "            return (entry.own_deadline_s,)\n",
        ORDERS,
    ),
    (
        "engine/scheduling/order/priority.py",
        "a client's word makes its tenant more urgent",
        "_slack_s(entry, entry.deadline_s)\n            +",
        "_slack_s(entry, entry.own_deadline_s or entry.deadline_s)\n            +",
        ORDERS,
    ),
    (
        "engine/scheduling/order/keyed.py",
        "who goes first of a tenant leaves it the place that it took",
        "            self._swap(entry_id, first[1])\n",
        "            pass\n",
        ORDERS,
    ),
    (
        "engine/scheduling/order/keyed.py",
        "a client's word is not looked at",
        "        if own is None and own_key < key:\n",
        "        if own is None and own_key > key:\n",
        ORDERS,
    ),
    (
        "gateway/domain/targets.py",
        "a client's word is a promise",
        "    deadline_s = None if e2e_s is None else since_s + e2e_s\n",
        "    deadline_s = _least(None if e2e_s is None else since_s + e2e_s, expires_s)\n",
        DOMAIN,
    ),
    (
        "gateway/domain/targets.py",
        "the loosest target counts",
        "    return min((each for",
        "    return max((each for",
        DOMAIN,
    ),
    (
        "gateway/domain/targets.py",
        "what has been waited is not subtracted",
        "max(LEAST_S, instant_s - now_s)",
        "max(LEAST_S, instant_s - min(now_s, 100.0))",
        DOMAIN,
    ),
    (
        "gateway/requests/lifecycle.py",
        "another tier has the targets of the old one",
        "            self.admission.targets_s(call.principal.tenant_id, tier),\n",
        "            self.admission.targets_s(call.principal.tenant_id, call.tier),\n",
        LIFECYCLE,
    ),
    (
        "gateway/requests/execution.py",
        "targets do not reach the engine",
        "        **run.targets.for_engine(now_s),\n",
        "",
        LIFECYCLE,
    ),
    (
        "engine/scheduling/compose/slack.py",
        "what has no target of its pace lends",
        "decoding.append((0.0 if due_s is None else due_s - now_s, sequence))",
        "decoding.append((1e9 if due_s is None else due_s - now_s, sequence))",
        SLACK,
    ),
]

TARGET_MUTATIONS = mutations_of("targets", _BROKEN)
