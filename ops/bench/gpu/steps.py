"""Sections of the GPU's benchmark about models: decode steps, the mixed workload, where their time goes."""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import transformers
from transformers.generation.continuous_batching.utils import WorkloadHints

from engine.core.core import EngineConfig, EngineCore
from engine.core.first_steps import timed_steps
from engine.core.model_runner import RowStart, StepWork
from engine.messages import SamplingParams, Submit
from engine.model.attention import ATTENTION_NAME
from engine.model.device import prepare
from engine.model.loader import prepared
from engine.model.runner import TorchRunner
from engine.sizes import blocks_for, padded
from engine.virtual.replica import VirtualTexts
from ops.bench.gpu.section import NEEDS_CARD, Section

SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
}
COMMON = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 300,
        "num_attention_heads": 3, "num_key_value_heads": 1}  # fmt: skip
HOST_S = {1: 0.1e-3, 32: 0.4e-3, 128: 1.5e-3}
"""By sequences: how long the host works between two steps, about what the core takes for them."""
MOST_TOKENS, MOST_SEQUENCES, CONTEXT, BLOCK, THEIR_BLOCK = 2048, 128, 1000, 64, 256
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
Load = list[tuple[list[int], int]]
"""Prompts and output lengths."""


class Subject(NamedTuple):
    """A model with random weights, and its runner; by sequences, seconds of a decode step that reads weights
    and KV once, and of one where none was captured."""

    model: Any
    runner: TorchRunner
    core: Callable[[], EngineCore]
    load: Load
    floor_s: dict[int, float]
    eager_s: dict[int, float]


def _subject(section: Section, shape: str) -> Subject:
    """The model of a shape, made on the device and captured; once."""
    if shape in section.kept:
        return cast(Subject, section.kept[shape])
    prepare(section.device)
    wide, is_tied, drawn = section.has_card, shape == "1B", random.Random(7)
    sizes, dtype = (COMMON | SHAPES[shape], torch.bfloat16) if wide else (TINY, torch.float32)
    rows, prompts, outputs = (MOST_SEQUENCES, (64, 1024), (64, 256)) if wide else (3, (8, 40), (4, 9))
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=is_tied, max_position_embeddings=2048)
    torch.manual_seed(0)
    with section.device:
        made = transformers.AutoModelForCausalLM.from_config
        model = made(config, dtype=dtype, attn_implementation=ATTENTION_NAME).eval()
    loaded = prepared(model, shape, check_block_tokens=BLOCK, **section.loading)
    runner_of = partial(
        loaded.runner, num_blocks=rows * blocks_for(CONTEXT + 200, BLOCK), block_tokens=BLOCK, num_rows=rows,
        queues=section.queues,
    )  # fmt: skip
    eager = runner_of()
    eager_s = {batch: _step_s(section, eager, batch)[0] for batch in (HOST_S if wide else (1, rows))}
    del eager
    began_s, runner = time.perf_counter(), runner_of()
    lines = [*map(str, loaded.path_reports), *map(str, runner.capture(MOST_TOKENS if wide else BLOCK))]
    section.note(shape, {"by": lines, "captured, s": time.perf_counter() - began_s})
    parts = (VirtualTexts(), EngineConfig(max_batched_tokens=MOST_TOKENS, max_sequences=rows), time.monotonic)
    core = partial(EngineCore, runner, *parts, step_time=timed_steps(runner, *parts))
    lengths = [(drawn.randint(*prompts), drawn.randint(*outputs)) for _ in range(rows)]
    load = [(drawn.choices(range(10, sizes["vocab_size"]), k=prompt), output) for prompt, output in lengths]
    read = sum(part.nbytes for part in model.parameters())
    read -= 0 if is_tied else model.get_input_embeddings().weight.nbytes  # of which a step reads rows alone
    copy = section.copy_bytes_per_s()
    floor_s = {batch: (read + batch * CONTEXT * loaded.token_bytes) / copy for batch in eager_s}
    section.kept[shape] = subject = Subject(model, runner, core, load, floor_s, eager_s)
    return subject


def decode(section: Section) -> None:
    """Decode steps: eager, with graphs, one step ahead beside the host's work; and what the memory allows."""
    for shape in SHAPES:
        subject = _subject(section, shape)
        for batch, floor_s in subject.floor_s.items():
            step_s = partial(_step_s, section, subject.runner, batch)
            host_s = HOST_S[batch] if section.has_card else 0.0
            (graphs_s, device_s), ahead_s = step_s(), step_s(host_s=host_s, ahead=1)[0]
            taken = {
                "floor": floor_s, "eager": subject.eager_s[batch], "with graphs": graphs_s,
                "of the device": device_s, "and host's work": step_s(host_s=host_s)[0],
                "one step ahead": step_s(ahead=1)[0], "one step ahead, host's work": ahead_s,
            }  # fmt: skip
            figures = {f"{name}, ms": round(1e3 * passed_s, 3) for name, passed_s in taken.items()}
            section.note(f"{shape}, {batch} sequences", figures | {"of the floor": ahead_s / floor_s})
    if not section.has_card:
        section.note("graphs", NEEDS_CARD)


