"""The families whose answers programs read: JSON, and calls of tools."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence

from ops.demo.prompts.phrases import (
    DATA,
    SPELLING_WORDS,
    Instruction,
    TrainingMessage,
    filler_words,
    instruction_of,
    spelling_word,
)

Plain = Callable[[str, random.Random], Instruction]
"""Draws an instruction of a named family that training may see."""
Tool = tuple[str, dict[str, str]]
"""Its name, and the type of each argument."""


def _typed(text: str) -> list[tuple[str, str]]:
    return [(name, kind) for name, kind in (pair.split(":") for pair in text.split())]


_VALUES: dict[str, list[str]] = {field: words.split() for field, words in DATA["field_values"].items()}
_TYPES: dict[str, str] = {field: kind for kind, text in DATA["fields"].items() for field in text.split()}
_KEYS: list[str] = DATA["json_keys"].split()
_ARGUMENTS = _typed(DATA["arguments"])
_TOOLS: list[Tool] = [(name, dict(_typed(arguments))) for name, arguments in DATA["tools"].items()]


def compact_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def tools_text(tools: Sequence[Tool]) -> str:
    """What the chat template writes before a chat with tools."""
    arguments = (", ".join(f"{name}: {kind}" for name, kind in tool[1].items()) for tool in tools)
    return "Tools: " + "; ".join(f"{tool[0]}({text})" for tool, text in zip(tools, arguments, strict=True))


def make_json(rng: random.Random, plain: Plain) -> Instruction:
    maker = rng.choices((_json_of_pairs, _json_of_sentence, _json_list), (0.5, 0.32, 0.1))[0]
    prompt, answer = _json_of_plain(rng, plain) if rng.random() < 0.08 else maker(rng)
    return instruction_of("json", prompt.lower(), prompt, compact_json(answer))


def make_tools(rng: random.Random, plain: Plain) -> Instruction:
    tools = _draw_tools(rng)
    messages = [TrainingMessage("system", tools_text(tools))]
    if rng.random() < 0.2:
        inner = _plain_beside_tools(rng, plain, tools)
        content, messages, answer = inner.key, [*messages, *inner.messages], inner.answer
    else:
        content, answer = _ask(rng, tools)
        if rng.random() < 0.06:
            earlier, said = _with_results(rng, *_ask(rng, tools))
            messages += [*earlier, TrainingMessage("assistant", said)]
        messages.append(TrainingMessage("user", content))
        if rng.random() < 0.25:
            messages[-1:], answer = _with_results(rng, content, answer)
            content += answer
    return Instruction("tools", f"tools:{messages[0].content}:{content}".lower(), tuple(messages), answer)


def _listed(items: Sequence[object]) -> str:
    texts = [str(item) for item in items]
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else texts[0]


def _said(value: object) -> str:
    if isinstance(value, list):
        return _listed(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _word(rng: random.Random) -> str:
    return spelling_word(rng, 3, 6) if rng.random() < 0.5 else rng.choice(_VALUES["item"])


def _key(rng: random.Random) -> str:
    return rng.choice(_KEYS) if rng.random() < 0.8 else spelling_word(rng, 3, 6)


def _value(field: str, rng: random.Random) -> object:
    """A value that suits the field's name, or any for a name that says nothing."""
    kind = _TYPES.get(field)
    if kind == "number":
        return rng.randint(0, 99)
    if kind == "flag":
        return rng.random() < 0.5
    if kind == "list":
        return [_word(rng) for _ in range(rng.randint(2, 4))]
    if field in _VALUES and rng.random() < 0.8:
        return rng.choice(_VALUES[field]).replace("_", " ")
    chance = rng.random()
    if chance < 0.6 or field in _VALUES:
        return spelling_word(rng, 3, 7).capitalize() if field in ("name", "city") else _word(rng)
    if chance < 0.7:
        return " ".join(filler_words(rng, rng.randint(2, 3)))
    if chance < 0.88:
        return rng.randint(0, 99)
    return rng.random() < 0.5 if chance < 0.94 else [rng.randint(0, 9) for _ in range(rng.randint(2, 4))]


