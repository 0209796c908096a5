"""Mutants of refusals and of what was told, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

REFUSALS = "tests/integration/test_refusals.py"
CURSOR = "tests/unit/tenants/admin/test_cursor.py"
TOLD = "tests/unit/gateway/domain/test_told.py"
MERGED = "tests/unit/tenants/refusals/test_refusal.py"

_BROKEN: list[Broken] = [
    (
        "tenants/storage/flushes.py",
        "a repeated flush counts again",
        "where=flushes.c.number < new.excluded.number,",
        "where=flushes.c.number <= new.excluded.number,",
        REFUSALS,
    ),
    (
        "gateway/records/exact_writer.py",
        "an unanswered flush gets a new number",
        "            if self._unanswered is None:\n                self._unanswered = self.take()\n",
        "            self._number += self._unanswered is not None\n"
        "            if self._unanswered is None:\n                self._unanswered = self.take()\n",
        REFUSALS,
    ),
    (
        "gateway/records/refusal_recorder.py",
        "every flush keeps a few whole",
        "        if key.minute_s != self._minute_s:\n",
        "        if key.minute_s != self._minute_s or not self._rows:\n",
        REFUSALS,
    ),
    (
        "tenants/refusals/refusal.py",
        "merged counts are dropped",
        "            added(fewer, {coarse(key): count})\n",
        "            fewer[coarse(key)] = count\n",
        MERGED,
    ),
    (
        "tenants/refusals/refusal.py",
        "a tenant reads the platform's numbers",
        "        if not self.of_platform:\n",
        "        if self.of_platform:\n",
        MERGED,
    ),
    (
        "tenants/admin/lists/refusals.py",
        "a tenant's list has every tenant's",
        "        tenant = queries.find_tenant(connection, of_tenant)\n",
        "        pass\n",
        REFUSALS,
    ),
    (
        "tenants/admin/lists/refusals.py",
        "a tenant's cursor names requests of others",
        "    found += limited + owned if of_tenant is None else owned + limited\n",
        "    found += limited + owned\n",
        f"{REFUSALS}::test_a_tenants_cursor_names_no_request_of_another",
    ),
    (
        "gateway/records/key_use_recorder.py",
        "a use while the one before is written is lost",
        "                if self._last_us[key_id] == last_us:  # not used again meanwhile\n",
        "                if key_id in self._last_us:\n",
        f"{REFUSALS}::test_uses_of_keys_that_are_being_written_survive_the_end_of_a_gateway",
    ),
    (
        "tenants/admin/cursor.py",
        "a cursor of a filter with several values does not fit it",
        "list(value) if isinstance(value, tuple) else value",
        "value",
        CURSOR,
    ),
    (
        "gateway/routes/views/exhaustion_view.py",
        "what was given back is use below nothing",
        '    requests = max(0, sums["requests"])\n',
        '    requests = sums["requests"]\n',
        "tests/integration/test_recent_use.py",
    ),
    (
        "gateway/domain/told.py",
        "a request that changed its tier is judged by what it was told before",
        "        or first(events, TimelineKind.MOVED) is not None\n",
        "",
        TOLD,
    ),
]

RECORD_MUTATIONS = mutations_of("records", _BROKEN)
