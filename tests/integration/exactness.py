"""How is the engine's output compared with transformers' own `generate`?

The engine runs for real: `EngineCore` over a `TorchRunner`, a small block pool, small steps, requests that
arrive at random, leases that run dry, sequences that are taken out and put back in. All randomness is
seeded.

The rule: compare up to the first divergence. It is allowed only where the reference's two best logits lie
within `TIE_TOLERANCE` and the engine took one of these two (products of other batch sizes round
differently). Then the reference is forced onto the engine's token and goes on from there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.core import EngineConfig, EngineCore
from engine.messages import ModelInfo, Outcome, SamplingParams, Submit
from engine.model.runner import TorchRunner
from engine.step import Sampled, SequenceSlice

TIE_TOLERANCE = 1e-4
"""Of the two best logits, relative to the largest absolute logit of the row."""
GREEDY = SamplingParams(temperature=0.0)
MAX_STEPS = 5_000
GATEWAY = "gateway-under-test"


@dataclass(frozen=True)
class Job:
    """One greedy generation."""

    job_id: str
    tenant_id: str
    prompt: list[int]
    max_tokens: int


@dataclass
class Evidence:
    """What really happened during a run: a batching test that never batched must fail."""

    most_sequences: int = 0
    mixed_steps: int = 0
    chunked_prompts: set[str] = field(default_factory=set)
    preemptions: int = 0
    recomputed_tokens: int = 0
    pauses: int = 0
    moves_with_kv: int = 0

    @staticmethod
    def sum(parts: Sequence[Evidence]) -> Evidence:
        """All runs together."""
        return Evidence(
            most_sequences=max(part.most_sequences for part in parts),
            mixed_steps=sum(part.mixed_steps for part in parts),
            chunked_prompts=set().union(*(part.chunked_prompts for part in parts)),
            preemptions=sum(part.preemptions for part in parts),
            recomputed_tokens=sum(part.recomputed_tokens for part in parts),
            pauses=sum(part.pauses for part in parts),
            moves_with_kv=sum(part.moves_with_kv for part in parts),
        )


class WatchedRunner:
    """Hands every step to the real runner and notes what it consisted of."""

    def __init__(self, runner: TorchRunner, evidence: Evidence) -> None:
        self.info: ModelInfo = runner.info
        self.block_tokens = runner.block_tokens
        self.num_blocks = runner.num_blocks
        self.read_kv = runner.read_kv
        self.write_kv = runner.write_kv
        self.num_host_blocks = runner.num_host_blocks
        self.swap_block_s = runner.swap_block_s
        self.copy_out = runner.copy_out
        self.copy_in = runner.copy_in
        self._runner = runner
        self._evidence = evidence

    def execute(self, slices: Sequence[SequenceSlice]) -> list[Sampled | None]:
        evidence = self._evidence
        evidence.most_sequences = max(evidence.most_sequences, len(slices))
        decoding = [piece for piece in slices if piece.position >= piece.num_prompt_tokens]
        evidence.mixed_steps += 0 < len(decoding) < len(slices)
        for piece in slices:
            if piece.position + piece.num_tokens < piece.num_prompt_tokens:
                evidence.chunked_prompts.add(piece.sequence_id)
        return self._runner.execute(slices)


class NoText:
    """The text of models that have no tokenizer: none, and no stop strings."""

    stopped = False

    def open(self, prompt_token_ids: list[int], sampling: SamplingParams) -> NoText:
        return self

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def logprob_text(self, token_id: int) -> str:
        return ""


def run_engine(
    runner: TorchRunner, jobs: Sequence[Job], *, max_batched_tokens: int, max_sequences: int, seed: int
) -> tuple[dict[str, list[int]], Evidence]:
    """Tokens by job id, and what happened on the way. Arrivals, leases and moves follow `seed`."""
    generator = random.Random(seed)
    evidence = Evidence()
    clock = [0.0]
    config = EngineConfig(
        max_batched_tokens=max_batched_tokens, max_sequences=max_sequences, watermark_permille=0
    )
    core = EngineCore(WatchedRunner(runner, evidence), NoText(), config, lambda: clock[0])
    arriving = generator.sample(list(jobs), len(jobs))
    leases: dict[str, int] = {}
    emitted: dict[str, list[int]] = {job.job_id: [] for job in jobs}
    outcomes: dict[str, Outcome] = {}
    for _ in range(MAX_STEPS):
        clock[0] += 0.05
        for _ in range(generator.choice((0, 1, 2, 5))):
            if arriving:
                job = arriving.pop()
                # Half of the jobs get their lease in small pieces and pause whenever one is used up.
                leases[job.job_id] = generator.choice((job.max_tokens, generator.randint(1, 6)))
                assert core.submit(_submit(job, leases[job.job_id], generator), GATEWAY) is None
        for sequence in core.running():
            if generator.random() < 0.5 and sequence.state in ("paused", "preempted"):
                evidence.pauses += sequence.state == "paused"
                leases[sequence.sequence_id] += generator.randint(1, 9)
                core.top_up(sequence.sequence_id, leases[sequence.sequence_id])
            elif generator.random() < 0.01:
                state = core.export(sequence.sequence_id)
                assert state is not None
                evidence.moves_with_kv += bool(state.kv)
                assert core.import_(state) is None
        result = core.step()
        core.check()
        for delta in result.deltas.get(GATEWAY, []):
            tokens = emitted[delta.sequence_id]
            assert not delta.token_ids or delta.first_index == len(tokens), "a token was sent twice or lost"
            tokens += delta.token_ids
            if delta.outcome is not None:
                outcomes[delta.sequence_id] = delta.outcome
        if len(outcomes) == len(jobs):
            break
    assert len(outcomes) == len(jobs), "not every sequence ended"
    for job_id, outcome in outcomes.items():
        assert outcome.finish in ("stop", "length"), outcome
        assert outcome.emitted_tokens == len(emitted[job_id])
        evidence.preemptions += outcome.preemptions
        evidence.recomputed_tokens += outcome.recomputed_tokens
    return emitted, evidence


def _submit(job: Job, lease_tokens: int, generator: random.Random) -> Submit:
    return Submit(
        sequence_id=job.job_id,
        request_id=job.job_id,
        tenant_id=job.tenant_id,
        prompt_token_ids=job.prompt,
        max_tokens=job.max_tokens,
        lease_tokens=lease_tokens,
        sampling=GREEDY,
        tier=generator.choice((0, 1, 1, 2)),
        # Short predictions make the admission too hopeful, so that memory runs out and somebody gives way.
        predicted_output_tokens=generator.choice((1, 1, 4)),
    )


def generate(model: Any, prompt: list[int], max_tokens: int, eos_token_ids: list[int]) -> list[int]:
    """transformers' own greedy output for one prompt alone."""
    token_ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=eos_token_ids or None,
            pad_token_id=0,
        )
    generated: list[int] = output[0, len(prompt) :].tolist()
    return generated