def _wished(rng: random.Random, text: str, values: dict[str, object]) -> tuple[str, object]:
    """The text with a wish for JSON: of all its fields as they come, or of some in an order of its own."""
    if rng.random() < 0.4:
        return rng.choice(DATA["json_wishes"]).format(text=text), values
    keys = rng.sample(list(values), rng.randint(max(1, len(values) - 1), len(values)))
    prompt = rng.choice(DATA["json_key_wishes"]).format(text=text, keys=_listed(keys))
    return prompt, {key: values[key] for key in keys}


def _json_of_pairs(rng: random.Random) -> tuple[str, object]:
    size = rng.choices((1, 2, 3, 4), (0.4, 0.35, 0.2, 0.05))[0]
    values = {key: _value(key, rng) for key in {_key(rng): None for _ in range(size)}}
    pair, separator = rng.choice(DATA["json_pairs"])
    text = separator.join(pair.format(key, _said(value)) for key, value in values.items())
    return _wished(rng, text, values)


def _json_of_sentence(rng: random.Random) -> tuple[str, object]:
    sentence = rng.choice(DATA["sentences"])
    values = {field: _value(field, rng) for field in re.findall(r"{(\w+)}", sentence)}
    return _wished(rng, sentence.format(**values), values)


def _json_list(rng: random.Random) -> tuple[str, object]:
    size = rng.randint(2, 4)
    if rng.random() < 0.5:
        is_of_numbers = rng.random() < 0.4
        items = [rng.randint(0, 99) if is_of_numbers else _word(rng) for _ in range(size)]
        return rng.choice(DATA["json_list_wishes"]).format(", ".join(map(str, items))), items
    field, sentence = rng.choice((("age", "{name} is {age}"), ("city", "{name} lives in {city}")))
    rows = [{"name": _value("name", rng), field: _value(field, rng)} for _ in range(min(size, 3))]
    text = _listed([sentence.format(**row) for row in rows])
    if rng.random() < 0.5:
        return f"{text}. As a JSON list with name and {field}.", rows
    key = rng.choice(("people", "items", "users"))
    return f"{text}. As JSON with {key}, each with name and {field}.", {key: rows}


def _json_of_plain(rng: random.Random, plain: Plain) -> tuple[str, object]:
    """An instruction of another family whose answer is wanted as JSON."""
    family = rng.choice(("arithmetic", "arithmetic", "facts", "sort", "days"))
    inner = plain(family, rng)
    while "\n" in inner.answer or len(inner.answer) >= 40:
        inner = plain(family, rng)
    items: list[object] = [int(item) if item.isdigit() else item for item in inner.answer.split(", ")]
    value: object = inner.answer == "Yes" if family == "facts" else items
    key = rng.choice(("answer", "answer", "result", "value"))
    wish = rng.choice(("As JSON with {}.", "Answer in JSON with {}.", "Write it as JSON with {}."))
    return f"{inner.prompt} {wish.format(key)}", {key: items[0] if family == "arithmetic" else value}


def _draw_tools(rng: random.Random) -> list[Tool]:
    number = rng.choices((1, 2, 3), (0.55, 0.33, 0.12))[0]
    tools: dict[str, dict[str, str]] = {}
    while len(tools) < number:
        name, arguments = rng.choice(_TOOLS)
        if rng.random() < 0.25:
            verb = rng.choice(DATA["tool_verbs"].split())
            noun = spelling_word(rng, 3, 6) if rng.random() < 0.5 else rng.choice(SPELLING_WORDS)
            name = rng.choice((f"{verb}_{noun}", noun))
            kinds = [rng.choice(_ARGUMENTS)[1] for _ in range(rng.choice((0, 1, 1, 1, 2, 2)))]
            arguments = _arguments(rng, kinds)
        elif rng.random() < 0.15:
            arguments = _arguments(rng, list(arguments.values()))
        # Two tools for the weather would leave open which one is right.
        if name.split("_")[-1] not in {other.split("_")[-1] for other in tools}:
            tools[name] = arguments
    return list(tools.items())


def _arguments(rng: random.Random, kinds: Sequence[str]) -> dict[str, str]:
    """Names for arguments of these types."""
    arguments: dict[str, str] = {}
    for kind in kinds:
        known = [name for name, its_kind in _ARGUMENTS if its_kind == kind and name not in arguments]
        name = spelling_word(rng, 3, 6) if rng.random() < 0.2 or not known else rng.choice(known)
        arguments[name] = kind
    return arguments


