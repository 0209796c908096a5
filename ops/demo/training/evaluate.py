"""Exact held-out answers of the demo model by family; `python -m ops.demo.training.evaluate`.

Its exit status is 1 when a family has fewer than `WANTED_PERCENT`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from ops.demo.prompts.instructions import (
    FAMILIES,
    LONGEST_ANSWER_TOKENS,
    LONGEST_PROMPT_TOKENS,
    prompt_for_lengths,
)
from ops.demo.prompts.phrases import Instruction
from ops.demo.training.streams import courtesies, held_out_instructions

MODEL_DIRECTORY = Path(__file__).parents[1] / "model"
WANTED_PERCENT = dict.fromkeys(FAMILIES, 95.0) | {"json": 55.0, "tools": 60.0}
"""Exact answers. Names and values that were never seen are many letters to copy, and each has to be right."""
# An answer may run this far over the longest in training before it counts as one that never ends.
MAX_NEW_TOKENS = LONGEST_ANSWER_TOKENS + 84


@dataclass(frozen=True, slots=True)
class ModelReply:
    """What the model answered: its text, its tokens (end token included) and whether it ended by itself."""

    text: str
    tokens: int
    ended: bool


def load(directory: Path) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval(), tokenizer


def answer_greedily(
    model: Any, tokenizer: Any, instructions: Sequence[Instruction], rows_per_batch: int = 64
) -> list[ModelReply]:
    prompts = [
        tokenizer.apply_chat_template(instruction.chat(), tokenize=False, add_generation_prompt=True)
        for instruction in instructions
    ]
    # Rows of like answer length end together, so no batch waits long for its slowest row.
    order = sorted(range(len(prompts)), key=lambda row: (len(instructions[row].answer), len(prompts[row])))
    replies: dict[int, ModelReply] = {}
    for start in range(0, len(order), rows_per_batch):
        rows = order[start : start + rows_per_batch]
        inputs = tokenizer(
            [prompts[row] for row in rows],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            add_special_tokens=False,
        )
        with torch.inference_mode():
            generated = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
            )
        for row, ids in zip(rows, generated[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            ended = tokenizer.eos_token_id in ids
            kept = ids[: ids.index(tokenizer.eos_token_id) + 1] if ended else ids
            replies[row] = ModelReply(tokenizer.decode(kept, skip_special_tokens=True), len(kept), ended)
    return [replies[row] for row in range(len(prompts))]


def exact_percent(instructions: Sequence[Instruction], replies: Sequence[ModelReply]) -> float:
    exact = sum(
        reply.ended and reply.text == instruction.answer
        for instruction, reply in zip(instructions, replies, strict=True)
    )
    return 100 * exact / len(instructions)


def replayed(tokenizer: Any, number: int, seed: int) -> list[Instruction]:
    """Instructions for random lengths, made as the demo makes them when it replays a trace."""
    rng = random.Random(f"replayed:{seed}")

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    return [
        prompt_for_lengths(
            rng,
            rng.randint(16, LONGEST_PROMPT_TOKENS),
            rng.randint(2, LONGEST_ANSWER_TOKENS + 1),
            count_tokens,
        )
        for _ in range(number)
    ]


def _add_row(
    table: Table, name: str, instructions: Sequence[Instruction], replies: Sequence[ModelReply]
) -> float:
    percent = exact_percent(instructions, replies)
    lengths = [reply.tokens for reply in replies]
    exact = round(percent * len(replies) / 100)
    ended_percent = 100 * sum(reply.ended for reply in replies) / len(replies)
    table.add_row(
        name,
        str(len(replies)),
        str(exact),
        f"{percent:.1f}",
        f"{sum(lengths) / len(lengths):.1f}",
        str(min(lengths)),
        str(max(lengths)),
        f"{ended_percent:.1f}",
    )
    return percent


@click.command()
@click.option("--model", "directory", type=click.Path(path_type=Path, exists=True), default=MODEL_DIRECTORY)
@click.option("--prompts", default=200, show_default=True, help="Held-out prompts per family.")
@click.option("--seed", default=1, show_default=True)
@click.option("--show-wrong", default=0, show_default=True, help="Wrong answers to show per family.")
@click.option("--threads", default=2, show_default=True, help="CPU threads for torch.")
def main(directory: Path, prompts: int, seed: int, show_wrong: int, threads: int) -> None:
    torch.set_num_threads(threads)
    model, tokenizer = load(directory)
    console = Console(width=100)
    title = f"Greedy, float32, seed {seed}; tokens include the end token"
    table = Table(
        "family", "prompts", "exact", "exact %", "mean tokens", "min", "max", "ended %", title=title
    )
    for column in table.columns[1:]:
        column.justify = "right"
    groups = {family: held_out_instructions(family, prompts, seed) for family in FAMILIES}
    groups["(replayed lengths)"] = replayed(tokenizer, prompts, seed)
    groups["(courtesies, trained)"] = courtesies()
    too_low: list[str] = []
    for name, instructions in groups.items():
        replies = answer_greedily(model, tokenizer, instructions)
        if name == "(replayed lengths)":
            table.add_section()
        percent = _add_row(table, name, instructions, replies)
        if percent < WANTED_PERCENT.get(name, 0.0):
            too_low.append(f"{name} ({WANTED_PERCENT[name]:.0f} %)")
        wrong = [pair for pair in zip(instructions, replies, strict=True) if pair[0].answer != pair[1].text]
        for instruction, reply in wrong[:show_wrong]:
            console.print(f"{name}: {instruction.prompt!r}", markup=False)
            console.print(f"  wanted {instruction.answer!r}\n  got    {reply.text!r}", markup=False)
    console.print(table)
    if too_low:
        console.print(f"fewer exact than wanted: {', '.join(too_low)}")
        raise SystemExit(1)
    console.print("every family has as many exact as wanted")


if __name__ == "__main__":
    main()
