"""Mutants of quotes, their credits and bounds, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

OWN_WORK = "tests/unit/gateway/explain/test_own_work.py"
QUOTES = "tests/unit/gateway/quotes/test_quotes.py"
QUOTED = "tests/integration/test_quoted_requests.py"

_BROKEN: list[Broken] = [
    (
        "gateway/explain/own_work.py",
        "what was quoted counts as if it had come when it is redeemed",
        "other.known_s > request.known_s",
        "other.came_s > request.came_s",
        OWN_WORK,
    ),
    (
        "gateway/explain/own_work.py",
        "another tenant's work is its own",
        "other.tenant_id == request.tenant_id and ",
        "",
        OWN_WORK,
    ),
    (
        "gateway/quotes/quotes.py",
        "a tenant's own quotes count as it redeems them of late",
        "            if whose == tenant_id:\n",
        "            if False:\n",
        QUOTES,
    ),
    (
        "gateway/domain/quote_redemption.py",
        "what does not bind is credited",
        "if missed and is_binding else 0",
        "if missed else 0",
        QUOTED,
    ),
    (
        "tenants/ledger/ledger.py",
        "a tenant's credits have no cap",
        "min(-credit.amounts.cost_nanousd, max(0, left))",
        "-credit.amounts.cost_nanousd",
        QUOTED,
    ),
    (
        "engine/forecast/calibration.py",
        "single requests teach of many together",
        'if bucket.kind != "together" or key[0] == "together"',
        "if True",
        "tests/unit/engine/forecast/test_calibration.py",
    ),
    (
        "tenants/storage/database.py",
        "a write that was not stored is forgotten",
        "            self.write_failure = failure = _not_written(jobs)",
        "            failure = _not_written(jobs)",
        "tests/integration/test_database.py",
    ),
    (
        "tenants/directory/idempotency.py",
        "answers have no bound in bytes",
        "            left = self._max_bytes - _kept_bytes(connection, scope.tenant_id)\n",
        "            left = self._max_bytes\n",
        "tests/integration/test_idempotency.py",
    ),
]

QUOTE_MUTATIONS = mutations_of("quotes", _BROKEN)
