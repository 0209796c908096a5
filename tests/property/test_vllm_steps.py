"""Histories of requests, leases, ends and evictions inside vLLM, on the stand-in of its scheduler."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.policy import policy_names
from tests.support.vllm_scheduler import FairStandIn, Server, Status

Acts = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 120), st.integers(1, 60), st.integers(0, 70)),
        st.tuples(st.just("top_up"), st.integers(0, 15), st.integers(1, 70)),
        st.tuples(st.just("end"), st.integers(0, 15)),
        st.tuples(st.just("abort"), st.integers(0, 15)),
        st.tuples(st.just("policy"), st.sampled_from(sorted(policy_names()))),
        st.tuples(st.just("reset")),
        st.tuples(st.just("run"), st.integers(1, 12)),
    ),
    max_size=40,
)
ON_ONE = {"top_up", "end", "abort"}
SIZES = st.fixed_dictionaries(
    {"places": st.integers(1, 8), "tokens": st.integers(16, 64), "blocks": st.integers(14, 40)}
)


@settings(max_examples=60, deadline=None)
@given(acts=Acts, sizes=SIZES, slots=st.sampled_from(["auto", 0, 1, 2, 4]))
def test_no_history_exceeds_a_lease_or_leaves_a_sequence_behind(
    acts: list[tuple[Any, ...]], sizes: dict[str, int], slots: int | str
) -> None:
    with patch.dict(os.environ, {"FAIRGATE_VLLM_SLOTS": str(slots)}):
        server = Server(FairStandIn(**sizes))
    scheduler, requests = server.scheduler, []
    leases: dict[str, int] = {}
    for number, (act, *numbers) in enumerate(acts):
        name = requests[numbers[0] % len(requests)].request_id if requests and act in ON_ONE else ""
        if act == "add":
            prompt, tokens, lease = numbers
            request = server.add(
                f"r{number}",
                prompt=prompt,
                tokens=tokens,
                tenant_id="ab"[number % 2],
                weight=1 + number % 3,
                tier=number % 3,
                lease_tokens=lease,
            )
            requests.append(request)
            leases[request.request_id] = lease
        elif act == "top_up" and scheduler.top_up(name, numbers[1]):
            leases[name] = max(leases[name], numbers[1])
        elif act == "end":
            scheduler.end(name, "budget")
        elif act == "abort" and name in scheduler.requests:
            scheduler.finish_requests(name, Status.FINISHED_ABORTED)
        elif act == "policy":
            scheduler.set_policy(numbers[0])
        elif act == "reset":
            scheduler.reset_prefix_cache()
        elif act == "run":
            server.run(numbers[0])
        scheduler.planner.table.check()
        assert all(each.num_output_tokens <= leases[each.request_id] for each in requests)
        assert len(scheduler.running) <= sizes["places"]
    for name in list(scheduler.requests):
        scheduler.top_up(name, 1000)
    server.run_all(3000)
    assert not scheduler.planner.table.sequences
    assert not len(scheduler.waiting)
    assert scheduler.pool.free == sizes["blocks"]
    assert len(server.desk.ends) == len(requests)
    emitted = {each.sequence_id: each.emitted_tokens for each in server.desk.ends if each.finish == "length"}
    assert all(emitted.get(each.request_id, each.max_tokens) == each.max_tokens for each in requests)
