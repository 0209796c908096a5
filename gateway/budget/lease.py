"""Lease sizes: the first hold, top-ups, and their division among sequences. Pure.

A request holds what it probably needs: the prompt, and a quantile of the predicted output on windows or a
small first chunk on token buckets. A short answer is held whole where that keeps nothing from others. It asks
for more before its lease runs out; no uncovered token is emitted. Tokens are output tokens of all sequences
unless a name says otherwise; the caller's monotone `sizes` maps them to amounts on limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from engine.messages import StepTime
from tenants.quota.rules import is_platforms
from tenants.quota.store import Denied, Hold
from tenants.types import TOKEN_METERS, Amounts, Limit, LimitMode, Meter

Sizes = Callable[[int], Amounts]
"""Amounts of the prompt and a number of output tokens, all sequences together."""

FIRST_TOKENS = 16
"""Least tokens covered per sequence at the start, where no bucket is smaller."""
SHORT_TOKENS = 512
"""Per sequence: a longer answer tops up instead, which records its progress in case of a crash."""
MODEST_SHARE = 64
"""A first hold is modest if this many fit into the burst; a larger one would block others there."""
CHUNK_S = 1.0
"""Least seconds of decoding that a top-up covers, where no bucket is smaller."""
LEAD_S = 0.25
"""Seconds before the lease ends at which a top-up is due: many times a normal round trip."""
GPU_CHUNK_MS = 250
"""Least device time that a top-up covers, where no bucket is smaller."""
FOR_EVER = 2**53
_OUTPUT_METERS = (Meter.TOTAL_TOKENS, Meter.OUTPUT_TOKENS, Meter.COST_NANOUSD, Meter.GPU_MS)


class SequenceLease(msgspec.Struct, frozen=True):
    """One sequence's part of a request's lease."""

    emitted: int
    lease: int
    """Tokens that it may emit in total."""
    most: int
    is_live: bool = True

    @property
    def left(self) -> int:
        return self.lease - self.emitted


# ---------------------------------------------------------------- the first hold


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
    kept: int = 0,
) -> Hold:
    """The hold that a request asks for when it starts. `ahead`: its predicted output; `most`: the most it can
    emit; `gpu_ms`: predicted device time by output tokens; `kept`: of each sequence, see `Leases`. Where no
    limit counts output, all of it is held: this takes nothing from others and saves top-ups."""
    buckets = _hard_buckets(limits)
    if not any(limit.meter in _OUTPUT_METERS for limit in limits):
        ahead = most
    ahead = min(max(ahead, sequences * (kept + 1)), most)
    whole_tokens = _whole_tokens(buckets, sizes, sequences, ahead, most, may_be_cut=may_be_cut)
    # Windows hold `ahead` as far as there is room; `first` matters on buckets only.
    first = least = min(sequences, most)  # 0 of what emits nothing
    if buckets and whole_tokens:
        first = max(least, whole_tokens)
    elif buckets and most:
        first = min(max(ahead, least), most, sequences * max(FIRST_TOKENS, kept + 1))
        first = max(least, min(first, bucket_tokens(limits, sizes, first)))
    if buckets:
        # The prompt takes part of the burst, so less is left than for a later chunk.
        first = largest(least, first, lambda tokens: _fits_bursts(buckets, sizes(tokens)))
    ahead = min(most, max(first, ahead, whole_tokens))
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


def _whole_tokens(
    buckets: Sequence[Limit], sizes: Sizes, sequences: int, ahead: int, most: int, *, may_be_cut: bool
) -> int:
    """Tokens of a short answer that may be held from the start; 0: hold by chunks. What windows promise (the
    worst case, unless it may be cut) or hold anyway (`ahead`) takes nothing from others; of a bucket it must
    be a modest share."""
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
    """At most `tokens` and half of any burst, but at least 1: a bucket does not refill past its cap."""
    buckets = _hard_buckets(limits)
    if not buckets:
        return max(1, tokens)
    nothing = sizes(0)

    def fits(number: int) -> bool:
        size = sizes(number)
        return all(2 * (size.of(limit.meter) - nothing.of(limit.meter)) <= limit.amount for limit in buckets)

    return largest(1, max(1, tokens), fits)


def kept_tokens(limits: Sequence[Limit], sizes: Sizes, sequences: int, kept: int) -> int:
    """`kept`, or 0 where some burst cannot hold it beside the tokens that come: of each sequence."""
    tokens = sequences * (kept + 1)
    return kept if not kept or bucket_tokens(limits, sizes, tokens) == tokens else 0


def covered_tokens(covered: Amounts, sizes: Sizes, most: int) -> int:

    def fits(tokens: int) -> bool:
        size = sizes(tokens)
        return (
            size.input_tokens <= covered.input_tokens
            and size.output_tokens <= covered.output_tokens
            and size.cost_nanousd <= covered.cost_nanousd
        )

    return largest(0, most, fits)


def fitting_max_tokens(denied: Denied, sizes: Sizes, sequences: int, most: int) -> int | None:
    """Longest answer per sequence that every window has room for; None: another limit is in the way."""
    if denied.limit.window is None or denied.limit.meter not in (*TOKEN_METERS, Meter.COST_NANOUSD):
        return None
    left: list[tuple[Meter, int]] = [
        (state.limit.meter, state.available)
        for state in denied.states
        if state.limit.window is not None
        and state.limit.mode is LimitMode.HARD
        and state.limit.meter is not Meter.GPU_MS
        and not is_platforms(state.limit)  # of these a tenant reads no numbers
    ]
    left.append((denied.limit.meter, denied.available))

    def fits(tokens: int) -> bool:
        size = sizes(tokens * sequences)
        return all(size.of(meter) <= available for meter, available in left)

    return largest(0, most, fits)


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number in [`low`, `high`] that fits (`fits` is monotone); `low` if none does."""
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


