"""Which other servers run models for this gateway, and which names do models have? The text of two settings.

In the TOML file they are tables:

    [[upstreams]]
    name = "llama-a"                       # of the replica, unique
    url = "http://10.0.0.5:8000/v1"
    model = "meta-llama/Llama-3.3-70B"     # its name over there, and here
    tokenizer_dir = "/models/llama-3.3"    # tokenizer.json, chat template: prompts are counted exactly

    [aliases]
    big = { "meta-llama/Llama-3.3-70B" = 1 }

Flags and environment variables take the same as JSON.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from gateway.upstream.openai.config import WHOLE_TOKENS
from ops.settings.values import Unaccepted, ValueKind

T = TypeVar("T")
MODEL_NAME = r"^[A-Za-z0-9._:/@+-]{1,128}$"
MAX_UPSTREAMS = 256
MAX_ALIASES = 256

Seconds = Annotated[float, Meta(gt=0, le=3600)]


class UpstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server that speaks OpenAI's API: one replica of one model."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    url: Annotated[str, Meta(pattern=r"^https?://[!-~]{1,500}$")]
    model: Annotated[str, Meta(pattern=MODEL_NAME)]
    pool: Annotated[str, Meta(pattern=r"^([A-Za-z0-9._:/@+-]{1,128})?$")] = ""
    """The model's name here; empty: as over there. Replicas of one name share one queue."""
    api_key_env: Annotated[str, Meta(pattern=r"^([A-Za-z_][A-Za-z0-9_]{0,127})?$")] = ""
    """Environment variable that holds its API key."""
    max_concurrent: Annotated[int, Meta(ge=1, le=100_000)] = 32
    """Sequences that this gateway sends to it at once."""
    tokenizer_dir: str = ""
    """Directory with the model's tokenizer and chat template; empty: prompts are estimated, with a margin."""
    context_tokens: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    """0: as it says itself."""
    priority: Literal["none", "vllm", "sglang", "service_tier"] = "none"
    """How it is told a request's tier."""
    usage: Literal["end", "each", "none"] = "end"
    """When it is asked for its token counts."""
    whole_tokens: Annotated[int, Meta(ge=0, le=65_536)] = WHOLE_TOKENS
    """Answers of at most so many tokens that nobody reads as a stream are asked for whole; 0: none."""
    health: Annotated[str, Meta(pattern=r"^(/[!-~]{0,200})?$")] = ""
    """Path to ask instead of /v1/models, of servers whose list does not name what they serve."""
    metrics: Annotated[str, Meta(pattern=r"^(/[!-~]{0,200})?$")] = ""
    """Path of its Prometheus page, such as /metrics; empty: its load is not looked at."""
    connect_s: Seconds = 5.0
    first_byte_s: Seconds = 120.0
    between_s: Seconds = 60.0

    @property
    def pool_name(self) -> str:
        """The model's name here."""
        return self.pool or self.model


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
