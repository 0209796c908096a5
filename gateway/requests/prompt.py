"""Renders and tokenises prompts.

The chat template is rendered and the text tokenised with the model's own files, by `tokenizers` and a
sandboxed Jinja: neither torch nor transformers. So the reservation knows the exact input.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer


class PromptRefused(Exception):
    """A conversation that the template does not take; the message is fit for the caller."""


class TokenizerMissing(Exception):
    """The model directory lacks what is needed to tokenise; the message says what and what to do."""


class PromptRenderer:
    """Renders and tokenises for one model directory. Thread-safe: it holds no state between calls."""

    def __init__(self, model_dir: Path) -> None:
        """Raises `TokenizerMissing`."""
        tokenizer_file = model_dir / "tokenizer.json"
        if not tokenizer_file.is_file():
            raise TokenizerMissing(
                f"{model_dir} has no tokenizer.json. Save the model's fast tokenizer there:"
                " AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_file))
        except Exception as error:  # the Rust side raises bare Exception
            raise TokenizerMissing(f"{tokenizer_file} cannot be read as a tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json(model_dir / "tokenizer_config.json")
        self._special_tokens = _special_tokens(config, model_dir)
        self._template = _compile(_template_source(config, model_dir))

    @property
    def has_chat_template(self) -> bool:
        """Without one only `/v1/completions` works."""
        return self._template is not None

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The conversation as the model was trained to read it, with the opening of an answer.

        Raises `PromptRefused` with the template's own words, or when there is no template.
        """
        if self._template is None:
            raise PromptRefused("this model has no chat template; use /v1/completions")
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, tools=None, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            raise PromptRefused(f"the model's chat template does not take it: {error}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
            raise PromptRefused("the model's chat template cannot render these messages") from None

    def chat_tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation; the template writes the special tokens."""
        return list(self._tokenizer.encode(self.render(messages), add_special_tokens=False).ids)

    def text_tokens(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer itself adds."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def count(self, text: str) -> int:
        """How many tokens `text` is, without special ones."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


class EstimatedRenderer:
    """Stands in where a model's tokenizer is not known: counts bytes, rather too many tokens than too few.

    The ids are no token ids; prompts that begin alike have ids that begin alike.
    """

    BYTES_PER_TOKEN = 2
    """A token of text is rarely shorter: English has about four, Chinese and code three."""
    MESSAGE_TOKENS = 8
    """What a chat template adds to a message, and once to all of them."""
    has_chat_template = True
    vocabulary = 2**31 - 1

    def chat_tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Ids of a conversation."""
        ids = [0] * self.MESSAGE_TOKENS
        for message in messages:
            ids += [0] * self.MESSAGE_TOKENS
            ids += self.text_tokens(f"{message.get('role')}{message.get('name') or ''}")
            ids += self.text_tokens(str(message.get("content") or ""))
        return ids

    def text_tokens(self, text: str) -> list[int]:
        """Ids of a plain prompt."""
        data = text.encode("utf-8", "surrogatepass")
        return list(memoryview(data + b"\0" * (len(data) % 2)).cast("H"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _special_tokens(config: dict[str, Any], model_dir: Path) -> dict[str, str]:
    """bos_token and its like by name, as templates refer to them."""
    found: dict[str, str] = {}
    for source in (_read_json(model_dir / "special_tokens_map.json"), config):
        for name, value in source.items():
            if not name.endswith("_token"):
                continue
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _template_source(config: dict[str, Any], model_dir: Path) -> str | None:
    own_file = model_dir / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates: the one called "default"
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _compile(source: str | None) -> jinja2.Template | None:
    """The environment that transformers gives chat templates: same whitespace rules, same helpers."""
    if source is None:
        return None

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    def strftime_now(layout: str) -> str:
        return datetime.now().astimezone().strftime(layout)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise TokenizerMissing(f"the chat template of the model cannot be read: {error}") from None
