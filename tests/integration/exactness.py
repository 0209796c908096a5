"""Comparison of the engine's output with transformers' own `generate`, greedy or with seeded draws.

The engine runs for real: `EngineCore` over a `TorchRunner`, a small block pool, small steps, requests that
arrive at random, leases that run dry, sequences that are taken out and put back in. All randomness is
seeded.

The rule: compare up to the first divergence. It is allowed only where the reference's two best scores (of a
draw: logits plus noise) lie within `TIE_TOLERANCE` and the engine took one of these two (products of other
batch sizes round differently). Then the reference is forced onto the engine's token and goes on from there.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import ge
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec.structs import replace

from engine.core.core import EngineConfig, EngineCore
from engine.core.model_runner import StepOutput, StepWork
from engine.messages import ModelInfo, SamplingParams, SequenceOutcome, Submit
from engine.model.runner import LaunchedStep, TorchRunner
from engine.scheduling.options import PolicyOptions
from engine.sequence import Sequence as EngineSequence
from engine.sequence import SequenceStatus, stable_seed
from tests.support.plain_sampler import noisy

TIE_TOLERANCE = 1e-4
"""Of the two best scores, relative to the largest absolute logit of the row."""
GREEDY = SamplingParams(temperature=0.0)
SAMPLED = (
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_p=0.9, frequency_penalty=0.4),
    SamplingParams(top_k=20, min_p=0.02, repetition_penalty=1.2, logit_bias={7: 2.0}),
)
MAX_DIVERGENT_SHARE = 0.001
"""Of all tokens; such a divergence is a tie that was rounded the other way."""
MAX_STEPS = 5_000
GATEWAY = "gateway-under-test"


@dataclass(frozen=True)
class Job:
    """One generation."""

    job_id: str
    tenant_id: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = GREEDY

    def submit(self, **options: Any) -> Submit:
        return Submit(
            sequence_id=self.job_id,
            request_id=self.job_id,
            tenant_id=self.tenant_id,
            prompt_token_ids=self.prompt,
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            **options,
        )

    def scores(self, logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        """The scores whose greatest is the token after `output`, in units of the logits."""
        seed = stable_seed(self.submit(lease_tokens=1))
        return torch.from_numpy(noisy(logits.numpy(), self.sampling, seed, self.prompt, output))


@dataclass(frozen=True)
class Run:
    """How the engine is set up and disturbed while it runs the jobs; everything random follows `seed`."""

    max_batched_tokens: int
    max_sequences: int
    seed: int = 1
    policy: str = "vtc"
    num_blocks: int | None = None
    """None: all that the runner has."""
    num_host_blocks: int = 0
    """Of those that the runner has."""
    prefix_caching: bool = True
    burst: int = 5
    """At most so many jobs arrive between two steps."""
    lease_share: float = 0.5
    """Of the jobs get their lease in small pieces, and pause whenever one is used up."""
    move_share: float = 0.01
    """Of the live sequences are exported and imported again between two steps."""
    tiers: tuple[int, ...] = (0, 1, 1, 2)
    steps_ahead: int | None = None
    """None: as suits the runner's device."""
    predicted: tuple[int, ...] = (1, 1, 4)
    """Too short ones make the admission too hopeful, so that memory runs out and a sequence is preempted."""


PATHS = (
    "batched",
    "mixed steps",
    "chunked",
    "paused",
    "displaced",
    "swapped out",
    "swapped in",
    "recomputed",
    "prefix hit",
    "adopted",
    "deferred",
    "evicted from the cache",
    "moved with kv",
    "moved from host memory",
    "moved without kv",
    "overtook",
)
"""What can happen to a sequence. A run counts how often: a swapping test that never swapped has to fail."""