def _step_s(
    section: Section, runner: TorchRunner, batch: int, *, host_s: float = 0.0, ahead: int = 0
) -> tuple[float, float]:
    """Seconds that pass in a decode step, and in which the device computes. Up to `ahead` steps are launched
    before one is collected; then the host works for `host_s`."""
    flights, device_s, began_s = deque[Any](), list[float](), 0.0
    warm, steps = (5, 65) if section.has_card else (1, 3)
    rows, blocks = list(range(batch)), blocks_for(CONTEXT + steps, BLOCK)
    places = iter(random.Random(3).sample(range(runner.num_blocks), batch * blocks))
    prompt = [7] * (CONTEXT + 1)
    for step in range(steps):
        work = StepWork(rows, [CONTEXT + step] * batch, [1] * batch, [True] * batch, [[]] * batch)
        if step == 0:
            work.starts = [RowStart(row, str(row), CONTEXT, CONTEXT, prompt, GREEDY, row) for row in rows]
            work.blocks = [(row, index, next(places)) for row in rows for index in range(blocks)]
            work.token_ids = [[10 + row] for row in rows]
        if step == warm:
            began_s = time.perf_counter()
        flights.append(runner.launch(work))
        while len(flights) > (ahead if step < steps - 1 else 0):
            device_s.append(runner.collect(flights.popleft()).device_s or 0.0)
            until_s = time.perf_counter() + host_s
            while time.perf_counter() < until_s:
                pass
    return (time.perf_counter() - began_s) / (steps - warm), sorted(device_s)[len(device_s) // 2]


def mixed(section: Section) -> None:
    """The mixed workload, all at once and in process, through our core and transformers in turn."""
    for shape in SHAPES:
        subject, ratios = _subject(section, shape), list[float]()
        _ours(subject, subject.load[:8])
        for turn in range(1, 3 if section.has_card else 2):
            section.note(f"{shape}, ours {turn}", ours := _ours(subject, subject.load))
            section.note(f"{shape}, transformers {turn}", theirs := _theirs(section, subject))
            ratios.append(ours["tokens/s"] / theirs["tokens/s"])
            section.note(f"{shape}, ratio", {"least": min(ratios), "most": max(ratios)})


def _ours(subject: Subject, load: Load) -> dict[str, float]:
    """Raises RuntimeError when a request fails."""
    runner, core, counts = subject.runner, subject.core(), Counter[str]()
    began_s, inside_s = time.perf_counter(), 0.0
    for name, (prompt, tokens) in zip(map(str, range(len(load))), load, strict=True):
        core.submit(Submit(name, name, f"tenant-{name[-1]}", prompt, tokens, tokens, sampling=GREEDY), "")
    while core.has_work():
        step_s = time.perf_counter()
        result = core.step()
        inside_s += time.perf_counter() - step_s
        is_decode = result.num_tokens == result.num_sequences
        counts["decode steps" if is_decode else "mixed steps"] += result.num_tokens > 0
        counts["computed"] += result.num_tokens
        sizes = () if not result.num_tokens else runner.graph_sizes if is_decode else runner.mixed_sizes
        counts["places"] += padded(sizes, result.num_tokens)
        for delta in result.deltas.get("", ()):
            counts["tokens"] += len(delta.token_ids)
            counts["device, us"] += 0 if delta.outcome is None else delta.outcome.gpu_us
    passed_s = time.perf_counter() - began_s
    if counts["tokens"] != sum(tokens for _, tokens in load):
        raise RuntimeError(f"{counts['tokens']} tokens came, not those that were asked for")
    return {
        "tokens/s": counts["tokens"] / passed_s, "seconds": passed_s, "generator": 1 - inside_s / passed_s,
        "host gap": 1 - counts["device, us"] / 1e6 / passed_s,
        "padding": 1 - counts["computed"] / counts["places"],
        "decode steps": counts["decode steps"], "mixed steps": counts["mixed steps"],
    }  # fmt: skip


def _theirs(section: Section, subject: Subject) -> dict[str, float]:
    """Transformers' continuous batching on the same weights. Raises RuntimeError when it stops."""
    load, wide, model = subject.load, section.has_card, subject.model
    config = transformers.ContinuousBatchingConfig(
        num_blocks=16 + sum(blocks_for(len(prompt) + tokens, THEIR_BLOCK) for prompt, tokens in load),
        max_batch_tokens=MOST_TOKENS, allow_block_sharing=False, use_cuda_graph=wide,
        **({} if wide else {"auto_switch_to_flash": False, "use_async_batching": False}),
    )  # fmt: skip
    longest = max(len(prompt) for prompt, _ in load), max(tokens for _, tokens in load)
    model.set_attn_implementation("sdpa")
    torch.backends.cuda.enable_cudnn_sdp(True)  # as it is where nothing of ours has switched it off
    try:
        with model.continuous_batching_context_manager(
            transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0), timeout=5,
            continuous_batching_config=config, workload_hints=WorkloadHints(*longest, num_requests=len(load)),
            warmup=True,
        ) as manager:  # fmt: skip
            began_s, generator_s, done = time.perf_counter(), time.thread_time(), Counter[str]()
            for prompt, tokens in load:
                manager.add_request(prompt, max_new_tokens=tokens)
            while len(done) < len(load):
                section.check_time()
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = len(result.generated_tokens)
                elif result is None and not manager.is_running():
                    raise RuntimeError(f"transformers stopped after {len(done)} of {len(load)} requests")
            passed_s, generator_s = time.perf_counter() - began_s, time.thread_time() - generator_s
    finally:
        prepare(section.device)
        model.set_attn_implementation(ATTENTION_NAME)
    return {"tokens/s": done.total() / passed_s, "seconds": passed_s, "generator": generator_s / passed_s}


def split(section: Section) -> None:
    """Where the time goes: the device's, what it waits for the host, padding."""
    for shape in SHAPES:
        subject = _subject(section, shape)
        for batch in subject.floor_s:
            passed_s, device_s = _step_s(section, subject.runner, batch, ahead=1)
            section.note(f"{shape}, decode of {batch}", {"host gap": 1 - device_s / passed_s})
        section.note(f"{shape}, mixed workload", _ours(subject, subject.load))
