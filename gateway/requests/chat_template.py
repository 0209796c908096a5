"""A model's chat template: read from its files, rendered in a sandboxed Jinja as transformers does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox

from engine.grammar.forms import read_json, template_source

REWRITING = frozenset(
    (
        "replace", "translate", "format", "removeprefix", "removesuffix", "lower", "upper", "capitalize",
        "title", "swapcase", "casefold", "split", "rsplit", "splitlines", "partition", "rpartition", "join",
        "reverse",
    )
)  # fmt: skip
"""Filters and methods by which a template can make a special token of texts that spell none."""


class PromptRefused(Exception):
    """The prompt is unusable; the message is fit for the caller. `field` to blame; empty: all of it."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class TokenizerMissing(Exception):
    """The model directory lacks what is needed to tokenise."""


class ChatTemplate:
    """Thread-safe."""

    def __init__(self, source: str, named_tokens: dict[str, str]) -> None:
        """`named_tokens`: bos_token etc. by name. Raises `TokenizerMissing`."""
        self.source = source
        self._named_tokens = named_tokens
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except jinja2.TemplateError as error:
            raise TokenizerMissing(f"the chat template of the model cannot be read: {error}") from None
        self._reads = jinja2.meta.find_undeclared_variables(tree)
        used = {node.name for node in tree.find_all(jinja2.nodes.Filter)}
        used |= {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
        self.rewrites = not REWRITING.isdisjoint(used)

    @classmethod
    def of_model(cls, model_dir: Path) -> ChatTemplate | None:
        """None: the directory has no template. Raises `TokenizerMissing`."""
        config = read_json(model_dir / "tokenizer_config.json")
        source = template_source(config, model_dir)
        return None if source is None else cls(source, _named_tokens(config, model_dir))

    def reads(self, variable: str) -> bool:
        return variable in self._reads

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        is_opened: bool = True,
        tools: Sequence[dict[str, Any]] = (),
        effort: str | None = None,
    ) -> str:
        """`is_opened`: with an answer's opening. Raises `PromptRefused` with the template's message."""
        said = {} if effort is None else {"reasoning_effort": effort}
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=is_opened,
                tools=list(tools) or None,
                **self._named_tokens,
                **said,
            )
        except jinja2.TemplateError as error:
            raise PromptRefused(f"the model's chat template does not take it: {error}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
            raise PromptRefused("the model's chat template cannot render these messages") from None


def _named_tokens(config: dict[str, Any], model_dir: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in (read_json(model_dir / "special_tokens_map.json"), config):
        for name, value in source.items():
            if not name.endswith("_token"):
                continue
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _environment() -> jinja2.Environment:
    """As transformers': same whitespace rules, same helpers."""

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
    return environment
