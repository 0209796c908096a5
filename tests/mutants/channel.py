"""Mutants of the plug-in's channel and signatures, and the test that has to notice each."""

from __future__ import annotations

from tests.mutants.mutations import Broken, mutations_of

DESK = "tests/unit/engine/vllm_plugin/channel/test_desk.py"
BOUNDS = "tests/unit/engine/vllm_plugin/channel/test_bounds.py"

_BROKEN: list[Broken] = [
    (
        "engine/vllm_plugin/channel/claims_check.py",
        "a signature is good more than once",
        "        if not self._seen.is_first(",
        "        if False and not self._seen.is_first(",
        f"{DESK}::test_a_signature_is_good_once",
    ),
    (
        "engine/vllm_plugin/channel/replay.py",
        "what was forgotten is good again",
        "            self._floor_s, oldest = heapq",
        "            _, oldest = heapq",
        f"{BOUNDS}::test_a_full_memory_refuses_rather_than_lets_twice",
    ),
    (
        "engine/vllm_plugin/channel/gateways.py",
        "service is told once, heard or not",
        "        if heard >= self._told_at:\n            self._told = {}\n",
        "        self._told = {}\n",
        "tests/property/test_plugin_reports.py",
    ),
    (
        "engine/vllm_plugin/channel/desk.py",
        "a top-up that overtakes its request is forgotten",
        "                lease_tokens = max(lease_tokens, early.lease_tokens)\n",
        "",
        f"{DESK}::test_a_top_up_that_overtakes_its_request_counts",
    ),
    (
        "engine/vllm_plugin/channel/desk.py",
        "what rests for a gateway that is gone rests for ever",
        '                    controls.end(sequence.sequence_id, "budget")\n',
        "                    pass\n",
        f"{DESK}::test_what_rests_for_a_silent_gateway_ends_and_its_outcome_stays",
    ),
]

CHANNEL_MUTATIONS = mutations_of("channel", _BROKEN)
