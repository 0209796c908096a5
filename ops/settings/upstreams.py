"""Texts of the settings `upstreams` and `aliases`.

In the TOML file they are tables:

    [[upstreams]]
    name = "llama-a"                       # of the replica, unique
    url = "http://10.0.0.5:8000/v1"
    model = "meta-llama/Llama-3.3-70B"     # its name there, and here
    tokenizer_dir = "/models/llama-3.3"    # tokenizer.json, chat template: prompts are counted exactly

    [aliases]
    big = { "meta-llama/Llama-3.3-70B" = 1 }

Flags and environment variables take the same as JSON.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from gateway.upstream.openai.config import MODEL_NAME, UpstreamSettings
from ops.settings.values import Unaccepted, ValueKind

T = TypeVar("T")
MAX_UPSTREAMS = 256
MAX_ALIASES = 256

Aliases = dict[
    Annotated[str, Meta(pattern=MODEL_NAME)],
    dict[Annotated[str, Meta(pattern=MODEL_NAME)], Annotated[int, Meta(ge=0, le=1_000_000)]],
]


def upstreams() -> ValueKind[tuple[UpstreamSettings, ...]]:
    """A list of servers."""

    def parse(text: str) -> tuple[UpstreamSettings, ...]:
        found: tuple[UpstreamSettings, ...] = _decoded(text, tuple[UpstreamSettings, ...]) if text else ()
        if len(found) > MAX_UPSTREAMS:
            raise Unaccepted(f"{len(found)} of them; the most is {MAX_UPSTREAMS}")
        names = [each.name for each in found]
        for name in names:
            if names.count(name) > 1:
                raise Unaccepted(f"the name {name!r} is there twice")
        for each in found:
            dirs = {other.tokenizer_dir for other in found if other.pool_name == each.pool_name}
            if len(dirs) > 1:
                raise Unaccepted(f"replicas of {each.pool_name!r} name different tokenizer_dirs")
        return found

    return ValueKind("[[upstreams]] tables with name, url and model (JSON elsewhere)", parse)


def aliases() -> ValueKind[dict[str, dict[str, int]]]:
    """Names and the models that they mean, with weights."""

    def parse(text: str) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = _decoded(text, Aliases) if text else {}
        if len(found) > MAX_ALIASES:
            raise Unaccepted(f"{len(found)} of them; the most is {MAX_ALIASES}")
        return found

    return ValueKind("an [aliases] table, such as big = {my-model = 1} (JSON elsewhere)", parse)


def _decoded(text: str, into: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=into)
    except msgspec.ValidationError as error:
        raise Unaccepted(str(error)) from None
    except msgspec.DecodeError as error:
        raise Unaccepted(f"not JSON: {error}") from None