# ---------------------------------------------------------------- division among sequences


def share_out(covered: int, parts: Sequence[SequenceLease]) -> list[int]:
    """Leases that together emit at most `covered`; live ones get equally far, and none shrinks."""
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


# ---------------------------------------------------------------- top-ups


def chunk_tokens(limits: Sequence[Limit], sizes: Sizes, live: int, tokens_per_s: float) -> int:
    """Tokens that a top-up covers for each live sequence beyond those emitted; `tokens_per_s`: of one."""
    wanted = max(FIRST_TOKENS, -int(-tokens_per_s * CHUNK_S // 1))
    return max(1, bucket_tokens(limits, sizes, wanted * live) // max(1, live))


def is_due(parts: Sequence[SequenceLease], chunk: int, tokens_per_s: float) -> bool:
    """Whether a sequence nears its lease's end: half a chunk early at most, or small ones were always due."""
    lead = _lead(chunk, tokens_per_s)
    return any(part.is_live and part.lease < part.most and part.left <= lead for part in parts)


def next_look(part: SequenceLease, chunk: int, tokens_per_s: float) -> int:
    """Emitted tokens at which to check `is_due` again: halfway to its due point, as the pace may rise."""
    if not part.is_live or part.lease >= part.most:
        return FOR_EVER
    slack = part.left - _lead(chunk, tokens_per_s)
    return part.emitted + max(1, -(-slack // 2))


def wanted_tokens(parts: Sequence[SequenceLease], chunk: int, predicted: int) -> tuple[int, int]:
    """Totals to cover next, and wanted on windows. `predicted`: whole output, given what is emitted."""
    first = sum(
        min(part.most, max(part.lease, part.emitted + chunk)) if part.is_live else part.emitted
        for part in parts
    )
    most = sum(part.most if part.is_live else part.emitted for part in parts)
    return first, min(most, max(first, predicted))


def wanted_gpu_ms(limits: Sequence[Limit], used_ms: int) -> int:
    """Device time to cover next, in total; 0 where no limit counts it."""
    if not has_gpu_limit(limits):
        return 0
    bursts = [limit.amount // 2 for limit in _hard_buckets(limits) if limit.meter is Meter.GPU_MS]
    return used_ms + max(1, min([GPU_CHUNK_MS, *bursts]))


def retry_in_s(denied: Denied, waited_s: float, hold_wait_s: float) -> float | None:
    """When to repeat a refused top-up; None: the budget is spent. A bucket is waited for until it has
    refilled, other requests' holds on a window up to `hold_wait_s`."""
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
