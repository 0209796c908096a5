"""Streams of instructions for training the demo model and for measuring it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from ops.demo.prompts.instructions import COURTESIES, decorate, make_instruction
from ops.demo.prompts.phrases import Instruction, instruction_of

# Short answers give few loss tokens each, yet are the hardest to get exact, so they are drawn more often.
TRAINING_SHARE: dict[str, float] = {
    "count": 0.13, "repeat": 0.10, "spell": 0.05, "days": 0.06, "months": 0.06, "arithmetic": 0.19,
    "reverse": 0.08, "sort": 0.12, "facts and letters": 0.19, "courtesy": 0.02,
}  # fmt: skip

FINISHING_SHARE: dict[str, float] = {
    "count": 0.04, "repeat": 0.04, "spell": 0.05, "days": 0.04, "months": 0.04, "arithmetic": 0.16,
    "reverse": 0.03, "sort": 0.05, "facts": 0.54, "courtesy": 0.01,
}  # fmt: skip
"""The last steps of the first training go mostly to the family that is hardest to get exact."""

EXTENDING_SHARE: dict[str, float] = {
    "count": 0.02, "repeat": 0.03, "spell": 0.02, "days": 0.02, "months": 0.02, "arithmetic": 0.08,
    "reverse": 0.03, "sort": 0.06, "facts": 0.11, "courtesy": 0.01, "json": 0.35, "tools": 0.25,
}  # fmt: skip
"""Teaches what programs read: to copy the right names and values."""

SETTLING_SHARE: dict[str, float] = {
    "count": 0.04, "repeat": 0.04, "spell": 0.03, "days": 0.03, "months": 0.03, "arithmetic": 0.11,
    "reverse": 0.04, "sort": 0.12, "facts": 0.18, "courtesy": 0.01, "json": 0.22, "tools": 0.15,
}  # fmt: skip
"""All families, while the learning rate falls."""

POLISHING_SHARE: dict[str, float] = {
    "count": 0.03, "repeat": 0.03, "spell": 0.03, "days": 0.03, "months": 0.04, "arithmetic": 0.11,
    "reverse": 0.04, "sort": 0.06, "facts": 0.27, "courtesy": 0.01, "json": 0.25, "tools": 0.1,
}  # fmt: skip


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
