"""Builds the request of one sequence to an OpenAI-compatible server: a completion with `n` 1. Pure."""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from engine.messages import Submit
from engine.vllm_plugin.protocol import CLAIMS_NAME
from gateway.upstream.base import RequestTask, Wording
from gateway.upstream.capabilities import Capabilities, Capability
from gateway.upstream.openai.server_kinds import taken_of

encode = msgspec.json.encode

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
RERANK_PATH = "/v1/rerank"
MODELS_PATH = "/v1/models"


class PriorityStyle(StrEnum):
    NONE = "none"
    VLLM = "vllm"
    """`priority`, the smaller the earlier (`--scheduling-policy priority`)."""
    SGLANG = "sglang"
    """`priority`, the larger the earlier (`--enable-priority-scheduling`)."""
    SERVICE_TIER = "service_tier"
    """OpenAI's own field, with Fairgate's names of the tiers."""
    FAIRGATE = "fairgate"
    """Signed claims for Fairgate's plug-in in vLLM: tenant, weight, tier, targets, service and lease."""


SERVICE_TIERS = ("interactive", "standard", "batch")
"""By rank."""


class UsageWish(StrEnum):
    END = "end"
    """With the last chunk, as OpenAI does."""
    EACH = "each"
    """With every chunk (`continuous_usage_stats`: vLLM, SGLang, TensorRT-LLM)."""
    NONE = "none"
    """Never: it does not know `stream_options`."""


SHORTEST_REPEATED = 16
MAX_COMPARED = 16_384
"""Searched for a server's words."""


def repeats(wording: Wording, said: str) -> bool:
    """Whether a server's words have some of the request's: a run of `SHORTEST_REPEATED` letters and digits,
    or a whole text of half of that. Of a request that is too long to be compared: always."""
    texts = [_letters(text) for text in _texts([wording.messages, wording.prompt, wording.fields])]
    if sum(map(len, texts)) > MAX_COMPARED:
        return True
    found, sent = _letters(said), "\n".join(texts)
    runs = range(max(1, len(found) - SHORTEST_REPEATED + 1))
    return any(len(text) >= SHORTEST_REPEATED // 2 and text in found for text in texts) or any(
        found[at : at + SHORTEST_REPEATED] in sent for at in runs if found
    )


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def cache_salt(secret: bytes, tenant_id: str) -> str:
    """A tenant's salt for other servers' prefix caches: 43 characters derived from `secret`."""
    digest = hmac.new(secret, tenant_id.encode(), hashlib.sha256).digest()
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


def fields_for(fields: Mapping[str, Any], server: Capabilities, max_tokens: int) -> dict[str, Any]:
    """The fields for this server. `min_tokens` is at most `max_tokens`, which a budget may have lowered."""
    found = taken_of(fields, server.offers)
    if found.get("min_tokens") is not None:
        found["min_tokens"] = min(found["min_tokens"], max_tokens)
    return found


def wanted_of(wording: Wording) -> str:
    """What the answer must be: `tool_calls`, `json` from its first character on, or anything (empty)."""
    if Capability.FORCED_TOOLS in wording.needs:
        return "tool_calls"
    wanted, structured = (wording.fields.get(name) for name in ("response_format", "structured_outputs"))
    is_json = isinstance(wanted, Mapping) and wanted.get("type") in ("json_object", "json_schema")
    is_json = is_json or (isinstance(structured, Mapping) and structured.get("json") is not None)
    is_json = is_json or "guided_json" in wording.fields
    return "json" if is_json and not wording.fields.get("echo") else ""


def path(wording: Wording) -> str:
    match wording.task:
        case RequestTask.EMBED:
            return EMBEDDINGS_PATH
        case RequestTask.RERANK:
            return RERANK_PATH
    return TEXT_PATH if wording.messages is None else CHAT_PATH


def body(
    submit: Submit,
    wording: Wording,
    *,
    model: str,
    max_tokens: int,
    priority: PriorityStyle,
    usage: UsageWish,
    stream: bool,
    cache_salt: str = "",
    claims: str = "",
) -> bytes:
    """`cache_salt`: only prompts with the same one share prefixes; empty: not sent. Unset sampling is left to
    the server. The gateway's decisions override `wording.fields`. `claims`: signed, for our plug-in; empty:
    it has none."""
    found: dict[str, Any] = {**wording.fields, **wording.sampling, "model": model}
    if wording.task is RequestTask.COMPLETE:
        _add_completion(found, submit, wording, max_tokens, usage, is_streamed=stream)
    if cache_salt:
        found["cache_salt"] = cache_salt
    match priority:
        case PriorityStyle.VLLM:
            found["priority"] = submit.tier
        case PriorityStyle.SGLANG:
            found["priority"] = len(SERVICE_TIERS) - 1 - submit.tier
        case PriorityStyle.SERVICE_TIER:
            found["service_tier"] = SERVICE_TIERS[submit.tier]
    if claims:
        found["vllm_xargs"] = {CLAIMS_NAME: claims}
    return encode(found)


def _add_completion(
    found: dict[str, Any],
    submit: Submit,
    wording: Wording,
    max_tokens: int,
    usage: UsageWish,
    *,
    is_streamed: bool,
) -> None:
    found["max_tokens"] = max_tokens
    if submit.sampling.seed is not None:
        found["seed"] = submit.sampling.seed
    if wording.messages is None:
        found["prompt"] = wording.prompt
    else:
        found["messages"] = wording.messages
    if is_streamed:
        found["stream"] = True
        if usage is not UsageWish.NONE:
            found["stream_options"] = {"include_usage": True}
            if usage is UsageWish.EACH:
                found["stream_options"]["continuous_usage_stats"] = True