class Reference:
    """The plain model, and its answers to jobs (computed once, compared with many runs)."""

    def __init__(self, model: Any, eos_token_ids: list[int]) -> None:
        self._model = model
        self._eos = eos_token_ids
        self._answers: dict[str, list[int]] = {}

    def answer(self, job: Job) -> list[int]:
        """`generate`'s tokens, the end-of-sequence token included."""
        if job.job_id not in self._answers:
            self._answers[job.job_id] = generate(self._model, job.prompt, job.max_tokens, self._eos)
        return self._answers[job.job_id]

    def divergences(self, job: Job, emitted: list[int]) -> int:
        """How often `emitted` leaves the reference at a tie. Raises AssertionError where it is no tie."""
        count = 0
        expected = self.answer(job)
        while emitted != expected:
            index = next(
                (i for i, pair in enumerate(zip(emitted, expected, strict=False)) if pair[0] != pair[1]), None
            )
            assert index is not None, f"{job.job_id}: {len(emitted)} tokens instead of {len(expected)}"
            self._assert_tie(job, emitted, index)
            count += 1
            forced = emitted[: index + 1]
            expected = list(forced)
            if forced[-1] not in self._eos and len(forced) < job.max_tokens:
                rest = job.max_tokens - len(forced)
                expected += generate(self._model, job.prompt + forced, rest, self._eos)
        return count

    def _assert_tie(self, job: Job, emitted: list[int], index: int) -> None:
        with torch.inference_mode():
            token_ids = torch.tensor([job.prompt + emitted[:index]])
            logits = self._model(input_ids=token_ids, use_cache=False).logits[0, -1]
        best = logits.topk(2)
        gap = float(best.values[0] - best.values[1]) / float(logits.abs().max())
        assert gap <= TIE_TOLERANCE, (
            f"{job.job_id}: token {index} differs, and the two best are {gap:.2g} apart"
        )
        assert emitted[index] in best.indices.tolist(), (
            f"{job.job_id}: token {index} is not one of the two best"
        )
