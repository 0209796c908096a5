"""Requests for other servers: what they can do beyond plain text, and what they refuse.

Each prompt occurs once per server, so that a stand-in can identify a request by it.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
SEED = 7
TOKENS = 16
TOOL_TOKENS = 64
TOOL_BEGIN = 631
"""Id of the text model's token that begins a tool call, in the form in which the template has them."""
COMPACT: dict[str, Any] = {"logit_bias": dict.fromkeys(("201", "202", "205", "224"), -100)}
"""Bans whitespace, which JSON may have anywhere: a model that knows no JSON would go on with it."""
THINK_END = 633
"""Id of the image model's token that ends its reasoning."""
LONG_PROMPT = 2500
"""Words, each of at least a token: longer than the context."""


class SetRequest(msgspec.Struct, frozen=True):
    name: str
    body: dict[str, Any]
    """Without `model` and the fields of streaming."""
    path: str = CHAT
    is_streamed: bool = True
    """It is also asked as a stream."""


def tool(name: str = "add", words: Sequence[str] = ("one", "two")) -> dict[str, Any]:
    """A function with one argument out of a few words: an answer of a few tokens."""
    parameters = _object({"a": {"enum": list(words)}})
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


def schema(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "json_schema",
        "json_schema": {"name": name, "schema": _object(properties), "strict": True},
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def picture(red: int, green: int, blue: int, side: int = 4) -> dict[str, Any]:
    """An image part: a PNG of one colour as a data URL."""
    rows = (b"\0" + bytes((red, green, blue)) * side) * side

    def block(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    head = block(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + head + block(b"IDAT", zlib.compress(rows)) + block(b"IEND", b"")
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


HINT: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
"""For Anthropic's cache; clients of several services send it to all of them."""


def says(text: str, *parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": text}, *parts] if parts else text}]


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Add one to two."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":"one"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "3"},
]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
CALL: dict[str, Any] = {"temperature": 0, "max_tokens": TOOL_TOKENS, "tools": [tool()]}
FORCED: dict[str, Any] = CALL | {
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "logit_bias": {str(TOOL_BEGIN): 100} | COMPACT["logit_bias"],
}
"""llama.cpp lets text come before the call; the bias makes the call come at once, without spaces."""
OWN_DEFAULTS: dict[str, Any] = {"temperature": 0.01, "top_k": 1, "repetition_penalty": 1.3}
NEUTRAL: dict[str, Any] = {"temperature": 1, "top_k": -1, "top_p": 1, "repetition_penalty": 1}
WORD = {"word": {"enum": ["one", "two", "three"]}}


class RequestSet:
    """Collects the requests of a server; each has a prompt of its own."""

    def __init__(self, task: str = "Count from {first} to {last}.") -> None:
        self.asked: list[SetRequest] = []
        self._form = task

    def chat(
        self, name: str, messages: list[dict[str, Any]] | None = None, *, streamed: bool = True, **fields: Any
    ) -> None:
        body = {"messages": messages or says(self._task())} | GREEDY | fields
        self._add(name, body, CHAT, streamed)

    def text(self, name: str, *, streamed: bool = True, **fields: Any) -> None:
        prompt = f"<|im_start|>user\n{self._task()}<|im_end|>\n<|im_start|>assistant\n"
        self._add(name, {"prompt": prompt} | GREEDY | fields, COMPLETIONS, streamed)

    def _task(self) -> str:
        first = len(self.asked) + 1
        return self._form.format(first=first, last=first + 7)

    def _add(self, name: str, body: dict[str, Any], path: str, is_streamed: bool) -> None:
        given = {field: value for field, value in body.items() if value is not None}
        self.asked.append(SetRequest(name, given, path, is_streamed))


def sampling(wanted: RequestSet) -> None:
    wanted.chat("plain text")
    wanted.chat("system prompt", [{"role": "system", "content": "Be brief."}, *says("Spell cat.")])
    wanted.chat(
        "several turns", [*says("Add 2 and 3."), {"role": "assistant", "content": "5"}, *says("Add 4 and 3.")]
    )
    wanted.chat("stop word", stop="5")
    wanted.chat("stop words", stop=["9", "8"], max_tokens=24)
    wanted.chat("cut by its length", max_tokens=3)
    wanted.chat("sampled with a seed", temperature=1.5, seed=SEED)
    wanted.chat("nucleus", temperature=1.2, top_p=0.9, seed=SEED)


def penalties(wanted: RequestSet) -> None:
    wanted.chat("presence penalty", presence_penalty=1.5)
    wanted.chat("frequency penalty", frequency_penalty=1.5)
    wanted.chat("repetition penalty", repetition_penalty=1.3)
    wanted.chat("fewest of the likely", temperature=1.2, top_k=5, min_p=0.05, seed=SEED)


def logprobs(wanted: RequestSet) -> None:
    wanted.chat("log probabilities", logprobs=True, top_logprobs=1, max_tokens=4)
    wanted.chat("top log probabilities", logprobs=True, top_logprobs=3, max_tokens=4)


def tools(wanted: RequestSet) -> None:
    wanted.chat("tool required", **FORCED)
    wanted.chat("one of two tools required", **FORCED | {"tools": [tool(), tool("sub", ["six"])]})
    wanted.chat("tools, the server's choice", **CALL | {"max_tokens": TOKENS}, tool_choice="auto")
    wanted.chat("tools forbidden", **CALL | {"max_tokens": TOKENS}, tool_choice="none")
    wanted.chat("history of tools", [*HISTORY, *says("Say it in a word.")])
    wanted.chat("history and tools", [*HISTORY, *says("And now?")], **FORCED)
    wanted.chat("several tool calls", **FORCED | {"parallel_tool_calls": True})
    wanted.chat("tool call cut by its length", **FORCED | {"max_tokens": 9})


def schemas(wanted: RequestSet) -> None:
    wanted.chat("JSON of a schema", response_format=schema("word", WORD), max_tokens=48, **COMPACT)
    nested = schema("pair", {"first": schema("x", WORD)["json_schema"]["schema"]})
    wanted.chat("JSON of a nested schema", response_format=nested, max_tokens=72, **COMPACT)
    wanted.chat("JSON of any kind", response_format={"type": "json_object"}, max_tokens=24, **COMPACT)
    wanted.chat("text asked for", response_format={"type": "text"})
    wanted.chat("JSON cut by its length", response_format=schema("word", WORD), max_tokens=5, **COMPACT)


def completions(wanted: RequestSet) -> None:
    wanted.text("text completion")
    wanted.text("text completion with a stop word", stop=["5"])
    wanted.text("text completion with a seed", temperature=1.5, seed=SEED)


def vllm() -> list[SetRequest]:
    wanted = RequestSet()
    for add in (sampling, penalties, logprobs, tools, schemas, completions):
        add(wanted)
    wanted.chat("longest answer by its newer name", max_tokens=None, max_completion_tokens=5)
    wanted.chat("logit bias", logit_bias={"20": 50}, max_tokens=6)
    wanted.chat("named tool", **FORCED | {"tool_choice": {"type": "function", "function": {"name": "add"}}})
    wanted.chat("tool call with log probabilities", **FORCED, logprobs=True, top_logprobs=1)
    wanted.chat("regular expression", structured_outputs={"regex": "[a-c]{3}-[0-9]{2}"}, max_tokens=24)
    wanted.chat("one of several words", structured_outputs={"choice": ["yes", "no", "maybe"]})
    wanted.chat("grammar", structured_outputs={"grammar": 'root ::= "on" | "off"'})
    word = {"json": schema("x", WORD)["json_schema"]["schema"]}
    wanted.chat("JSON by vLLM's field", structured_outputs=word, max_tokens=24, **COMPACT)
    wanted.chat("fewest tokens", min_tokens=20, max_tokens=24)
    wanted.chat("end ignored", ignore_eos=True, max_tokens=24)
    wanted.chat("stop tokens", stop_token_ids=[24], max_tokens=24)
    wanted.chat("stop word kept", stop=["4"], include_stop_str_in_output=True, max_tokens=24)
    wanted.chat("special tokens shown", skip_special_tokens=False, max_tokens=24)
    wanted.chat("bad words", bad_words=["4", " 5"])
    wanted.chat("allowed tokens", allowed_token_ids=[20, 21, 22, 23, 24], max_tokens=5)
    wanted.chat("template's arguments", chat_template_kwargs={"some_switch": True})
    wanted.text("text completion with log probabilities", logprobs=2, max_tokens=4)
    wanted.text("text completion of an expression", structured_outputs={"regex": "[a-c]{3}"})
    _errors(wanted)
    wanted.chat("refused: expression", structured_outputs={"regex": "(["}, streamed=False)
    wanted.chat("refused: grammar", structured_outputs={"grammar": "root ::= ("}, streamed=False)
    wanted.chat("refused: bad word", bad_words=[""], streamed=False)
    divide = {"type": "function", "function": {"name": "divide"}}
    wanted.chat("refused: tool of another name", **CALL, tool_choice=divide, streamed=False)
    beside_text(wanted)
    return wanted.asked


def beside_text(wanted: RequestSet) -> None:
    wanted.text("prompt echoed", echo=True, max_tokens=4)
    wanted.text("prompt echoed with log probabilities", echo=True, logprobs=1, max_tokens=2)
    wanted.text(
        "prompt of ids echoed", prompt=[20, 21, 22, 23, 24, 25, 26], echo=True, logprobs=1, max_tokens=2
    )
    wanted.text("ids of a text's tokens", return_token_ids=True, max_tokens=4)
    wanted.chat("ids of tokens", return_token_ids=True, max_tokens=4)
    wanted.chat("log probabilities of the prompt", prompt_logprobs=1, max_tokens=2, streamed=False)
    wanted.chat("hint for a cache", [{"role": "user", "content": [{"type": "text", "text": "Hm."} | HINT]}])


def vllm_defaults() -> list[SetRequest]:
    """Untaught tasks, so that another temperature or number of candidates gives another text."""
    wanted = RequestSet("Why {first} and not {last}?")
    for ask, kind in ((wanted.chat, ""), (wanted.text, ", as a text completion")):
        ask(f"nothing of sampling{kind}", temperature=None)
        ask(f"the defaults said{kind}", **OWN_DEFAULTS)
        ask(f"neutral values{kind}", **NEUTRAL, seed=SEED)
        ask(f"neutral penalty{kind}", temperature=None, repetition_penalty=1)
        ask(f"more candidates{kind}", temperature=None, top_k=50, seed=SEED)
    return wanted.asked


def _errors(wanted: RequestSet) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nonsense"}}}
    wanted.chat("refused: schema", response_format=bad, streamed=False)
    wanted.chat("refused: context", says("word " * LONG_PROMPT), streamed=False)


def vllm_images() -> list[SetRequest]:
    wanted = RequestSet()
    thought: dict[str, Any] = {
        "logit_bias": {str(THINK_END): 100},
        "structured_outputs": {"regex": "[a-z]{3,6} [a-z]{2,4}</think>[a-z]{3,5}"},
        "max_tokens": 32,
    }
    one, two = picture(200, 20, 10), picture(10, 200, 20, side=9)
    wanted.chat("image", says("What is it?", one))
    wanted.chat("image first", [{"role": "user", "content": [one, {"type": "text", "text": "Its colour?"}]}])
    wanted.chat("another image", says("And it?", two))
    low = {"type": "image_url", "image_url": one["image_url"] | {"detail": "low"}}
    wanted.chat("image of low detail", says("In short?", low))
    earlier = [*says("Hello."), {"role": "assistant", "content": "Yes?"}]
    wanted.chat("image after a turn", [*earlier, *says("This one?", two)])
    json_word: dict[str, Any] = {"response_format": schema("word", WORD), "max_tokens": 48} | COMPACT
    wanted.chat("image and a schema", says("As JSON?", one), **json_word)
    wanted.chat("image and log probabilities", says("How sure?", one), logprobs=True, max_tokens=3)
    wanted.chat("parts of text only", [{"role": "user", "content": [{"type": "text", "text": "No image."}]}])
    wanted.chat("reasoning and answer", **thought)
    wanted.chat("reasoning only", max_tokens=6)
    wanted.chat("reasoning with effort", **thought, reasoning_effort="low")
    wanted.chat("reasoning left out", **thought, include_reasoning=False)
    wanted.chat("reasoning and log probabilities", **thought, logprobs=True)
    wanted.chat("reasoning about an image", says("Think of it.", one), **thought)
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    wanted.chat("refused: broken image", says("Broken?", broken), streamed=False)
    wanted.chat("refused: two images", says("Both?", one, two), streamed=False)
    return wanted.asked


def llama_cpp() -> list[SetRequest]:
    wanted = RequestSet()
    for add in (sampling, logprobs, tools, schemas, completions, _errors):
        add(wanted)
    return wanted.asked


def transformers() -> list[SetRequest]:
    wanted = RequestSet()
    sampling(wanted)
    wanted.chat("history of tools", [*HISTORY, *says("Say it in a word.")])
    wanted.text("text completion")
    return wanted.asked


def llama_cpp_embeddings() -> list[SetRequest]:
    asked: dict[str, dict[str, Any]] = {
        "embedding": {"input": "Count from 1 to 3."},
        "embeddings": {"input": ["one", "two", "three"]},
        "embedding in base64": {"input": "again", "encoding_format": "base64"},
    }
    return [SetRequest(name, body, EMBEDDINGS, is_streamed=False) for name, body in asked.items()]