class WatchedRunner:
    """Hands every step to the real runner, and notes what it consisted of."""

    def __init__(self, runner: TorchRunner, run: Run, met: Counter[str]) -> None:
        self.info: ModelInfo = runner.info
        self.block_tokens = runner.block_tokens
        self.num_blocks = run.num_blocks or runner.num_blocks
        self.num_host_blocks = run.num_host_blocks
        self.num_rows = runner.num_rows
        self.steps_ahead = runner.steps_ahead
        self.graph_sizes, self.mixed_sizes = runner.graph_sizes, runner.mixed_sizes
        assert self.num_blocks <= runner.num_blocks
        assert self.num_host_blocks <= runner.num_host_blocks
        self.read_kv = runner.read_kv
        self.read_host_kv = runner.read_host_kv
        self.write_kv = runner.write_kv
        # What was measured here would make the choice between swapping and computing again the machine's.
        self.swap_base_s = self.swap_block_s = 0.0
        self.copy_out = runner.copy_out
        self.copy_in = runner.copy_in
        self.choose = runner.choose
        self.collect: Callable[[LaunchedStep], StepOutput] = runner.collect
        self._runner = runner
        self._met = met
        self._prompt_tokens = [0] * runner.num_rows

    def launch(self, work: StepWork) -> LaunchedStep:
        for start in work.starts:
            self._prompt_tokens[start.row] = start.num_prompt_tokens
        prompts = [self._prompt_tokens[row] for row in work.rows]
        decoding = sum(map(ge, work.positions, prompts))
        met = self._met
        met["batched"] += len(work) >= 4
        met["mixed steps"] += 0 < decoding < len(work)
        met["chunked"] += sum(
            position + tokens < prompt
            for position, tokens, prompt in zip(work.positions, work.num_tokens, prompts, strict=True)
        )
        return self._runner.launch(work)


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


