"""Mutants of what buckets refill by spare capacity, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

SPARE = "tenants/quota/spare.py"
RULES = "tenants/quota/rules.py"
LUA = "tenants/quota/lua/common.lua"
CONTROL = "gateway/flow/control_rules.py"
STORES = "tests/property/test_quota_spare.py::test_both_stores_refill_by_exactly_what_was_in_force"
SPARE_TEST = "tests/unit/tenants/quota/test_spare.py"
CEILINGS_TEST = "tests/unit/tenants/admin/test_ceilings.py"
KNOB_TEST = "tests/unit/gateway/flow/test_quota_knob.py"

_EFFECTIVE = "rate + max(0, ceiling - rate) * min(WHOLE, max(0, share)) // WHOLE"
_IN_LUA = "limit.rate + quotient((limit.ceiling - limit.rate) * change[2], 1000)"

_BROKEN: list[Broken] = [
    (SPARE, "a bucket refills beyond its ceiling", _EFFECTIVE, "rate + ceiling * share // WHOLE", SPARE_TEST),
    (
        SPARE,
        "a bucket refills below its rate",
        _EFFECTIVE,
        "ceiling * min(WHOLE, max(0, share)) // WHOLE",
        SPARE_TEST,
    ),
    (
        LUA,
        "in Redis a bucket refills beyond its ceiling",
        _IN_LUA,
        "limit.rate + quotient(limit.ceiling * change[2], 1000)",
        STORES,
    ),
    (
        LUA,
        "in Redis a bucket refills below its rate",
        _IN_LUA,
        "quotient(limit.ceiling * change[2], 1000) + 1",
        STORES,
    ),
    (
        RULES,
        "what is in force now counts for the time before",
        "    for since_ms, share in history:\n",
        "    for since_ms, share in [(0, share) for _, share in history[-1:]]:\n",
        SPARE_TEST,
    ),
    (
        SPARE,
        "an idle model lends for one that is not",
        "    return min((shares.get(model, 0) for model in models), default=0)\n",
        "    return max((shares.get(model, 0) for model in models), default=0)\n",
        SPARE_TEST,
    ),
    (
        RULES,
        "a soft limit follows spare capacity",
        "        and limit.mode is LimitMode.HARD\n        and limit.meter in TOKEN_METERS\n",
        "        and limit.meter in TOKEN_METERS\n",
        SPARE_TEST,
    ),
    (
        RULES,
        "a window follows spare capacity",
        "        limit.is_bucket\n        and limit.mode is LimitMode.HARD\n",
        "        limit.mode is LimitMode.HARD\n",
        SPARE_TEST,
    ),
    (
        "tenants/admin/validation.py",
        "a soft limit gets a ceiling",
        "    if wanted.mode != LimitMode.HARD.value:\n",
        "    if False:\n",
        CEILINGS_TEST,
    ),
    (
        "tenants/admin/validation.py",
        "a ceiling below the rate is stored",
        "    if ceiling_per_s < rate_per_s:\n",
        "    if False:\n",
        CEILINGS_TEST,
    ),
    (
        CONTROL,
        "it is lent though a higher tier waits",
        "float(seen.higher_waits or is_overload",
        "float(is_overload",
        KNOB_TEST,
    ),
    (
        CONTROL,
        "what was lent goes back by and by",
        "        is_recall = knob in LENT and goal < before and reason != NO_REASON\n",
        "        is_recall = False\n",
        KNOB_TEST,
    ),
    (
        CONTROL,
        "a loan's turn takes another knob's minute",
        "            if knob not in LENT:\n                self._reversed_s = now_s\n",
        "            self._reversed_s = now_s\n",
        KNOB_TEST,
    ),
]

SPARE_MUTATIONS = mutations_of("spare", _BROKEN)
