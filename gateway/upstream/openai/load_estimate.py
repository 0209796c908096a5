"""Estimated snapshot of another server's load, in our own engine's form, from its observed pace."""

from __future__ import annotations

from collections.abc import Collection

from engine.messages import Ready, RunningSequence, Snapshot
from engine.step_time.model import StepTimeModel
from gateway.statistics import LEARNED_PER_S, EvenSample
from gateway.upstream.openai.sequence import OpenAISequence

SNAPSHOT_EVERY_S = 0.05
"""As our own engine's."""


class LoadEstimate:
    """One server."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._pace = StepTimeModel(keeps_mean=False)
        self._learned = EvenSample(LEARNED_PER_S)
        self._snapshot: Snapshot | None = None
        self._snapshot_s = float("-inf")

    def learn(self, sequence: OpenAISequence, beside: int) -> None:
        """Learns prefill and decode time from a sequence that ended beside `beside` others."""
        if sequence.first_token_s is None or sequence.last_token_s is None:
            return
        if not self._learned.takes(sequence.last_token_s):
            return
        prompt_tokens = len(sequence.submit.prompt_token_ids)
        width = beside + 1
        first_s = sequence.first_token_s - sequence.started_s
        count = sequence.answer.count
        if sequence.answer.is_whole:
            # The prefill counts as a step like the others: where it ended is not known.
            self._pace.observe(width, width * prompt_tokens, width, first_s / max(1, count.tokens))
            return
        self._pace.observe(prompt_tokens, prompt_tokens * (prompt_tokens + 1) // 2, 1, first_s)
        if count.chunks > 1:
            gap_s = (sequence.last_token_s - sequence.first_token_s) / (count.chunks - 1)
            self._pace.observe(width, width * prompt_tokens, width, gap_s)

    def snapshot(self, ready: Ready, sequences: Collection[OpenAISequence], now_s: float) -> Snapshot:
        if self._snapshot is not None and now_s - self._snapshot_s < SNAPSHOT_EVERY_S:
            return self._snapshot
        self._snapshot_s = now_s
        self._snapshot = Snapshot(
            engine_id=self._replica_id,
            step=0,
            at_s=now_s,
            running=[running(sequence) for sequence in sequences],
            waiting=[],
            free_blocks=ready.num_blocks,
            cached_blocks=0,
            referenced_blocks=0,
            num_blocks=ready.num_blocks,
            step_time=self._pace.to_message(),
        )
        return self._snapshot


def running(sequence: OpenAISequence) -> RunningSequence:
    """A whole answer's progress is unknown before its end: it counts as not begun."""
    submit = sequence.submit
    emitted = sequence.emitted_tokens
    prompt_tokens = len(submit.prompt_token_ids)
    return RunningSequence(
        sequence_id=submit.sequence_id,
        request_id=submit.request_id,
        tenant_id=submit.tenant_id,
        tier=submit.tier,
        state="running",
        prompt_tokens=prompt_tokens,
        computed_tokens=prompt_tokens + max(0, emitted - 1) if emitted else 0,
        emitted_tokens=emitted,
        max_tokens=submit.max_tokens,
        predicted_output_tokens=submit.predicted_output_tokens,
    )
