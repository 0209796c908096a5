"""What instructions of every family are made of: messages, words, wordings and names."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "instructions.json").read_text(encoding="utf-8")
)
SPELLING_WORDS: list[str] = DATA["spelling"].split()
_ADJECTIVES, _NOUNS, _VERBS, _PLACES = (
    DATA[words].split() for words in ("adjectives", "nouns", "verbs", "places")
)


@dataclass(frozen=True, slots=True)
class TrainingMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Instruction:
    """A conversation that ends with a user message, and the one right answer to it."""

    family: str
    key: str
    messages: tuple[TrainingMessage, ...]
    answer: str

    @property
    def prompt(self) -> str:
        return self.messages[-1].content

    @property
    def characters(self) -> int:
        return sum(len(message.content) for message in self.messages) + len(self.answer)

    def chat(self) -> list[dict[str, str]]:
        return [{"role": message.role, "content": message.content} for message in self.messages]


def filler_words(rng: random.Random, number: int) -> list[str]:
    """Words in the order of plain sentences, for notes that the model learns to ignore."""
    words: list[str] = []
    while len(words) < number:
        adjective, other_adjective = rng.sample(_ADJECTIVES, 2)
        noun, other_noun, third_noun = rng.sample(_NOUNS, 3)
        sentence = ["the", adjective, noun, rng.choice(_VERBS), "the", other_adjective, other_noun]
        if rng.random() < 0.5:
            sentence += [rng.choice(_PLACES), "the", third_noun]
        words += [*sentence, "and"]
    return words[:number]


def instruction_of(family: str, content: str, prompt: str, answer: str) -> Instruction:
    return Instruction(family, f"{family}:{content}", (TrainingMessage("user", prompt),), answer)


def worded(rng: random.Random, wordings: Sequence[str], **values: object) -> str:
    text = rng.choice(wordings).format(**values)
    if rng.random() < 0.05 and not text.startswith('"'):
        text = text[0].lower() + text[1:]
    if rng.random() < 0.05 and text.endswith((".", "?")):
        text = text[:-1]
    return text


def quoted(rng: random.Random, word: str) -> str:
    chance = rng.random()
    if chance < 0.9:
        return f'"{word}"'
    return f"'{word}'" if chance < 0.92 else word


def spelling_word(rng: random.Random, shortest: int = 3, longest: int = 8) -> str:
    """A real word or an invented one: invented words make the letters, not the word, worth learning."""
    if rng.random() < 0.4:
        while True:
            word = rng.choice(SPELLING_WORDS)
            if shortest <= len(word) <= longest:
                return word
    length = rng.randint(shortest, longest)
    if rng.random() < 0.3:
        return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
    sounds = ("bcdfghjklmnprstvwz", "aeiou")
    start = rng.randint(0, 1)
    return "".join(rng.choice(sounds[(start + position) % 2]) for position in range(length))
