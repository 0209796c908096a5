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
    "count": 0.05, "repeat": 0.05, "spell": 0.03, "days": 0.03, "months": 0.03, "arithmetic": 0.15,
    "reverse": 0.04, "sort": 0.07, "facts": 0.21, "courtesy": 0.01, "json": 0.18, "tools": 0.15,
}  # fmt: skip
"""Teaches what programs read to a model that knows the rest and must not forget it."""

COPYING_SHARE: dict[str, float] = {
    "count": 0.02, "repeat": 0.02, "spell": 0.01, "days": 0.01, "months": 0.01, "arithmetic": 0.06,
    "reverse": 0.015, "sort": 0.03, "facts": 0.07, "courtesy": 0.005, "json": 0.35, "tools": 0.4,
}  # fmt: skip
"""With short texts: what is learned of them is to copy the right names and values."""

SETTLING_SHARE: dict[str, float] = {
    "count": 0.06, "repeat": 0.05, "spell": 0.04, "days": 0.04, "months": 0.04, "arithmetic": 0.14,
    "reverse": 0.05, "sort": 0.09, "facts": 0.18, "courtesy": 0.01, "json": 0.22, "tools": 0.13,
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
