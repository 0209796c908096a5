"""How much budget does a request hold, when does it ask for more, and who of its sequences may use it?

Pure. A request holds what it probably needs, not what it could need: the prompt and a quantile of the
predicted output on windows, the prompt and a small first chunk on token buckets. A short answer holds more at
once where that keeps nothing from others. While it decodes it asks for more before that runs out. What is
covered is divided among its sequences; none emits a token that is not.

Tokens here are output tokens of all the request's sequences together unless a name says otherwise. What they
count on a limit (weights, prices) is the caller's function `sizes`, which never falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from engine.messages import StepTime
from tenants.quota.store import Denied, Hold
from tenants.types import Amounts, Limit, LimitMode, Meter

Sizes = Callable[[int], Amounts]
"""What the prompt and so many output tokens count, all sequences together."""

FIRST_TOKENS = 16
"""What each sequence is covered for at least when it starts, where no bucket is smaller."""
SHORT_TOKENS = 512
"""Of each sequence: what is no longer is covered at once, where that is modest. A longer answer tops up,
which also reports how far it has come, should everybody die."""
MODEST_SHARE = 64
"""A first hold is modest when so many of its size fit into the burst: short of that it keeps a bucket from
those that share it."""
CHUNK_S = 1.0
"""A top-up covers so many seconds of decoding at least, where no bucket is smaller."""
LEAD_S = 0.25
"""It is asked for so many seconds before the engine would have to wait: many times a normal round trip."""
GPU_CHUNK_MS = 250
"""Device time that a top-up covers at least, where no bucket is smaller."""
FOR_EVER = 2**53
_OUTPUT_METERS = (Meter.TOTAL_TOKENS, Meter.OUTPUT_TOKENS, Meter.COST_NANOUSD, Meter.GPU_MS)


class SequenceLease(msgspec.Struct, frozen=True):
    """One sequence's place in a request's lease."""

    emitted: int
    lease: int
    """Tokens that it may emit in all."""
    most: int
    is_live: bool = True

    @property
    def left(self) -> int:
        """Covered and not emitted; what may still be asked for is not counted."""
        return self.lease - self.emitted


# ---------------------------------------------------------------- how much


def has_gpu_limit(limits: Sequence[Limit]) -> bool:
    """Whether the engine has to stop at a lease of device time."""
    return any(limit.meter is Meter.GPU_MS and limit.mode is LimitMode.HARD for limit in limits)


def first_hold(
    limits: Sequence[Limit],
    sizes: Sizes,
    gpu_ms: Callable[[int], int],
    sequences: int,
    ahead: int,
    most: int,
    *,
    may_be_cut: bool,
) -> Hold:
    """What a request asks for when it starts. `ahead`: its predicted output; `most`: the most it can emit;
    `gpu_ms`: the device time that it is predicted to take for so many output tokens.

    Where no limit counts what it emits, nothing is kept from others by holding all of it, and no top-up is
    needed.
    """
    buckets = _hard_buckets(limits)
    if not any(limit.meter in _OUTPUT_METERS for limit in limits):
        ahead = most
    at_once = _at_once(buckets, sizes, sequences, ahead, most, may_be_cut=may_be_cut)
    # Windows hold `ahead` as far as there is room: only buckets need to be told how much it is at first.
    first = sequences
    if buckets and at_once:
        first = max(sequences, at_once)
    elif buckets:
        first = min(max(ahead, sequences), most, sequences * FIRST_TOKENS)
        first = max(sequences, min(first, bucket_tokens(limits, sizes, first)))
    if buckets:
        # A prompt leaves less of the burst than a later chunk finds.
        first = largest(sequences, first, lambda tokens: _fits_bursts(buckets, sizes(tokens)))
    ahead = min(most, max(first, ahead, at_once))
    size_first = sizes(first)
    size_ahead = size_first if ahead == first else sizes(ahead)
    size_most = size_ahead if most == ahead else sizes(most)
    if not has_gpu_limit(limits):
        return Hold(size_first, size_ahead, size_most, may_be_cut)
    first_ms = wanted_gpu_ms(limits, 0)
    ahead_ms = max(first_ms, gpu_ms(ahead))
    return Hold(
        replace(size_first, gpu_ms=first_ms),
        replace(size_ahead, gpu_ms=ahead_ms),
        replace(size_most, gpu_ms=max(ahead_ms, gpu_ms(most))),
        may_be_cut,
    )


def _at_once(
    buckets: Sequence[Limit], sizes: Sizes, sequences: int, ahead: int, most: int, *, may_be_cut: bool
) -> int:
    """How much of a short answer may be held at once; 0: it goes by chunks.

    The worst case of a request that may not be cut is promised to it on every window: holding it keeps
    nothing from others. Of one that may be cut it is `ahead`, which windows hold anyway. Buckets promise
    nothing: of them it must be a modest share.
    """
    nothing = sizes(0) if buckets else None
    for tokens in (ahead,) if may_be_cut else (most, ahead):
        if tokens > SHORT_TOKENS * sequences:
            continue
        if nothing is None:
            return tokens
        size = sizes(tokens)
        if all(
            MODEST_SHARE * (size.of(limit.meter) - nothing.of(limit.meter)) <= limit.amount
            for limit in buckets
        ):
            return tokens
    return 0


def bucket_tokens(limits: Sequence[Limit], sizes: Sizes, tokens: int) -> int:
    """At most `tokens`, so many that they take no more than half of any burst, but at least 1: a bucket does
    not refill past its cap, so a stream that empties it in one go would run slower than the rate."""
    buckets = _hard_buckets(limits)
    if not buckets:
        return max(1, tokens)
    nothing = sizes(0)

    def fits(number: int) -> bool:
        size = sizes(number)
        return all(2 * (size.of(limit.meter) - nothing.of(limit.meter)) <= limit.amount for limit in buckets)

    return largest(1, max(1, tokens), fits)


def covered_tokens(covered: Amounts, sizes: Sizes, most: int) -> int:
    """How many of `most` output tokens `covered` is enough for."""

    def fits(tokens: int) -> bool:
        size = sizes(tokens)
        return (
            size.input_tokens <= covered.input_tokens
            and size.output_tokens <= covered.output_tokens
            and size.cost_nanousd <= covered.cost_nanousd
        )

    return largest(0, most, fits)


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number from `low` to `high` that fits, where a smaller one always fits better; `low` if
    none does."""
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


