"""Streams of instructions for training the demo model and for measuring it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from ops.demo.prompts.instructions import COURTESIES, Instruction, decorate, instruction_of, make_instruction

# Short answers give few loss tokens each, yet are the hardest to get exact, so they are drawn more often.
TRAINING_SHARE: dict[str, float] = {
    "count": 0.13,
    "repeat": 0.10,
    "spell": 0.05,
    "days": 0.06,
    "months": 0.06,
    "arithmetic": 0.19,
    "reverse": 0.08,
    "sort": 0.12,
    "facts and letters": 0.19,
    "courtesy": 0.02,
}

FINISHING_SHARE: dict[str, float] = {
    "count": 0.04,
    "repeat": 0.04,
    "spell": 0.05,
    "days": 0.04,
    "months": 0.04,
    "arithmetic": 0.16,
    "reverse": 0.03,
    "sort": 0.05,
    "facts": 0.54,
    "courtesy": 0.01,
}
"""The last steps of a training go mostly to the family that is hardest to get exact."""


def training_stream(
    seed: int, longest_characters: int | None = None, share: Mapping[str, float] = TRAINING_SHARE
) -> Iterator[Instruction]:
    """An endless, seeded stream; none is held out, none has more than `longest_characters`."""
    rng = random.Random(seed)
    families = tuple(share)
    shares = tuple(share.values())
    while True:
        family = rng.choices(families, shares)[0]
        instruction = decorate(make_instruction(family, rng), rng)
        if longest_characters is None or instruction.characters <= longest_characters:
            yield instruction


def held_out_instructions(family: str, number: int, seed: int) -> list[Instruction]:
    """Distinct held-out instructions of a family, decorated as often as those in training."""
    rng = random.Random(f"held-out:{family}:{seed}")
    chosen: dict[str, Instruction] = {}
    for _ in range(200 * number):
        instruction = make_instruction(family, rng, held_out=True)
        if instruction.key not in chosen:
            chosen[instruction.key] = decorate(instruction, rng)
        if len(chosen) == number:
            return list(chosen.values())
    raise ValueError(f"family {family!r} has only {len(chosen)} held-out instructions, {number} were wanted")


def courtesies() -> list[Instruction]:
    return [
        instruction_of("courtesy", question, question, answer)
        for questions, answer in COURTESIES
        for question in questions
    ]
