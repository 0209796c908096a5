"""Texts of the settings `upstreams`, `engines` and `aliases`.

In the TOML file they are tables:

    [[upstreams]]
    name = "llama-a"                       # of the replica, unique
    url = "http://10.0.0.5:8000/v1"
    model = "meta-llama/Llama-3.3-70B"     # its name there, and here
    tokenizer_dir = "/models/llama-3.3"    # tokenizer.json, chat template: prompts are counted exactly

    [[engines]]
    name = "engine-1"                      # its --engine-id
    address = "tcp://10.0.0.6:5555"
    keys = "/run/secrets/engine-1.keys"    # leave it out: by its name, or those of all engines

    [aliases]
    big = { "meta-llama/Llama-3.3-70B" = 1 }                        # by weight
    safe = { chain = ["llama", "my-model"], max_price = 1.5 }       # the next where one cannot

Flags and environment variables take the same as JSON.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from gateway.membership import ADDRESS, MOST_MEMBERS, NAME
from gateway.upstream.openai.config import MODEL_NAME, UpstreamSettings
from gateway.upstream.openai.request import PriorityStyle
from ops.settings.values import Unaccepted, ValueKind
from tenants.errors import Invalid
from tenants.nouns.alias import Alias, Chain

T = TypeVar("T")
MAX_UPSTREAMS = 256
MAX_ALIASES = 256

Name = Annotated[str, Meta(pattern=MODEL_NAME)]
Weights = dict[Name, Annotated[int, Meta(ge=0, le=1_000_000)]]


class EngineEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine that runs elsewhere."""

    name: Annotated[str, Meta(pattern=rf"^{NAME.pattern}$")]
    address: Annotated[str, Meta(pattern=rf"^{ADDRESS.pattern}$")]
    keys: Annotated[str, Meta(max_length=4096)] = ""
    """The gateway's file of keys."""


class ChainFields(msgspec.Struct, forbid_unknown_fields=True):
    """A chain as it is written."""

    chain: list[Name]
    max_price: float = 1.0


def upstreams() -> ValueKind[tuple[UpstreamSettings, ...]]:
    def parse(text: str) -> tuple[UpstreamSettings, ...]:
        parsed: tuple[UpstreamSettings, ...] = _decoded(text, tuple[UpstreamSettings, ...]) if text else ()
        if len(parsed) > MAX_UPSTREAMS:
            raise Unaccepted(f"{len(parsed)} of them; the most is {MAX_UPSTREAMS}")
        names = [server.name for server in parsed]
        for name in names:
            if names.count(name) > 1:
                raise Unaccepted(f"the name {name!r} is there twice")
        for server in parsed:
            dirs = {other.tokenizer_dir for other in parsed if other.pool_name == server.pool_name}
            if len(dirs) > 1:
                raise Unaccepted(f"replicas of {server.pool_name!r} name different tokenizer_dirs")
            _require_plugin_keys(server)
        return parsed

    return ValueKind("[[upstreams]] tables with name, url and model (JSON elsewhere)", parse)


def engines() -> ValueKind[tuple[EngineEntry, ...]]:
    def parse(text: str) -> tuple[EngineEntry, ...]:
        parsed: tuple[EngineEntry, ...] = _decoded(text, tuple[EngineEntry, ...]) if text else ()
        if len(parsed) > MOST_MEMBERS:
            raise Unaccepted(f"{len(parsed)} of them; the most is {MOST_MEMBERS}")
        for what in ("name", "address"):
            said = [getattr(entry, what) for entry in parsed]
            if twice := next((each for each in said if said.count(each) > 1), None):
                raise Unaccepted(f"the {what} {twice!r} is there twice")
        return parsed

    return ValueKind(
        "[[engines]] tables with name and address (JSON elsewhere)",
        parse,
        lambda entries: ", ".join(f"{entry.name} at {entry.address}" for entry in entries),
    )


def _require_plugin_keys(server: UpstreamSettings) -> None:
    has_plugin = server.priority is PriorityStyle.FAIRGATE
    if has_plugin and not server.plugin_key_file:
        raise Unaccepted(
            f'{server.name}: priority = "fairgate" needs plugin_key_file, the file that'
            " FAIRGATE_VLLM_KEY_FILE names on its side"
        )
    if not has_plugin and (server.plugin_key_file or server.plugin_socket):
        raise Unaccepted(
            f'{server.name}: plugin_key_file and plugin_socket go with priority = "fairgate" only'
        )


def aliases() -> ValueKind[dict[str, Alias]]:
    """Names and the models that they mean: with weights, or as a chain."""

    def parse(text: str) -> dict[str, Alias]:
        try:
            parsed = msgspec.convert(json.loads(text) if text else {}, dict[Name, dict[str, Any]])
        except json.JSONDecodeError as error:
            raise Unaccepted(f"not JSON: {error}") from None
        except msgspec.ValidationError as error:
            raise Unaccepted(str(error)) from None
        if len(parsed) > MAX_ALIASES:
            raise Unaccepted(f"{len(parsed)} of them; the most is {MAX_ALIASES}")
        return {name: _alias(name, means) for name, means in parsed.items()}

    return ValueKind(
        'an [aliases] table, such as big = {my-model = 1}, or big = {chain = ["my-model", "other"],'
        " max_price = 1.5} (JSON elsewhere)",
        parse,
    )


def _alias(name: str, means: dict[str, Any]) -> Alias:
    """A chain where a key of one has a value that is no weight: a model may be called `chain`, too."""
    is_chain = any(not isinstance(means.get(key, 0), int) for key in ChainFields.__struct_fields__)
    try:
        if not is_chain:
            return msgspec.convert(means, Weights)
        fields = msgspec.convert(means, ChainFields)
        return Chain(tuple(fields.chain), fields.max_price)
    except (msgspec.ValidationError, Invalid) as error:
        raise Unaccepted(f"{name!r}: {error}") from None


def _decoded(text: str, into: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=into)
    except msgspec.ValidationError as error:
        raise Unaccepted(str(error)) from None
    except msgspec.DecodeError as error:
        raise Unaccepted(f"not JSON: {error}") from None
