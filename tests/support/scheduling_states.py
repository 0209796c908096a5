"""Sequences, rooms and batches in states that a scheduler can bring about, for tests of single decisions."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

from engine.messages import StepTime, Submit
from engine.scheduling.admit.base import Batch
from engine.scheduling.room import Room
from engine.scheduling.step_counters import StepCounters
from engine.sequence import Sequence, SequenceStatus
from engine.sizes import blocks_for
from engine.step_time.model import PRIOR


def make_sequence(
    name: str,
    *,
    tenant: str = "t",
    prompt: int = 4,
    computed: int = 0,
    output: int = 0,
    tier: int = 1,
    weight: float = 1.0,
    predicted: int = 20,
    high: int = 0,
    max_tokens: int = 40,
    submitted_s: float = 0.0,
    ttft_target_s: float = 0.0,
    tpot_target_s: float = 0.0,
) -> Sequence:
    """One with `output` tokens emitted and `computed` tokens in the cache."""
    submit = Submit(
        sequence_id=name, request_id=name, tenant_id=tenant, prompt_token_ids=[1] * prompt,
        max_tokens=max_tokens, lease_tokens=max_tokens, tier=tier, weight=weight,
        predicted_output_tokens=predicted, predicted_high_tokens=high, ttft_target_s=ttft_target_s,
        tpot_target_s=tpot_target_s,
    )  # fmt: skip
    made = Sequence.of(submit, "g", submitted_s)
    made.token_ids += [2] * output
    made.computed_tokens = made.ever_computed_tokens = computed
    return made


def decoding(name: str, *, output: int = 1, prompt: int = 4, **changes: object) -> Sequence:
    """One that waits for its next token."""
    return make_sequence(name, prompt=prompt, computed=prompt + output - 1, output=output, **changes)  # type: ignore[arg-type]


def make_room(
    tokens: int,
    *,
    now_s: float = 0.0,
    num_waiting: int = 0,
    context_tokens: int = 4096,
    step_time: StepTime = PRIOR,
    counters: StepCounters | None = None,
    step: int = 0,
) -> Room:
    """An empty step of up to `tokens`."""
    return Room(
        now_s=now_s,
        tokens=tokens,
        counters=StepCounters() if counters is None else counters,
        step=step,
        step_time=step_time,
        context_tokens=context_tokens,
        num_waiting=num_waiting,
    )


def make_batch(
    running: SequenceOf[Sequence],
    *,
    now_s: float = 0.0,
    num_waiting: int = 1,
    max_sequences: int = 64,
    block_tokens: int = 16,
    num_blocks: int = 4096,
) -> Batch:
    """What a candidate would join; the running ones hold the blocks that their tables name."""
    return Batch(
        now_s=now_s,
        running=running,
        num_waiting=num_waiting,
        max_sequences=max_sequences,
        block_tokens=block_tokens,
        num_blocks=num_blocks,
        free_blocks=num_blocks - sum(len(sequence.block_table) for sequence in running),
        step_time=PRIOR,
    )


def start(sequence: Sequence, block_tokens: int = 16) -> Sequence:
    """As if it had been admitted: it runs, and has the blocks of its known tokens."""
    sequence.state = SequenceStatus.RUNNING
    sequence.block_table = [0] * blocks_for(sequence.total_tokens, block_tokens)
    return sequence


def random_sequence(rng: random.Random, name: str, *, longest: int = 3000, now_s: float = 0.0) -> Sequence:
    """Waiting, unfinished or decoding."""
    prompt = min(longest, max(1, round(rng.lognormvariate(4.5, 1.3))))
    max_tokens = rng.randint(1, 200)
    output = rng.randint(0, max_tokens - 1) if rng.random() < 0.6 else 0
    if output:
        # Most decode; some lost their cache and compute all of it again.
        computed = prompt + output - 1 if rng.random() < 0.8 else rng.randint(0, prompt + output - 1)
    else:
        computed = rng.randint(0, prompt - 1)
    return make_sequence(
        name, tenant=rng.choice("abcd"), prompt=prompt, computed=computed, output=output,
        tier=rng.choice((0, 1, 1, 1, 2)), weight=rng.choice((0.5, 1.0, 1.0, 3.0)),
        predicted=rng.randint(1, 200), high=rng.choice((0, 150, 400)), max_tokens=max_tokens,
        submitted_s=now_s - rng.random() * 3, ttft_target_s=rng.choice((0.0, 0.2, 2.0)),
        tpot_target_s=rng.choice((0.0, 0.01, 0.5)),
    )  # fmt: skip


def execute(sequence: Sequence, tokens: int) -> None:
    """Its share was computed; a token is emitted when it has caught up."""
    sequence.computed_tokens += tokens
    sequence.ever_computed_tokens = max(sequence.ever_computed_tokens, sequence.computed_tokens)
    if sequence.computed_tokens == sequence.total_tokens:
        sequence.token_ids.append(2)


def is_through(sequence: Sequence) -> bool:
    """Its answer is complete."""
    return sequence.emitted_tokens >= sequence.submit.max_tokens


def names(shares: list[tuple[Sequence, int]]) -> list[tuple[str, int]]:
    """Sequence ids with their tokens."""
    return [(each.sequence_id, tokens) for each, tokens in shares]


def taken(room: Room, shares: list[tuple[Sequence, int]]) -> Room:
    """The room after the shares were taken."""
    for sequence, tokens in shares:
        room.take(sequence, tokens)
    return room
