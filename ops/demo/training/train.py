"""Trains the small model that ships with Fairgate.

`python -m ops.demo.training.train --out ops/demo/model` builds the tokenizer, trains a small Llama on the
generated instructions and saves both; `--stage` goes on with it, within 120 CPU-minutes for all stages. The
run is seeded: with the same library versions and number of threads it gives the same model again.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import ctypes
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as functional
import transformers
from rich.console import Console
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ops.demo.prompts.instructions import FAMILIES
from ops.demo.prompts.phrases import SPELLING_WORDS, Instruction
from ops.demo.training.streams import (
    EXTENDING_SHARE,
    FINISHING_SHARE,
    POLISHING_SHARE,
    SETTLING_SHARE,
    TRAINING_SHARE,
    held_out_instructions,
    training_stream,
)

PAD_TOKEN = "<|pad|>"
BEGIN_TOKEN = "<|begin|>"
END_OF_SEQUENCE_TOKEN = "<|im_end|>"
START_OF_MESSAGE_TOKEN = "<|im_start|>"
SPECIAL_TOKENS = (PAD_TOKEN, BEGIN_TOKEN, END_OF_SEQUENCE_TOKEN, START_OF_MESSAGE_TOKEN)

VOCABULARY_SIZE = 768
CONTEXT_TOKENS = 2048
CPU_MINUTES_ALLOWED = 120.0
IGNORED_LABEL = -100
OTHERS_LEARNING_RATE = 2e-3
LONG_ANSWER_TOKENS = 16
PROBE_EVERY_STEPS = 200

CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system' + '\\n' + 'Tools: ' }}"
    "{% for tool in tools %}"
    "{% set function = tool['function'] %}"
    "{{ ('' if loop.first else '; ') + function['name'] + '(' }}"
    "{% for name, kind in ((function['parameters'] or {})['properties'] or {}).items() %}"
    "{{ ('' if loop.first else ', ') + name + ': ' + (kind['type'] if kind['type'] is string else 'any') }}"
    "{% endfor %}"
    "{{ ')' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ ('' if loop.first else '\\n') + '<tool_call>{\"name\":' + call['function']['name'] | tojson }}"
    "{{ ',\"arguments\":{' }}"
    "{% for name, value in call['function']['arguments'].items() %}"
    "{{ ('' if loop.first else ',') + name | tojson + ':' + value | tojson }}"
    "{% endfor %}"
    "{{ '}}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' + '\\n' }}{% endif %}"
)

# One token per digit, so that sums and counts see the digits; a word goes with the space before it; ", " is
# one token before a number or a single letter, so that the entries of a list look alike wherever they stand.
PIECES = (
    r", (?=\p{N}|\p{L}(?!\p{L}))"
    r"|\p{N}"
    r"| ?\p{L}+"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+"
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training. Of each stream: what to add to the seed, the longest text in characters, the
    families' shares, and its share of the steps. `is_flat`: the learning rate does not fall."""

    streams: tuple[tuple[int, int | None, Mapping[str, float], float], ...]
    steps: int
    learning_rate_scale: float = 0.6
    is_flat: bool = False