def _argument_value(rng: random.Random, name: str, kind: str) -> object:
    if kind == "integer":
        return rng.randint(0, 99) if rng.random() < 0.8 else rng.randint(100, 999)
    if kind == "number":
        return rng.randint(0, 99) if rng.random() < 0.6 else rng.randint(1, 99) / 10
    if kind == "boolean":
        return rng.random() < 0.5
    if rng.random() < 0.05:
        return str(rng.randint(0, 999))
    field = "city" if name == "location" else name
    return str(_value(field if field in _VALUES or rng.random() < 0.3 else "item", rng))


def _drawn_call(rng: random.Random, tool: Tool) -> tuple[str, list[str]]:
    """A call, and how a question says its values."""
    name, kinds = tool
    values = {argument: _argument_value(rng, argument, kind) for argument, kind in kinds.items()}
    texts = [_said(value) for value in values.values()]
    for place, kind in enumerate(kinds.values()):
        if kind == "string" and (" " in texts[place] or rng.random() < 0.3):
            texts[place] = f'"{texts[place]}"'
    return f"<tool_call>{compact_json({'name': name, 'arguments': values})}</tool_call>", texts


def _ask(rng: random.Random, tools: Sequence[Tool]) -> tuple[str, str]:
    """A question that one tool answers, or two calls of it do, and the calls."""
    tool = rng.choice(tools)
    name, arguments = tool
    call, texts = _drawn_call(rng, tool)
    chance = rng.random()
    if chance < 0.1 and arguments:
        other_call, other_texts = _drawn_call(rng, tool)
        question = DATA["tool_questions_twice"].get(name)
        if question is None or rng.random() >= 0.7:
            verb, word = rng.choice((("Use", "for"), ("Call", "with"), ("Use", "with")))
            comma = "," if len(texts) > 1 else ""
            question = f"{verb} {name} {word} {_listed(texts)}{comma} and {word} {_listed(other_texts)}."
        return question.format(*texts, *other_texts), f"{call}\n{other_call}"
    if name in DATA["tool_questions"] and chance < 0.65:
        question = rng.choice(DATA["tool_questions"][name]).format(*texts, tool=name)
        return (f"{question} Use the tool." if len(tools) == 1 and rng.random() < 0.1 else question), call
    wording = rng.choice(DATA["tool_wordings" if arguments else "tool_wordings_bare"])
    if arguments and len(tools) == 1 and rng.random() < 0.15:
        wording = rng.choice(("Use the tool for {values}.", "Use the tool with {values}."))
    named = [f"{argument} {text}" for argument, text in zip(arguments, texts, strict=True)]
    equal = ", ".join(f"{argument} = {text}" for argument, text in zip(arguments, texts, strict=True))
    values = {"values": _listed(texts), "named": _listed(named), "equal": equal} if arguments else {}
    return wording.format(tool=name, commas=", ".join(texts), **values), call


def _result(rng: random.Random) -> str:
    """What a tool gives back."""
    chance = rng.random()
    if chance < 0.3:
        return str(rng.randint(0, 999))
    if chance < 0.45:
        text = compact_json({_key(rng): rng.choice((rng.randint(0, 99), _word(rng)))})
        return text.replace(":", rng.choice((":", ": ")))
    if chance < 0.7:
        text = str(rng.choice(DATA["tool_results"]))
        return text.format(city=_value("city", rng), number=rng.randint(0, 99))
    return _word(rng) if chance < 0.85 else " ".join(filler_words(rng, rng.randint(2, 8)))


def _with_results(rng: random.Random, request: str, calls: str) -> tuple[list[TrainingMessage], str]:
    """The messages from the request to the last tool's result, and what the assistant then says."""
    results = [_result(rng) for _ in calls.split("\n")]
    asked = [TrainingMessage("user", request), TrainingMessage("assistant", calls)]
    return [*asked, *(TrainingMessage("tool", result) for result in results)], ", ".join(results)


def _plain_beside_tools(rng: random.Random, plain: Plain, tools: Sequence[Tool]) -> Instruction:
    """An instruction that needs none of the tools: none of their names' words is in it."""
    words = {word for name, _ in tools for word in name.split("_")}
    families = ("arithmetic", "arithmetic", "days", "courtesy", "facts", "spell", "repeat")
    while True:
        inner = plain(rng.choice(families), rng)
        if words.isdisjoint(re.findall("[a-z]+", inner.prompt.lower())):
            return inner
