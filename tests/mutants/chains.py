"""Mutants of chains of models, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

DOMAIN = "tests/unit/gateway/domain/test_fallback.py"
WALK = "tests/unit/gateway/pools/test_chain_walk.py"
LIFECYCLE = "tests/integration/test_fallbacks.py"

_BROKEN: list[Broken] = [
    (
        "gateway/pools/chain_walk.py",
        "a dearer model is taken whatever the alias allows",
        "            if self._ratio(pool) > self._chain.max_price:\n",
        "            if self._ratio(pool) < 0:\n",
        f"{WALK}::test_a_dearer_model_is_passed_over_unless_the_chain_allows_it",
    ),
    (
        "gateway/domain/fallback.py",
        "a model is as dear as the cheapest of its prices",
        "    return max(ratios, default=1.0)\n",
        "    return min(ratios, default=1.0)\n",
        f"{DOMAIN}::test_a_model_is_as_dear_as_the_dearest_of_its_prices",
    ),
    (
        "gateway/requests/lifecycle.py",
        "a full queue is noticed when something is held",
        "            self._dispatcher.require_room(call.principal.tenant_id)  # before anything is held\n",
        "            pass\n",
        f"{LIFECYCLE}::test_what_the_queue_keeps_too_long_goes_on_before_anything_is_held",
    ),
    (
        "gateway/requests/lifecycle.py",
        "what goes on keeps its stream in the pool that it left",
        "                pool._stream_limiter.leave(run.call.request_id)\n",
        "",
        f"{LIFECYCLE}::test_what_goes_on_takes_no_stream_of_its_tenants_rate_in_the_pool_that_it_leaves",
    ),
]

CHAIN_MUTATIONS = mutations_of("chains", _BROKEN)