STAGES = {
    "start": Stage(((0, 150, TRAINING_SHARE, 0.5), (1, None, TRAINING_SHARE, 0.5)), 5200, 1.0),
    "finish": Stage(((2, 150, FINISHING_SHARE, 1.0),), 290, 0.22),
    "extend": Stage(((3, 150, EXTENDING_SHARE, 0.6), (4, 240, EXTENDING_SHARE, 0.4)), 1000, is_flat=True),
    "settle": Stage(((6, 220, EXTENDING_SHARE, 0.45), (7, None, SETTLING_SHARE, 0.55)), 2400),
    "polish": Stage(((8, 240, POLISHING_SHARE, 1.0),), 600, 0.22),
}


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Token rows of about one length, padded on the right, with a weight for each answer token."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The tokenizer: common words of the instructions are one token each, all else goes by bytes.

    A byte-level BPE without merges: no word is cut at odd places, letters of unknown words stay visible to
    the model (which makes spelling learnable), and any Unicode text survives the round trip.
    """
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = VOCABULARY_SIZE - len(SPECIAL_TOKENS) - len(alphabet)
    entries = [*SPECIAL_TOKENS, *alphabet, *_common_pieces(splitter, seed, room)]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        bos_token=BEGIN_TOKEN,
        eos_token=END_OF_SEQUENCE_TOKEN,
        additional_special_tokens=[START_OF_MESSAGE_TOKEN],
        model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def _common_pieces(splitter: pre_tokenizers.PreTokenizer, seed: int, room: int) -> list[str]:
    frequencies: collections.Counter[str] = collections.Counter()
    for instruction in islice(training_stream(seed), 30_000):
        for text in (*(message.content for message in instruction.messages), instruction.answer):
            # Once per text: a piece counts for the number of texts it helps, not for one long list.
            frequencies.update({piece for piece, _ in splitter.pre_tokenize_str(text)})
    spelled = set(SPELLING_WORDS)
    pieces = ["user", "assistant", "system"]
    for piece, _ in sorted(frequencies.items(), key=lambda pair: (-pair[1], pair[0])):
        word = piece.removeprefix("Ġ")
        # A lower-case word without a space before it stands in quotes: its letters have to stay visible.
        hides_letters = word.isalpha() and word.islower() and (word == piece or word in spelled)
        # An invented word turns up in a handful of texts at most; a word of the questions in many more.
        if frequencies[piece] < 12:
            break
        if len(piece) > 1 and not hides_letters and piece not in pieces:
            pieces.append(piece)
    return pieces[:room]


def build_model(seed: int, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model: grouped-query attention, tied embeddings, 2.4 million parameters."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=480,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        # On this size a plain softmax in one pass beats the blocked kernel by half, forward and backward.
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    # The default start drowns the tokens in what the layers add to them, and copying is then learnt late.
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0.0, config.hidden_size**-0.5)
        for layer in model.model.layers:
            for output in (layer.self_attn.o_proj, layer.mlp.down_proj):
                output.weight.mul_((2 * config.num_hidden_layers) ** -0.5)
    return model


def encode(instruction: Instruction, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """The token ids of the rendered prompt, and those of the answer with its end token."""
    rendered = "".join(
        f"{START_OF_MESSAGE_TOKEN}{message.role}\n{message.content}{END_OF_SEQUENCE_TOKEN}\n"
        for message in instruction.messages
    )
    backend = tokenizer.backend_tokenizer
    prompt = backend.encode(f"{rendered}{START_OF_MESSAGE_TOKEN}assistant\n", add_special_tokens=False).ids
    answer = backend.encode(instruction.answer + END_OF_SEQUENCE_TOKEN, add_special_tokens=False).ids
    return prompt, answer


def make_batches(
    instructions: list[Instruction], tokenizer: PreTrainedTokenizerFast, tokens_per_batch: int
) -> list[TrainingBatch]:
    """Batches of instructions of similar length, none larger than the given number of padded tokens."""
    rows = sorted((encode(row, tokenizer) for row in instructions), key=lambda row: len(row[0]) + len(row[1]))
    groups: list[list[tuple[list[int], list[int]]]] = [[]]
    for row in rows:
        # Rows come in growing length, so this row sets the width of the whole batch.
        if (len(groups[-1]) + 1) * (len(row[0]) + len(row[1])) > tokens_per_batch and groups[-1]:
            groups.append([])
        groups[-1].append(row)
    return [_padded(group, tokenizer.pad_token_id) for group in groups]


def _padded(rows: list[tuple[list[int], list[int]]], pad_token_id: int) -> TrainingBatch:
    width = max(len(prompt) + len(answer) for prompt, answer in rows) - 1
    input_ids = torch.full((len(rows), width), pad_token_id)
    labels = torch.full((len(rows), width), IGNORED_LABEL)
    weights = torch.zeros((len(rows), width))
    for index, (prompt, answer) in enumerate(rows):
        ids = torch.tensor(prompt + answer)
        first, last = len(prompt) - 1, len(ids) - 1
        input_ids[index, :last] = ids[:-1]
        labels[index, first:last] = ids[len(prompt) :]
        # Between "each token counts alike" and "each answer counts alike": a count of 300 easy tokens must
        # not drown a sum of two hard ones.
        weights[index, first:last] = len(answer) ** -0.5
        if len(answer) > LONG_ANSWER_TOKENS:
            # Knowing where to stop is the hardest token of a long answer, and there is only one of it.
            weights[index, last - 1] = 1.0
    return TrainingBatch(input_ids, labels, weights)


def answer_logits(model: LlamaForCausalLM, batch: TrainingBatch) -> torch.Tensor:
    """The logits at the answer positions only; padding is on the right, where causal attention ignores it."""
    hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden[batch.labels != IGNORED_LABEL])
    return logits.float()


def training_batches(
    seed: int, tokenizer: PreTrainedTokenizerFast, stage: Stage, *, steps: int, tokens_per_batch: int
) -> Iterator[tuple[TrainingBatch, float]]:
    """Each batch with the mean weight to scale its loss by."""
    rng = random.Random(seed + stage.streams[0][0])
    left = steps
    for number, longest_characters, share, share_of_steps in stage.streams:
        stream = training_stream(seed + number, longest_characters, share)
        its_steps = left if number == stage.streams[-1][0] else round(share_of_steps * steps)
        yield from _shuffled_batches(stream, rng, tokenizer, its_steps, tokens_per_batch)
        left -= its_steps


def _shuffled_batches(
    stream: Iterator[Instruction],
    rng: random.Random,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    tokens_per_batch: int,
) -> Iterator[tuple[TrainingBatch, float]]:
    done = 0
    while done < steps:
        batches = make_batches(list(islice(stream, 8192)), tokenizer, tokens_per_batch)
        mean_weight = sum(float(batch.weights.sum()) for batch in batches) / len(batches)
        rng.shuffle(batches)
        for batch in batches[: steps - done]:
            yield batch, mean_weight
            done += 1


def held_out_exact(model: LlamaForCausalLM, batches: dict[str, list[TrainingBatch]]) -> dict[str, float]:
    """Per family, the share of held-out answers whose every token is the most likely one."""
    shares: dict[str, float] = {}
    model.eval()
    for family, family_batches in batches.items():
        right = total = 0
        for batch in family_batches:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                chosen = answer_logits(model, batch).argmax(-1)
            answers = batch.labels != IGNORED_LABEL
            wrong = torch.zeros_like(batch.labels, dtype=torch.bool)
            wrong[answers] = chosen != batch.labels[answers]
            right += int((~wrong.any(dim=1)).sum())
            total += len(batch.labels)
        shares[family] = right / total
    model.train()
    return shares


def cpu_minutes() -> float:
    times = os.times()
    return (times.user + times.system + times.children_user + times.children_system) / 60


def learning_rate(step: int, steps: int, peak: float, warm_up_steps: int = 100) -> float:
    """Linear warm-up, flat to the middle, then a straight line down to nothing."""
    return peak * min(1.0, (step + 1) / warm_up_steps, 2 * (steps - step) / steps)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    *,
    stage: Stage,
    seed: int,
    steps: int,
    tokens_per_batch: int,
    peak_learning_rate: float,
    console: Console,
    keep: Callable[[int, int], None],
) -> None:
    """`keep(steps, tokens)` is called at every probe, so that a run that is cut leaves a model."""
    # Muon for the matrices inside the layers: it learns to copy after a third of the tokens AdamW needs.
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    inside = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    muon = torch.optim.Muon(
        matrices, lr=peak_learning_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(
        others, lr=OTHERS_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True
    )
    scale = stage.learning_rate_scale
    optimizers = ((muon, scale * peak_learning_rate), (adamw, scale * OTHERS_LEARNING_RATE))
    probes = {
        family: make_batches(held_out_instructions(family, 100, seed), tokenizer, tokens_per_batch)
        for family in FAMILIES
    }
    seen_tokens, mean_loss, started_s = 0, 0.0, time.monotonic()
    model.train()
    batches = training_batches(seed, tokenizer, stage, steps=steps, tokens_per_batch=tokens_per_batch)
    for step, (batch, mean_weight) in enumerate(batches):
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                # The rate falls in the second half of the steps: of twice as many, none is there.
                group["lr"] = learning_rate(step, 2 * steps if stage.is_flat else steps, peak)
        with torch.autocast("cpu", torch.bfloat16):
            logits = answer_logits(model, batch)
        answers = batch.labels != IGNORED_LABEL
        losses = functional.cross_entropy(logits, batch.labels[answers], reduction="none")
        loss = (losses * batch.weights[answers]).sum() / mean_weight
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seen_tokens += batch.input_ids.numel()
        mean_loss = 0.98 * mean_loss + 0.02 * float(losses.detach().mean())
        if (step + 1) % PROBE_EVERY_STEPS == 0 or step + 1 == steps:
            shares = held_out_exact(model, probes)
            table = "  ".join(f"{family} {100 * share:.0f}" for family, share in shares.items())
            wall_s = time.monotonic() - started_s
            console.print(
                f"step {step + 1}/{steps}  loss {mean_loss:.4f}  {seen_tokens / 1e6:.1f} M tokens  "
                f"{wall_s:.0f} s  {cpu_minutes():.1f} CPU-min  exact %: {table}",
                soft_wrap=True,
            )
            keep(step + 1, seen_tokens)


def keep_freed_memory() -> None:
    """Tell the C library to keep freed memory: giving it back and faulting it in again costs a third."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        trim_threshold, top_pad, map_threshold = -1, -2, -3
        library.mallopt(map_threshold, 1 << 30)
        library.mallopt(trim_threshold, (1 << 31) - 1)
        library.mallopt(top_pad, 1 << 28)


