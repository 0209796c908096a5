"""Saturation read from a server's metrics page, and the window that follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from engine.messages import RunningSequence, Snapshot, StepTime
from gateway.metrics.load import LoadCollector
from gateway.metrics.registry import Metrics
from gateway.upstream.base import Upstream
from gateway.upstream.health.saturation import FULL_KV, Saturation, read, window
from tests.support.virtual_gateway import Job, VirtualGateway

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:request_success_total{finished_reason="stop"} 12.0
"""
PAGES = {
    "vllm": (VLLM, Saturation(7, 2, 0.5)),
    "vllm with its older name": (
        VLLM.replace("kv_cache_usage_perc", "gpu_cache_usage_perc"), Saturation(7, 2, 0.5),
    ),
    "vllm with two engines": (
        VLLM + VLLM.replace('engine="0"', 'engine="1"').replace("0.5", "0.9"), Saturation(14, 4, 0.9),
    ),
    "sglang": (
        'sglang:num_running_reqs{model_name="m"} 3.0\nsglang:num_queue_reqs{model_name="m"} 1.0\n'
        'sglang:token_usage{model_name="m"} 0.28 1700000000000\n',
        Saturation(3, 1, 0.28),
    ),
    "tensorrt-llm": (
        'trtllm_num_requests_running{engine_type="pytorch"} 4\ntrtllm_num_requests_waiting 0\n'
        "trtllm_kv_cache_utilization 1.2\n",
        Saturation(4, 0, 1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_of_known_servers_are_read(name: str) -> None:
    page, expected = PAGES[name]
    assert read(page) == expected


@pytest.mark.parametrize(
    "page", ["", "garbage", "<html>404</html>", "vllm:num_requests_running\n", 'up{job="x"} 1\n', "\0\n"]
)
def test_a_page_that_says_nothing_known_says_nothing(page: str) -> None:
    assert read(page) is None


def test_numbers_that_are_none_are_left_out() -> None:
    assert read("vllm:num_requests_running 1e\nvllm:num_requests_waiting 2\n") == Saturation(0, 2, None)


def test_our_own_page_is_read() -> None:
    running = [RunningSequence(f"s{i}", "r", "t", 1, "running", 1, 1, 1, 8, 8) for i in range(3)]
    snapshot = Snapshot(
        "e", 1, 0.0, running, running[:1], 50, 30, 20, 100, StepTime(1e-3, 1e-5, 0.0, 0.0, 1, 0.1)
    )
    house = VirtualGateway()
    for _ in range(6):
        house.arrive(Job("t", 10, 10))
    metrics = Metrics()
    metrics.registry.register(
        LoadCollector(
            lambda: [house.flow],
            lambda: [
                cast(Upstream, SimpleNamespace(replica_id="e", is_up=True, snapshot=snapshot, ready=None))
            ],
            pending=lambda: 0,
            overdue=lambda: 0,
            is_local=lambda: False,
            share_lags=dict,
            drift=lambda: None,
        )
    )
    page, _ = metrics.render("")
    assert read(page.decode()) == Saturation(running=3, waiting=7, kv_usage=0.2)


def test_others_work_takes_room_and_a_line_over_there_is_not_fed() -> None:
    assert window(None, 32, 5) == 32, "a server that does not tell gets its configured window"
    assert window(Saturation(5, 0, 0.1), 32, 5) == 32, "what runs there is ours"
    assert window(Saturation(25, 0, 0.1), 32, 5) == 12
    assert window(Saturation(20, 3, 0.1), 32, 20) == 17, "as many fewer as wait"
    assert window(Saturation(8, 0, FULL_KV), 32, 8) == 8, "no more than it has"
    assert window(Saturation(500, 500, 1.0), 32, 0) == 1, "only a call finds out that there is room again"
