"""Settings of another server that speaks OpenAI's API, and what is needed to use it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, field

from gateway.upstream.capabilities import Capability
from gateway.upstream.health.breaker import BreakerRule
from gateway.upstream.openai.request import PriorityStyle, UsageWish
from gateway.upstream.openai.server_kinds import ServerKind

TOKENS_PER_PAUSE = 64
"""Tokens of a whole answer that may take as long as one pause of a stream."""
WHOLE_TOKENS = 512
AUTO: Literal["auto"] = "auto"
MODEL_NAME = r"^[A-Za-z0-9._:/@+-]{1,128}$"
FieldName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Seconds = Annotated[float, Meta(gt=0, le=3600)]


class PrefixCache(StrEnum):
    """How a server's prefix cache is kept apart by tenant, and whether tenants see its hits."""

    AUTO = "auto"
    """`salted` where its list of models says that it is vLLM or SGLang; else `hidden`."""
    SALTED = "salted"
    """Each request carries `cache_salt`, its tenant's own; hits are passed on, and have the cached price."""
    HIDDEN = "hidden"
    """The server is not asked for it. No hit is passed on, and none has the cached price."""
    SHARED = "shared"
    """Tenants share the cache and see its hits, so one can find out what another one has sent."""


class UpstreamSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One server that speaks OpenAI's API: one replica of one model."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    url: Annotated[str, Meta(pattern=r"^https?://[!-~]{1,500}$")]
    model: Annotated[str, Meta(pattern=MODEL_NAME)]
    pool: Annotated[str, Meta(pattern=r"^([A-Za-z0-9._:/@+-]{1,128})?$")] = ""
    """The model's name here; empty: as there. Replicas of one name share one queue."""
    api_key_env: Annotated[str, Meta(pattern=r"^([A-Za-z_][A-Za-z0-9_]{0,127})?$")] = ""
    """Environment variable that holds its API key."""
    max_concurrent: Annotated[int, Meta(ge=1, le=100_000)] = 32
    """Most sequences of this gateway that run on it."""
    tokenizer_dir: str = ""
    """Directory with the model's tokenizer and chat template; empty: prompts are estimated, with a margin."""
    context_tokens: Annotated[int, Meta(ge=0, le=100_000_000)] = 0
    """0: as the server says."""
    priority: PriorityStyle = PriorityStyle.NONE
    """How a request's tier is sent to it."""
    plugin_key_file: Annotated[str, Meta(max_length=4096)] = ""
    """File with the key that this gateway and the plug-in in vLLM share; with `priority = "fairgate"`."""
    plugin_socket: Annotated[str, Meta(max_length=100)] = ""
    """UNIX socket of the plug-in, on the same host; empty: its messages go over the server's HTTP."""
    usage: UsageWish = UsageWish.END
    """When it is asked for its token counts."""
    prefix_cache: PrefixCache = PrefixCache.AUTO
    """How its prefix cache is kept apart by tenant."""
    kind: ServerKind = field(default=ServerKind.AUTO, name="server")
    """What it runs: whose request fields it may be passed."""
    capabilities: Literal["auto"] | Annotated[tuple[Capability, ...], Meta(max_length=32)] = AUTO
    """What it can do beyond plain text; `auto`: it is tried, with requests of one token. With `embeddings` or
    `rerank` it generates text only where `text` is named, too."""
    fields: Annotated[tuple[FieldName, ...], Meta(max_length=64)] = ()
    """Further request fields that it is passed, of those that may be passed to any server."""
    whole_tokens: Annotated[int, Meta(ge=0, le=65_536)] = WHOLE_TOKENS
    """Longest answer that is asked for whole, where its client does not read a stream and all of its tokens
    are covered. A longer one is streamed to here all the same: its tokens so far are known, and a server
    that stalls is noticed. 0: every answer is streamed to here."""
    image_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 2_048
    """Input tokens that are held for each image; charged is what the server counts, up to that."""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=2**30)] = 20 * 2**20
    """Largest request body with images, where it takes them; the rest is still within
    `gateway.body_limit`."""
    health_path: Annotated[str, Meta(pattern=r"^(/[!-~]{0,200})?$")] = field(default="", name="health")
    """Path to ask instead of /v1/models, of servers whose list does not name what they serve."""
    metrics_path: Annotated[str, Meta(pattern=r"^(/[!-~]{0,200})?$")] = field(default="", name="metrics")
    """Path of its Prometheus page, such as /metrics; empty: its load is not looked at."""
    connect_s: Seconds = 5.0
    first_byte_s: Seconds = 120.0
    """From sending the request to the first byte of the answer: its queue and the prefill."""
    between_s: Seconds = 60.0
    """From one piece of the answer to the next."""

    @property
    def pool_name(self) -> str:
        return self.pool or self.model


class OpenAIServer(UpstreamSettings, frozen=True):
    """One server, with its API key."""

    api_key: str = ""
    plugin_key: bytes = b""
    probe_s: float = 5.0
    breaker: BreakerRule = field(default_factory=BreakerRule)

    def __repr__(self) -> str:
        return f"OpenAIServer({self.name!r}, {self.url!r}, {self.model!r})"

    def whole_s(self, tokens: int) -> float:
        """From request to first byte of a whole answer, which comes with the end of at most `tokens`."""
        return self.first_byte_s + self.between_s * -(-tokens // TOKENS_PER_PAUSE)
