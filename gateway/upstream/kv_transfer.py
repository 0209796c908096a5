"""Whether a sequence that moves takes its KV along or is computed again, by predicted time. Pure."""

from __future__ import annotations

from engine.client.zmq_link import MAX_MESSAGE_BYTES
from engine.messages import Ready, StepTime
from engine.scheduling.room import attended_tokens
from engine.step_time.model import predict_step_s

MAX_KV_BYTES = MAX_MESSAGE_BYTES * 15 // 16
"""Of one message, which has the sequence's tokens beside."""


def takes_kv(
    tokens: int, source: Ready, target: Ready, bytes_per_s: tuple[float, float], step_time: StepTime
) -> bool:
    """`tokens`: prompt and output so far; `bytes_per_s`: of the links to the source and to the target;
    `step_time`: the target's. False also where the KV would not fit: into a message, or into the target."""
    layouts = [(ready.kv_token_bytes, ready.model.dtype) for ready in (source, target)]
    size_bytes = tokens * source.kv_token_bytes
    if not 0 < size_bytes <= MAX_KV_BYTES or layouts[0] != layouts[1]:
        return False
    return sum(size_bytes / each for each in bytes_per_s) < recompute_s(
        tokens, target.max_batched_tokens, step_time
    )


def recompute_s(tokens: int, max_batched_tokens: int, step_time: StepTime) -> float:
    """Seconds to compute `tokens` of one sequence in steps of their own."""
    starts = range(0, tokens, max_batched_tokens)
    sizes = [min(max_batched_tokens, tokens - start) for start in starts]
    return sum(
        predict_step_s(step_time, size, attended_tokens(start, size), 1)
        for start, size in zip(starts, sizes, strict=True)
    )