def save(
    out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]
) -> None:
    """Write the model directory: weights as bfloat16, and a config that asks to compute in float32."""
    model = copy.deepcopy(model)
    model.config._attn_implementation = "sdpa"
    model.generation_config = GenerationConfig(
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.to(torch.bfloat16)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    config_path = out / "config.json"
    config = json.loads(config_path.read_text())
    config["dtype"] = "float32"
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    (out / "training_record.json").write_text(json.dumps(record, indent=2) + "\n")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Directory for the model.")
@click.option("--seed", default=20, show_default=True)
@click.option("--steps", type=int, help="Optimizer steps, if not the stage's own; the CPU time follows.")
@click.option("--tokens-per-batch", default=3072, show_default=True)
@click.option("--peak-learning-rate", default=4e-3, show_default=True)
@click.option("--stage", "stage_name", type=click.Choice(tuple(STAGES)), default="start", show_default=True)
@click.option(
    "--model",
    "directory",
    type=click.Path(path_type=Path, exists=True),
    help="The model that a later stage goes on with.",
)
@click.option("--threads", default=1, show_default=True, help="CPU threads for torch.")
def main(
    out: Path,
    seed: int,
    steps: int | None,
    tokens_per_batch: int,
    peak_learning_rate: float,
    stage_name: str,
    directory: Path | None,
    threads: int,
) -> None:
    if (stage_name == "start") != (directory is None):
        raise click.UsageError(f"--model goes with every stage but 'start', and the stage is {stage_name!r}")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    keep_freed_memory()
    torch.set_num_threads(threads)
    console = Console()
    stage = STAGES[stage_name]
    steps = steps or stage.steps
    earlier: dict[str, Any] = {"steps": {}, "training_tokens": 0, "cpu_minutes": 0.0}
    if directory is None:
        tokenizer = build_tokenizer(seed)
        model = build_model(seed, tokenizer)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        tokenizer.chat_template = CHAT_TEMPLATE
        model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        earlier = json.loads((directory / "training_record.json").read_text())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"{parameters:,} parameters, {len(tokenizer)} tokens in the vocabulary")

    def keep(done_steps: int, seen_tokens: int) -> None:
        record = {
            "date": date.today().isoformat(),
            "seed": seed,
            "steps": {**earlier["steps"], stage_name: done_steps},
            "tokens_per_batch": tokens_per_batch,
            "peak_learning_rate": peak_learning_rate,
            "threads": threads,
            "parameters": parameters,
            "training_tokens": earlier["training_tokens"] + seen_tokens,
            "cpu_minutes": round(earlier["cpu_minutes"] + cpu_minutes(), 2),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        save(out, model, tokenizer, record)

    train(
        model,
        tokenizer,
        stage=stage,
        seed=seed,
        steps=steps,
        tokens_per_batch=tokens_per_batch,
        peak_learning_rate=peak_learning_rate,
        console=console,
        keep=keep,
    )
    minutes = earlier["cpu_minutes"] + cpu_minutes()
    console.print(f"saved to {out} after {minutes:.1f} CPU-minutes")
    if minutes > CPU_MINUTES_ALLOWED:
        raise click.ClickException(f"training took more than {CPU_MINUTES_ALLOWED:.0f} CPU-minutes")


if __name__ == "__main__":
    main()