def random_jobs(
    count: int, *, seed: int, most_tokens: int, prompt_tokens: Sequence[int] = (1, 2, 9, 23, 40, 61)
) -> list[Job]:
    """Of three tenants. Most prompts begin as others of their tenant do; every second job is sampled."""
    generator = random.Random(seed)

    def some(tokens: int) -> list[int]:
        return [generator.randrange(3, 500) for _ in range(tokens)]

    stems = [some(28) for _ in range(3)]
    jobs = []
    for number in range(count):
        prompt = some(generator.choice(prompt_tokens))
        if generator.random() < 0.7:
            prompt = stems[number % 3][: generator.choice((9, 20, 28))] + prompt[:20]
        tenant, most = f"tenant-{number % 3}", generator.randint(4, most_tokens)
        sampling = replace(SAMPLED[number // 2 % len(SAMPLED)], seed=number) if number % 2 else GREEDY
        jobs.append(Job(f"job-{number}", tenant, prompt, most, sampling))
    return jobs


def plain_model(model_dir: Path) -> Any:
    """transformers' own, with its own attention."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def compare(
    reference: Reference, runner: TorchRunner, jobs: Sequence[Job], runs: Sequence[Run]
) -> Counter[str]:
    """Asserts that every run's output is the reference's; returns what happened in all of them together."""
    tokens = divergences = 0
    total: Counter[str] = Counter()
    for run in runs:
        emitted, met = run_engine(runner, jobs, run)
        total = Counter({path: total[path] + met[path] for path in PATHS})
        for job in jobs:
            divergences += reference.divergences(job, emitted[job.job_id])
            tokens += len(emitted[job.job_id])
    assert divergences <= tokens * MAX_DIVERGENT_SHARE, f"{divergences} divergences in {tokens} tokens"
    return total


def run_engine(
    runner: TorchRunner, jobs: Sequence[Job], run: Run
) -> tuple[dict[str, list[int]], Counter[str]]:
    """Tokens by job id, and how often each of `PATHS` was taken."""
    generator = random.Random(run.seed)
    met: Counter[str] = Counter()
    clock = [0.0]
    config = EngineConfig(
        policy=run.policy,
        max_batched_tokens=run.max_batched_tokens,
        max_sequences=run.max_sequences,
        watermark_permille=0,
        prefix_caching=run.prefix_caching,
        steps_ahead=run.steps_ahead,
        policy_options=PolicyOptions(paused_keep_s=0.3),
    )
    core = EngineCore(WatchedRunner(runner, run, met), NoText(), config, lambda: clock[0])
    arriving = generator.sample(list(jobs), len(jobs))
    leases: dict[str, int] = {}
    emitted: dict[str, list[int]] = {job.job_id: [] for job in jobs}
    outcomes: dict[str, SequenceOutcome] = {}
    for _ in range(MAX_STEPS):
        clock[0] += 0.05
        for _ in range(min(len(arriving), generator.randint(0, run.burst))):
            job = arriving.pop()
            in_pieces = generator.random() < run.lease_share
            leases[job.job_id] = generator.randint(1, 6) if in_pieces else job.max_tokens
            submit = job.submit(
                lease_tokens=leases[job.job_id],
                tier=generator.choice(run.tiers),
                predicted_output_tokens=generator.choice(run.predicted),
                deadline_in_s=generator.choice((None, 0.5, 5.0)),
            )
            assert core.submit(submit, GATEWAY) is None
        for sequence in list(core.table.sequences.values()):
            if not sequence.may_emit and generator.random() < 0.5:
                met["paused"] += sequence.state is SequenceStatus.PAUSED
                leases[sequence.sequence_id] += generator.randint(1, 9)
                core.top_up(sequence.sequence_id, leases[sequence.sequence_id])
            elif generator.random() < run.move_share:
                _move(core, sequence, met)
        waiting = {entry.entry_id for entry in core.table.waiting.entries()}
        result = core.step()
        core.check()
        _note_decisions(core, waiting, met)
        for delta in result.deltas.get(GATEWAY, []):
            tokens = emitted[delta.sequence_id]
            assert not delta.token_ids or delta.first_index == len(tokens), "a token was sent twice or lost"
            tokens += delta.token_ids
            if delta.outcome is not None:
                outcomes[delta.sequence_id] = delta.outcome
        if len(outcomes) == len(jobs) and not core.steps_in_flight:
            break
    assert len(outcomes) == len(jobs), "not every sequence ended"
    for job_id, outcome in outcomes.items():
        assert outcome.finish in ("stop", "length"), outcome
        assert outcome.emitted_tokens == len(emitted[job_id])
        met["recomputed"] += outcome.recomputed_tokens
    counts = core.table.pool.counts
    met["swapped out"], met["swapped in"] = counts.swapped_out_blocks, counts.swapped_in_blocks
    met["prefix hit"], met["adopted"] = counts.hit_tokens, counts.adopted_tokens
    met["deferred"], met["evicted from the cache"] = counts.deferrals, counts.evicted_blocks
    return emitted, met


def _move(core: EngineCore, sequence: EngineSequence, met: Counter[str]) -> None:
    """Out and in again."""
    is_swapped = sequence.state is SequenceStatus.SWAPPED
    state = core.export(sequence.sequence_id)
    assert state is not None
    path = "without kv" if not state.kv else "from host memory" if is_swapped else "with kv"
    met[f"moved {path}"] += state.kv_tokens > 0
    assert core.import_(state) is None


def _note_decisions(core: EngineCore, waiting: set[str], met: Counter[str]) -> None:
    """Who gave way in the last step, and who started though one of its tier that came earlier waited on."""
    table = core.table
    left = [table.sequences[name] for name in waiting if name in table.waiting]
    for note in table.decisions.last():
        if note.step != table.decisions.step:
            continue
        met["displaced"] += note.kind in ("pause", "suspend")
        started = table.sequences.get(note.sequence_id)
        if note.kind == "admit" and started is not None:
            met["overtook"] += any(
                each.tier == started.tier and each.submitted_s < started.submitted_s for each in left
            )


def generate(model: Any, job: Job, forced: list[int], eos_token_ids: list[int]) -> list[int]:
    """transformers' own output for one job alone, whose first tokens are `forced`."""
    token_ids = torch.tensor([job.prompt + forced])

    def choose(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return job.scores(logits[0], ids[0, len(job.prompt) :].tolist())[None]

    with torch.inference_mode():
        output = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            do_sample=False,
            max_new_tokens=job.max_tokens - len(forced),
            eos_token_id=eos_token_ids or None,
            pad_token_id=0,
            logits_processor=[] if job.sampling == GREEDY else [choose],
        )
    generated: list[int] = output[0, len(job.prompt) :].tolist()
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
            self._answers[job.job_id] = generate(self._model, job, [], self._eos)
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
            is_over = forced[-1] in self._eos or len(forced) == job.max_tokens
            expected = forced if is_over else generate(self._model, job, forced, self._eos)
        return count

    def _assert_tie(self, job: Job, emitted: list[int], index: int) -> None:
        with torch.inference_mode():
            token_ids = torch.tensor([job.prompt + emitted[:index]])
            logits = self._model(input_ids=token_ids, use_cache=False).logits[0, -1]
        best = job.scores(logits, emitted[:index]).topk(2)
        gap = float(best.values[0] - best.values[1]) / float(logits.abs().max())
        assert gap <= TIE_TOLERANCE, (
            f"{job.job_id}: token {index} differs, and the two best are {gap:.2g} apart"
        )
        assert emitted[index] in best.indices.tolist(), (
            f"{job.job_id}: token {index} is not one of the two best"
        )
