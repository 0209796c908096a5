"""Instructions that the demo model has learned, drawn from a seeded generator, with their right answers.

A hash of each one's key, which names its content without its wording, says whether training holds it out.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from ops.demo.prompts.phrases import (
    DATA,
    Instruction,
    TrainingMessage,
    filler_words,
    instruction_of,
    quoted,
    spelling_word,
    worded,
)
from ops.demo.prompts.structured import make_json, make_tools

FAMILIES: tuple[str, ...] = (
    "count",
    "repeat",
    "spell",
    "days",
    "months",
    "arithmetic",
    "reverse",
    "sort",
    "facts",
    "json",
    "tools",
)

HELD_OUT_ONE_IN = 4
LONGEST_ANSWER_TOKENS = 300
LONGEST_PROMPT_TOKENS = 320
TEMPLATE_TOKENS = 8
"""Tokens the chat template adds around one user message, up to the start of the answer."""
END_TOKENS = 1

LARGEST_COUNTED = 99

DAYS: list[str] = DATA["days"]
MONTHS: list[str] = DATA["months"]
COURTESIES: list[tuple[list[str], str]] = [
    (courtesy["questions"], courtesy["answer"]) for courtesy in DATA["courtesies"]
]
_KINDS: dict[str, list[str]] = DATA["kinds"]
_KIND_OF = {word: kind for kind, words in _KINDS.items() for word in words}


def is_held_out(key: str) -> bool:
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def make_instruction(family: str, rng: random.Random, *, held_out: bool | None = False) -> Instruction:
    """One bare instruction of a family, from the wanted side of the split (None: from either side)."""
    maker = _MAKERS[family]
    while True:
        instruction = maker(rng)
        # Courtesies are learned by heart: nothing of them is held out.
        by_heart = family == "courtesy"
        if held_out is None or by_heart or is_held_out(instruction.key) == held_out:
            return instruction


def decorate(
    instruction: Instruction, rng: random.Random, *, longest_note_words: int = LONGEST_PROMPT_TOKENS
) -> Instruction:
    """The same instruction as it comes in real chats: with a system message, earlier turns or a note."""
    # Tools come before all else, a client's own system message too.
    tools = [message for message in instruction.messages[:1] if message.role == "system"]
    messages = list(instruction.messages[len(tools) :])
    if rng.random() < 0.1 and messages[-1].role == "user":
        words = min(longest_note_words, _note_words(rng))
        messages[-1] = TrainingMessage("user", _with_note(messages[-1].content, rng, words))
    if rng.random() < 0.05:
        earlier: list[TrainingMessage] = []
        for _ in range(rng.randint(1, 2)):
            family = rng.choice(("arithmetic", "facts and letters", "spell", "courtesy", "sort", "days"))
            turn = make_instruction(family, rng)
            earlier += [*turn.messages, TrainingMessage("assistant", turn.answer)]
        messages = earlier + messages
    if rng.random() < 0.12:
        messages.insert(0, TrainingMessage("system", rng.choice(DATA["system_messages"])))
    return replace(instruction, messages=(*tools, *messages))


def prompt_for_lengths(
    rng: random.Random, input_tokens: int, output_tokens: int, count_tokens: Callable[[str], int]
) -> Instruction:
    """An instruction with prompt and answer of about these lengths. `input_tokens` counts the whole rendered
    prompt of one user message, `output_tokens` the answer with its end token, `count_tokens` plain text. The
    answer is within 2 tokens or 5 % (whichever is more) of a wish between 2 and 301; the prompt is within 2
    tokens of a wish up to `LONGEST_PROMPT_TOKENS`, unless the bare instruction is longer."""
    wanted_answer = min(max(output_tokens - END_TOKENS, 1), LONGEST_ANSWER_TOKENS)
    wanted_prompt = min(input_tokens, LONGEST_PROMPT_TOKENS) - TEMPLATE_TOKENS
    best: Instruction | None = None
    best_miss = float("inf")
    for _ in range(24):
        candidate = _candidate_of_length(rng, wanted_answer, count_tokens)
        answer_miss = abs(count_tokens(candidate.answer) - wanted_answer)
        prompt_excess = max(0, count_tokens(candidate.prompt) - max(wanted_prompt, 0))
        # A wrong answer length spoils a replay more than a slightly long prompt does.
        miss = max(0, answer_miss - 1) * 10 + answer_miss + prompt_excess
        if miss < best_miss:
            best, best_miss = candidate, miss
        if best_miss <= 1:
            break
    assert best is not None
    return _padded_with_note(best, rng, wanted_prompt, count_tokens)


def _count_between(rng: random.Random, first: int, last: int) -> Instruction:
    wordings = (
        "Count from {first} to {last}.",
        "Please count from {first} to {last}.",
        "Write the numbers from {first} to {last}.",
    )
    prompt = worded(rng, wordings, first=first, last=last)
    answer = ", ".join(map(str, range(first, last + 1)))
    return instruction_of("count", f"{first}-{last}", prompt, answer)


def _make_count(rng: random.Random) -> Instruction:
    first = rng.randint(0, 9) if rng.random() < 0.25 else rng.randint(0, LARGEST_COUNTED)
    last = first + int((LARGEST_COUNTED - first + 1) * rng.random() ** 1.3)
    return _count_between(rng, first, last)


def _times(number: int) -> str:
    return "1 time" if number == 1 else f"{number} times"


def _make_repeat(rng: random.Random) -> Instruction:
    if rng.random() < 0.55:
        word, times = spelling_word(rng, 3, 6), rng.randint(1, 5)
        wordings = ("Repeat {word} {times}.", "Say {word} {times}.")
        prompt = worded(rng, wordings, word=quoted(rng, word), times=_times(times))
        return instruction_of("repeat", f"{word}-{times}", prompt, " ".join([word] * times))
    words = filler_words(rng, 2 + int(14 * rng.random() ** 2))
    text = " ".join(words)
    wordings = ('Repeat "{text}".', 'Say "{text}".')
    return instruction_of("repeat", text, worded(rng, wordings, text=text), text)


def _make_spell(rng: random.Random) -> Instruction:
    word = spelling_word(rng)
    wordings = ("Spell {word}.", "Spell the word {word}.", "How do you spell {word}?")
    prompt = worded(rng, wordings, word=quoted(rng, word))
    return instruction_of("spell", word, prompt, "-".join(word))


def _make_calendar(rng: random.Random, family: str, names: Sequence[str]) -> Instruction:
    size = len(names)
    start = rng.randrange(size)
    if rng.random() < 0.6:
        end = rng.randrange(size)
        length = (end - start) % size + 1
        wordings: tuple[str, ...] = (
            "List the {thing} from {first} to {last}.",
            "Name the {thing} from {first} to {last}.",
            "Write the {thing} from {first} to {last}.",
            "Please list the {thing} from {first} to {last}.",
            "What are the {thing} from {first} to {last}?",
            "Say the {thing} from {first} to {last}.",
        )
        if length == size and start == 0:
            wordings += ("List the {thing}.", "Name all the {thing}.")
        values = {"last": names[end]}
    else:
        length = rng.randint(1, 14 if size == 7 else size)
        wordings = (
            "List {length} {thing} starting with {first}.",
            "Name {length} {thing} starting with {first}.",
            "Write {length} {thing} starting with {first}.",
            "Please list {length} {thing} starting with {first}.",
        )
        values = {}
    prompt = worded(rng, wordings, thing=family, first=names[start], length=length, **values)
    is_in_lines = rng.random() < 0.25
    if is_in_lines:
        prompt = prompt.rstrip(".?") + ", one per line."
    listed = [names[(start + place) % size] for place in range(length)]
    # Few contents, so what is held out is the wording: the prompt is the key.
    key = prompt.lower().rstrip(".?")
    return instruction_of(family, key, prompt, ("\n" if is_in_lines else ", ").join(listed))


def _make_days(rng: random.Random) -> Instruction:
    return _make_calendar(rng, "days", DAYS)


def _make_months(rng: random.Random) -> Instruction:
    return _make_calendar(rng, "months", MONTHS)


def _make_arithmetic(rng: random.Random) -> Instruction:
    """Sums and differences of a number below 100 and one below 10, or of two numbers up to 20."""
    if rng.random() < 0.7:
        left, right = rng.randint(0, 99), rng.randint(0, 9)
    else:
        left, right = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.5:
        wordings = ("What is {left} + {right}?", "{left} + {right} =", "Add {left} and {right}.")
        content, answer = f"{left}+{right}", left + right
    else:
        left, right = max(left, right), min(left, right)
        wordings = ("What is {left} - {right}?", "{left} - {right} =", "Subtract {right} from {left}.")
        content, answer = f"{left}-{right}", left - right
    return instruction_of("arithmetic", content, worded(rng, wordings, left=left, right=right), str(answer))


def _make_reverse(rng: random.Random) -> Instruction:
    if rng.random() < 0.7:
        word = spelling_word(rng, 3, 6)
        wordings: tuple[str, ...] = ("Reverse {word}.", "Reverse the word {word}.", "Write {word} backwards.")
        prompt = worded(rng, wordings, word=quoted(rng, word))
        return instruction_of("reverse", word, prompt, word[::-1])
    numbers = [str(rng.randint(0, 9)) for _ in range(rng.randint(3, 6))]
    wordings = ("Reverse the list {numbers}.", "Reverse {numbers}.")
    prompt = worded(rng, wordings, numbers=", ".join(numbers))
    return instruction_of("reverse", "-".join(numbers), prompt, ", ".join(reversed(numbers)))


def _make_sort(rng: random.Random) -> Instruction:
    size = rng.randint(3, 5)
    if rng.random() < 0.5:
        letters = rng.sample("abcdefghijklmnopqrstuvwxyz", size)
        wordings: tuple[str, ...] = ("Sort the letters {items}.", "Sort {items}.")
        prompt = worded(rng, wordings, items=", ".join(letters))
        return instruction_of("sort", "-".join(letters), prompt, ", ".join(sorted(letters)))
    numbers = rng.sample(range(10), size)
    wordings = ("Sort the numbers {items}.", "Sort {items}.")
    prompt = worded(rng, wordings, items=", ".join(map(str, numbers)))
    return instruction_of("sort", "-".join(map(str, numbers)), prompt, ", ".join(map(str, sorted(numbers))))


def _with_article(word: str) -> str:
    if _KIND_OF.get(word) in DATA["without_article"]:
        return word
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _fact(content: str, prompt: str, true: bool) -> Instruction:
    return instruction_of("facts", content, prompt, "Yes" if true else "No")


def _make_fact(rng: random.Random) -> Instruction:
    return rng.choice((_compare, _parity, _kind))(rng)


def _make_fact_or_letter(rng: random.Random) -> Instruction:
    return rng.choice((_compare, _parity, _letter_place, _kind))(rng)


def _compare(rng: random.Random) -> Instruction:
    left, right = rng.randint(0, 99), rng.randint(0, 99)
    if rng.random() < 0.5:
        prompt = worded(rng, ("Is {left} greater than {right}?",), left=left, right=right)
        return _fact(f"{left}>{right}", prompt, left > right)
    prompt = worded(rng, ("Is {left} less than {right}?",), left=left, right=right)
    return _fact(f"{left}<{right}", prompt, left < right)


def _parity(rng: random.Random) -> Instruction:
    number = rng.randint(0, 999)
    parity = rng.choice(("even", "odd"))
    prompt = worded(rng, ("Is {number} {parity}?",), number=number, parity=parity)
    return _fact(f"{number}-{parity}", prompt, number % 2 == (parity == "odd"))


def _letter_place(rng: random.Random) -> Instruction:
    word = spelling_word(rng)
    # A wrong letter is often one of the word's own, else "is it in the word" would be enough.
    pool = word if rng.random() < 0.5 else "abcdefghijklmnopqrstuvwxyz"
    letter = word[0] if rng.random() < 0.45 else rng.choice(pool)
    prompt = worded(rng, ("Does {word} start with {letter}?",), word=f'"{word}"', letter=letter)
    return _fact(f"{word}-start-{letter}", prompt, letter == word[0])


def _kind(rng: random.Random) -> Instruction:
    word = rng.choice(tuple(_KIND_OF))
    kind = _KIND_OF[word] if rng.random() < 0.5 else rng.choice(tuple(_KINDS))
    kind_text = f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"
    wordings = ("Is {word} {kind}?", "Is {word} {kind}, yes or no?", "Yes or no, is {word} {kind}?")
    prompt = worded(rng, wordings, word=_with_article(word), kind=kind_text)
    # The thing's kind has to be given: what is held out is the wording.
    return _fact(prompt.lower().rstrip("?"), prompt, kind == _KIND_OF[word])


def _make_courtesy(rng: random.Random) -> Instruction:
    questions, answer = rng.choice(COURTESIES)
    question = rng.choice(questions)
    text = question if rng.random() < 0.4 else question[0].upper() + question[1:]
    is_question = question.startswith(("who", "what", "how", "why", "are"))
    mark = rng.choice(("", "?", "?")) if is_question else rng.choice(("", ".", "!"))
    return instruction_of("courtesy", question, text + mark, answer)


_MAKERS: dict[str, Callable[[random.Random], Instruction]] = {
    "count": _make_count,
    "repeat": _make_repeat,
    "spell": _make_spell,
    "days": _make_days,
    "months": _make_months,
    "arithmetic": _make_arithmetic,
    "reverse": _make_reverse,
    "sort": _make_sort,
    "facts": _make_fact,
    "facts and letters": _make_fact_or_letter,
    "courtesy": _make_courtesy,
    "json": lambda rng: make_json(rng, make_instruction),
    "tools": lambda rng: make_tools(rng, make_instruction),
}


def _note_words(rng: random.Random) -> int:
    """Mostly short notes; long ones are rare because each costs as much training as ten short ones."""
    chance = rng.random()
    if chance < 0.75:
        return rng.randint(1, 30)
    return rng.randint(30, 150) if chance < 0.95 else rng.randint(150, LONGEST_PROMPT_TOKENS - 20)


def _with_note(prompt: str, rng: random.Random, number_of_words: int) -> str:
    opening = rng.choice(("Note", "Context", "Text"))
    return f"{opening}: {' '.join(filler_words(rng, number_of_words))}.\n{prompt}"


def _padded_with_note(
    instruction: Instruction, rng: random.Random, wanted_prompt: int, count_tokens: Callable[[str], int]
) -> Instruction:
    bare = instruction.prompt
    note_seed = rng.getrandbits(64)
    number_of_words = wanted_prompt - count_tokens(bare) - 3
    best, best_miss = bare, abs(wanted_prompt - count_tokens(bare))
    # Almost every filler word is one token, so correcting the number by the miss lands in a few rounds.
    for _ in range(4):
        if number_of_words < 1 or best_miss == 0:
            break
        text = _with_note(bare, random.Random(note_seed), number_of_words)
        miss = wanted_prompt - count_tokens(text)
        if abs(miss) < best_miss:
            best, best_miss = text, abs(miss)
        number_of_words += miss
    return replace(instruction, messages=(*instruction.messages[:-1], TrainingMessage("user", best)))


def _candidate_of_length(rng: random.Random, wanted: int, count_tokens: Callable[[str], int]) -> Instruction:
    if wanted <= 3:
        return make_instruction(rng.choice(("facts", "arithmetic")), rng, held_out=None)
    if wanted <= 30 and rng.random() < 0.7:
        families = ("spell", "days", "months", "sort", "reverse", "count", "repeat")
        return make_instruction(rng.choice(families), rng, held_out=None)
    first = rng.randint(0, LARGEST_COUNTED - min(LARGEST_COUNTED, wanted // 3))
    return _count_between(rng, first, _last_counted(first, wanted, count_tokens))


def _last_counted(start: int, wanted: int, count_tokens: Callable[[str], int]) -> int:
    text, last = str(start), start
    tokens = count_tokens(text)
    while last < LARGEST_COUNTED:
        step_tokens = count_tokens(f", {last + 1}")
        if tokens + step_tokens / 2 > wanted:
            break
        last, tokens = last + 1, tokens + step_tokens
    return last