# ---------------------------------------------------------------- for whom


def share_out(covered: int, parts: Sequence[SequenceLease]) -> list[int]:
    """Every sequence's lease, so that together they emit at most `covered`. What an ended one did not use is
    the others'; those that live get equally far. A lease never shrinks, and never passes a `most`."""
    leases = [part.lease if part.is_live else part.emitted for part in parts]
    live = [index for index, part in enumerate(parts) if part.is_live]
    if not live:
        return leases
    kept = sum(part.emitted for part in parts if not part.is_live)
    room = covered - kept

    if room >= sum(parts[index].most for index in live):
        for index in live:
            leases[index] = parts[index].most
        return leases

    def at(level: int) -> list[int]:
        return [max(leases[index], min(parts[index].most, parts[index].emitted + level)) for index in live]

    level = largest(0, max(0, covered), lambda level: sum(at(level)) <= room)
    for index, lease in zip(live, at(level), strict=True):
        leases[index] = lease
    spare = room - sum(leases[index] for index in live)
    for index in live:
        if spare > 0 and leases[index] < parts[index].most and leases[index] <= parts[index].emitted + level:
            leases[index] += 1
            spare -= 1
    return leases


# ---------------------------------------------------------------- when, and how much more


def chunk_tokens(limits: Sequence[Limit], sizes: Sizes, live: int, tokens_per_s: float) -> int:
    """What a top-up covers for each of `live` sequences beyond what it has emitted; `tokens_per_s` is the
    pace of one."""
    wanted = max(FIRST_TOKENS, -int(-tokens_per_s * CHUNK_S // 1))
    return max(1, bucket_tokens(limits, sizes, wanted * live) // max(1, live))


def is_due(parts: Sequence[SequenceLease], chunk: int, tokens_per_s: float) -> bool:
    """Whether to ask now: a live sequence that may go on is close to the end of its lease. Never earlier
    than half a chunk before, or small chunks would be asked for all the time."""
    lead = _lead(chunk, tokens_per_s)
    return any(part.is_live and part.lease < part.most and part.left <= lead for part in parts)


def next_look(part: SequenceLease, chunk: int, tokens_per_s: float) -> int:
    """How many tokens the sequence has emitted when `is_due` is to be asked again, which says no now, or was
    just answered: halfway to where it would say yes at this pace, for the pace may rise."""
    if not part.is_live or part.lease >= part.most:
        return FOR_EVER
    slack = part.left - _lead(chunk, tokens_per_s)
    return part.emitted + max(1, -(-slack // 2))


def wanted_tokens(parts: Sequence[SequenceLease], chunk: int, predicted: int) -> tuple[int, int]:
    """What must be covered next, and what is wanted on windows; in all, since the request began.
    `predicted`: the output of all sequences, given what they have emitted."""
    first = sum(
        min(part.most, max(part.lease, part.emitted + chunk)) if part.is_live else part.emitted
        for part in parts
    )
    most = sum(part.most if part.is_live else part.emitted for part in parts)
    return first, min(most, max(first, predicted))


def wanted_gpu_ms(limits: Sequence[Limit], used_ms: int) -> int:
    """Device time that must be covered next, in all; 0 where no limit counts it."""
    if not has_gpu_limit(limits):
        return 0
    bursts = [limit.amount // 2 for limit in _hard_buckets(limits) if limit.meter is Meter.GPU_MS]
    return used_ms + max(1, min([GPU_CHUNK_MS, *bursts]))


def retry_in_s(denied: Denied, waited_s: float, hold_wait_s: float) -> float | None:
    """When to ask again after a refused top-up; None: the budget is spent.

    A rate shapes the stream: it goes on when the bucket has refilled, however long that takes. Other
    requests' holds on a window may be given back soon, so they are waited for, but not for ever.
    """
    after_s = denied.retry_after_s
    if after_s is None or denied.limit.is_bucket:
        return after_s
    return after_s if waited_s + after_s <= hold_wait_s else None


def predicted_gpu_ms(step: StepTime, width: int, input_tokens: int, output_tokens: int) -> int:
    """Device time of one sequence whose decode steps it shares with `width - 1` others; rounded up."""
    context = input_tokens * (input_tokens + 1) // 2
    context += output_tokens * input_tokens + output_tokens * (output_tokens + 1) // 2
    seconds = (
        step.base_s * (1 + output_tokens / max(1, width))
        + step.per_token_s * (input_tokens + output_tokens)
        + step.per_context_token_s * context
        + step.per_sequence_s * (1 + output_tokens)
    )
    return -int(-seconds * 1000 // 1)


def _lead(chunk: int, tokens_per_s: float) -> int:
    return min(-int(-tokens_per_s * LEAD_S // 1), chunk // 2)


def _hard_buckets(limits: Sequence[Limit]) -> list[Limit]:
    return [limit for limit in limits if limit.is_bucket and limit.mode is LimitMode.HARD]


def _fits_bursts(buckets: Sequence[Limit], size: Amounts) -> bool:
    return all(size.of(limit.meter) <= limit.amount for limit in buckets)
