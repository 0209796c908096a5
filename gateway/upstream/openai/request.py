"""Builds the request of one sequence to an OpenAI-compatible server.

Pure. One sequence is one completion with `n` 1, as a stream or whole.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from engine.messages import SamplingParams, Submit
from gateway.upstream.base import Wording

encode = msgspec.json.encode

CHAT_PATH = "/v1/chat/completions"
TEXT_PATH = "/v1/completions"
MODELS_PATH = "/v1/models"


class PriorityStyle(StrEnum):
    """How a server is given a request's priority."""

    NONE = "none"
    VLLM = "vllm"
    """`priority`, the smaller the earlier (`--scheduling-policy priority`)."""
    SGLANG = "sglang"
    """`priority`, the larger the earlier (`--enable-priority-scheduling`)."""
    SERVICE_TIER = "service_tier"
    """OpenAI's own field, with Fairgate's names of the tiers."""


SERVICE_TIERS = ("interactive", "standard", "batch")
"""By rank."""


class UsageWish(StrEnum):
    """When a server is asked for its token count. A whole answer always has it."""

    END = "end"
    """With the last chunk, as OpenAI does."""
    EACH = "each"
    """With every chunk (`continuous_usage_stats`: vLLM, SGLang, TensorRT-LLM)."""
    NONE = "none"
    """Never: it does not know `stream_options`."""


_DEFAULTS = SamplingParams()
_SAME_NAMES = tuple(
    (name, getattr(_DEFAULTS, name))
    for name in (
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "ignore_eos",
    )
)
"""Fields with the same name in OpenAI's API, and their defaults."""


def path(wording: Wording) -> str:
    """The path of the endpoint."""
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
) -> bytes:
    """The request's body. Fields at their OpenAI defaults are left out, but for the temperature: some servers
    apply the model's own default."""
    sampling = submit.sampling
    found: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
    }
    if wording.messages is None:
        found["prompt"] = wording.prompt
    else:
        found["messages"] = wording.messages
    if stream:
        found["stream"] = True
        if usage is not UsageWish.NONE:
            found["stream_options"] = {"include_usage": True}
            if usage is UsageWish.EACH:
                found["stream_options"]["continuous_usage_stats"] = True
    for name, default in _SAME_NAMES:
        value = getattr(sampling, name)
        if value != default:
            found[name] = value
    if sampling.stop:
        found["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        found["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.logprobs is not None:
        if wording.messages is None:
            found["logprobs"] = sampling.logprobs
        else:
            found["logprobs"] = True
            found["top_logprobs"] = sampling.logprobs
    match priority:
        case PriorityStyle.VLLM:
            found["priority"] = submit.tier
        case PriorityStyle.SGLANG:
            found["priority"] = len(SERVICE_TIERS) - 1 - submit.tier
        case PriorityStyle.SERVICE_TIER:
            found["service_tier"] = SERVICE_TIERS[submit.tier]
    return encode(found)
