"""A server's saturation from its Prometheus page, and the window that follows from it. Pure.

Pages of vLLM (both names of its KV gauge), SGLang, TensorRT-LLM (`/prometheus/metrics`) and Fairgate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

FULL_KV = 0.95
"""Share of its KV memory from which a server starts to preempt: it gets no more."""

RUNNING = frozenset({"vllm:num_requests_running", "sglang:num_running_reqs", "trtllm_num_requests_running"})
WAITING = frozenset({"vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting"})
KV_USAGE = frozenset(
    {
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "trtllm_kv_cache_utilization",
    }
)
_OWN_SEQUENCES = "fairgate_engine_sequences"
_OWN_BLOCKS = "fairgate_engine_kv_blocks"
_OWN_QUEUED = "fairgate_queued"
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?[ \t]+([0-9eE+.-]+)(?:[ \t]+-?\d+)?\s*")
PREFIXES = ("vllm:", "sglang:", "trtllm_", "fairgate_")
"""Other lines are not parsed."""
MAX_VALUE = 1e12
"""Larger values are clamped, so that sums are finite."""
MAX_PAGE_CHARACTERS = 2**20
"""The rest is not read."""
_STATE = re.compile(r'state="([a-z]+)"')


@dataclass(frozen=True, slots=True)
class Saturation:
    """A server's load by all its clients. None: not on the page."""

    running: int
    waiting: int
    kv_usage: float | None
    """Share of its KV memory in use, 0 to 1."""


def read(page: str) -> Saturation | None:
    """None without a known name. Sums over ranks and replicas; of several KV gauges the fullest counts."""
    running = waiting = 0.0
    kv_usage: float | None = None
    blocks: dict[str, float] = {}
    is_known = False
    for name, labels, value in _samples(page):
        if name in RUNNING:
            running += value
        elif name in WAITING:
            waiting += value
        elif name in KV_USAGE:
            kv_usage = max(kv_usage or 0.0, value)
        elif name == _OWN_SEQUENCES:
            if 'state="running"' in labels:
                running += value
            else:
                waiting += value
        elif name == _OWN_QUEUED:
            waiting += value
        elif name == _OWN_BLOCKS:
            state = _STATE.search(labels)
            blocks[state[1] if state else ""] = blocks.get(state[1] if state else "", 0.0) + value
        else:
            continue
        is_known = True
    if not is_known:
        return None
    if total := sum(blocks.values()):
        kv_usage = blocks.get("referenced", 0.0) / total
    if kv_usage is not None:
        kv_usage = min(1.0, max(0.0, kv_usage))
    return Saturation(max(0, round(running)), max(0, round(waiting)), kv_usage)


def window(seen: Saturation | None, max_concurrent: int, own: int) -> int:
    """Sequences that this gateway may have at the server; `own`: has now. At least 1, to notice new room."""
    if seen is None:
        return max_concurrent
    others = max(0, seen.running + seen.waiting - own)
    most = max_concurrent - others
    if seen.waiting > 0:
        # It has a queue of its own: requests should queue here, where tenants are told apart.
        most = min(most, own - seen.waiting)
    if seen.kv_usage is not None and seen.kv_usage >= FULL_KV:
        most = min(most, own)
    return max(1, most)


def _samples(page: str) -> Iterator[tuple[str, str, float]]:
    for line in page[:MAX_PAGE_CHARACTERS].splitlines():
        if not line.startswith(PREFIXES):
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        if math.isfinite(value):
            yield sample[1], sample[2] or "", min(value, MAX_VALUE)
