"""Parses a decoded body into a `Call`, or refuses it with the field's name.

Pure but for tokenising: the route runs it in a thread when the body is large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.forecast.length.features import Features, features_of
from engine.messages import SamplingParams
from gateway import errors
from gateway.config import GatewayConfig
from gateway.domain.call import Call, ServedModel
from gateway.domain.tiers import tier_of
from gateway.flow.prefix_index import prefix_hashes
from gateway.requests.prompt import PromptRefused
from gateway.requests.schemas import ChatCompletionRequest, ChatMessage, CompletionRequest, Sampling
from gateway.upstream.base import Wording
from tenants.types import MAX_END_USER_CHARS, Labels, Principal

SMALLEST_TOP_P = 1e-9
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
_SEED_RANGE = range(-(2**63), 2**63)


class Renderer(Protocol):
    """The part of `PromptRenderer` that is needed here."""

    @property
    def vocabulary(self) -> int: ...

    def chat_tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]: ...

    def text_tokens(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a call takes from elsewhere than its body: the key, the headers, the served model."""

    request_id: str
    principal: Principal
    model: ServedModel
    renderer: Renderer
    config: GatewayConfig
    created: int
    """Unix time."""
    trace_context: str | None = None
    timeout_s: float | None = None
    """How long it may wait for its turn, if its client said so."""
    progress: bool | None = None
    max_wait_s: float | None = None
    max_cost_nanousd: int | None = None
    names_timeout: bool = False
    """Its client said so outright, and not only its SDK."""


def parse_chat(request: ChatCompletionRequest, context: RequestContext) -> Call:
    """A chat completion. Raises `ApiError`."""
    _check_model(request.model, context)
    _refuse_unsupported(request)
    messages = chat_messages(request.messages, context.config)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise errors.bad_request(
            "Send either 'max_tokens' or 'max_completion_tokens', not both.", "max_tokens"
        )
    param = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    asked = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    logprobs: int | None = None
    if request.logprobs:
        logprobs = _integer(request.top_logprobs, "top_logprobs", 0, context.config.max_top_logprobs)
    elif request.top_logprobs is not None:
        raise errors.bad_request("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    try:
        prompt = context.renderer.chat_tokens(messages)
    except PromptRefused as refused:
        raise errors.bad_request(f"Invalid 'messages': {refused}.", "messages") from None
    return _call(
        request, True, [prompt], (Wording(messages),), asked, param, "messages", logprobs, context
    )  # fmt: skip


def parse_text(request: CompletionRequest, context: RequestContext) -> Call:
    """A text completion. Raises `ApiError`."""
    _check_model(request.model, context)
    if request.echo:
        raise errors.unsupported_parameter("echo", "'echo' is not supported; leave it out or send false.")
    if request.suffix:
        raise errors.unsupported_parameter("suffix", "'suffix' is not supported; leave it out.")
    if request.best_of is not None and request.best_of != (1 if request.n is None else request.n):
        raise errors.unsupported_parameter("best_of", "'best_of' must equal 'n' or be left out.")
    logprobs: int | None = None
    if request.logprobs is not None:
        logprobs = _integer(request.logprobs, "logprobs", 0, context.config.max_top_logprobs)
    items = _prompt_items(request.prompt, context.config)
    prompts = _prompts(items, context.renderer, context.model)
    wordings = tuple(Wording(prompt=item) for item in items)
    return _call(
        request, False, prompts, wordings, request.max_tokens, "max_tokens", "prompt", logprobs, context
    )  # fmt: skip


def _call(
    request: Sampling,
    chat: bool,
    prompts: Sequence[list[int]],
    wordings: tuple[Wording, ...],
    asked_max_tokens: int | None,
    max_tokens_param: str,
    prompt_param: str,
    logprobs: int | None,
    context: RequestContext,
) -> Call:
    model, principal, config = context.model, context.principal, context.config
    tier = tier_of(request.service_tier, principal)
    choices = _integer(request.n, "n", 1, config.max_choices, default=1)
    longest = max(len(prompt) for prompt in prompts)
    context_left = context_left_of(model, longest)
    if context_left < 1:
        raise errors.context_too_long(model.context_tokens, longest, None, prompt_param)
    if asked_max_tokens is None:
        max_tokens = context_left
    elif asked_max_tokens < 1:
        raise errors.bad_request(
            f"Invalid '{max_tokens_param}': {asked_max_tokens} is less than the minimum of 1.",
            max_tokens_param,
        )
    elif asked_max_tokens > (model.context_tokens if model.is_estimated else context_left):
        raise errors.context_too_long(model.context_tokens, longest, asked_max_tokens, max_tokens_param)
    else:
        max_tokens = asked_max_tokens
    if request.stream_options is not None and not request.stream:
        raise errors.bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    sampling = _sampling(request, logprobs, model, config)
    return Call(
        request_id=context.request_id,
        chat=chat,
        model=model.name,
        principal=principal,
        tier=tier,
        prompts=tuple(prompts),
        choices=choices,
        max_tokens=max_tokens,
        sampling=sampling,
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        created=context.created,
        trace_context=context.trace_context,
        asked_max_tokens=asked_max_tokens is not None,
        timeout_s=context.timeout_s,
        progress=context.progress if request.stream else False,
        max_wait_s=context.max_wait_s,
        max_cost_nanousd=context.max_cost_nanousd,
        names_timeout=context.names_timeout,
        wordings=wordings,
        pool=model.pool,
        end_user=_end_user(request),
        names_tier=request.service_tier not in (None, "auto"),
        labels=labels_of(request.metadata, principal.labels),
        traits=traits_of(
            wordings[0] if wordings else None,
            prompts[0],
            max_tokens if asked_max_tokens is not None else None,
            sampling,
            principal.tenant_id,
            request.end_user,
        ),
    )


def _end_user(request: Sampling) -> str:
    """The end user that the request names; empty: none."""
    for name in ("safety_identifier", "user"):
        value = getattr(request, name)
        if value is not None and len(value) > MAX_END_USER_CHARS:
            raise errors.bad_request(
                f"Invalid '{name}': it has {len(value)} characters; the most is {MAX_END_USER_CHARS}. Send a"
                " digest of a longer one.",
                name,
            )
    return request.safety_identifier or request.user or ""


def labels_of(metadata: Mapping[str, str] | None, declared: Labels) -> dict[str, str]:
    """The pairs of a request's metadata that its tenant has declared as labels; the others are the client's
    own. Raises `ApiError`."""
    if not metadata:
        return {}
    if len(metadata) > MAX_METADATA:
        raise errors.bad_request(
            f"'metadata' holds {len(metadata)} pairs; the most is {MAX_METADATA}.", "metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY:
            raise errors.bad_request(
                f"Invalid 'metadata': the key '{key[:MAX_METADATA_KEY]}…' has {len(key)} characters; the most"
                f" is {MAX_METADATA_KEY}.",
                "metadata",
            )
        if len(value) > MAX_METADATA_VALUE:
            raise errors.bad_request(
                f"Invalid 'metadata.{key}': it has {len(value)} characters; the most is"
                f" {MAX_METADATA_VALUE}.",
                f"metadata.{key}",
            )
        if value not in declared.get(key, (value,)):
            raise errors.invalid_label(key, value, declared[key])
    return {key: value for key, value in metadata.items() if key in declared}


def context_left_of(model: ServedModel, prompt_tokens: int) -> int:
    """What the model's context leaves for the answer. Where the prompt is only estimated, its server knows
    better whether it fits: an eighth of the context is left for the answer in any case."""
    left = model.context_tokens - prompt_tokens
    return max(left, model.context_tokens // 8, 1) if model.is_estimated else left


def _check_model(name: str, context: RequestContext) -> None:
    allowed = context.principal.models
    asked = context.model.asked or context.model.name
    if name != asked or (allowed is not None and name not in allowed):
        raise errors.model_not_found(name)


def _refuse_unsupported(request: ChatCompletionRequest) -> None:
    if request.tools or request.functions:
        name = "tools" if request.tools else "functions"
        raise errors.unsupported_parameter(name, f"This model cannot call tools; leave '{name}' out.")
    if request.tool_choice not in (None, "none", "auto") or request.function_call not in (
        None,
        "none",
        "auto",
    ):
        name = "tool_choice" if request.tool_choice not in (None, "none", "auto") else "function_call"
        raise errors.unsupported_parameter(name, f"This model cannot call tools; leave '{name}' out.")
    if request.response_format is not None and request.response_format.type != "text":
        raise errors.unsupported_parameter(
            "response_format", "Only response_format {'type': 'text'} is supported."
        )
    if request.modalities is not None and request.modalities != ["text"]:
        raise errors.unsupported_parameter("modalities", "Only the modality 'text' is supported.")
    for name in ("audio", "prediction", "web_search_options", "reasoning_effort", "verbosity"):
        if getattr(request, name) is not None:
            raise errors.unsupported_parameter(
                name, f"'{name}' is not supported by this model; leave it out."
            )


def chat_messages(messages: list[ChatMessage], config: GatewayConfig) -> list[dict[str, Any]]:
    """Checked messages in the form that templates take. Raises `ApiError`."""
    if not messages:
        raise errors.bad_request("'messages' must hold at least one message.", "messages")
    if len(messages) > config.max_messages:
        raise errors.bad_request(
            f"'messages' holds {len(messages)} messages; the most is {config.max_messages}.", "messages"
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise errors.bad_request(
            f"Invalid '{path}.role': '{message.role[:64]}' is not one of {', '.join(sorted(ROLES))}.",
            f"{path}.role",
        )
    if message.content is None:
        if message.role != "assistant":
            raise errors.bad_request(
                f"'{path}.content' must be text: only an assistant's message may leave it out.",
                f"{path}.content",
            )
        text = ""
    elif isinstance(message.content, str):
        text = message.content
    else:
        parts: list[str] = []
        for position, part in enumerate(message.content):
            if part.type != "text":
                raise errors.bad_request(
                    f"'{path}.content[{position}]' is of type '{part.type[:64]}': this model takes text"
                    " only, no images, audio or files.",
                    f"{path}.content[{position}].type",
                )
            if part.text is None:
                raise errors.bad_request(
                    f"Missing required parameter: '{path}.content[{position}].text'.",
                    f"{path}.content[{position}].text",
                    code="missing_required_parameter",
                )
            parts.append(part.text)
        text = "\n".join(parts)
    # "developer" is OpenAI's newer name of the system role; templates know the older one.
    rendered = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.name is not None:
        rendered["name"] = message.name
    return rendered


def _prompt_items(prompt: str | list[str | int | list[int]], config: GatewayConfig) -> list[str | list[int]]:
    if isinstance(prompt, str):
        items: list[str | list[int]] = [prompt]
    elif not prompt:
        raise errors.bad_request("'prompt' must not be an empty list.", "prompt")
    elif all(isinstance(item, int) for item in prompt):
        items = [[item for item in prompt if isinstance(item, int)]]
    elif all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        items = [item for item in prompt if not isinstance(item, int)]
    else:
        raise errors.bad_request(
            "'prompt' must be a string, a list of strings, a list of token ids, or a list of such lists.",
            "prompt",
            code="invalid_type",
        )
    if len(items) > config.max_prompts:
        raise errors.bad_request(
            f"'prompt' holds {len(items)} prompts; the most in one request is {config.max_prompts}.",
            "prompt",
        )
    return items


def _prompts(items: Sequence[str | list[int]], renderer: Renderer, model: ServedModel) -> list[list[int]]:
    prompts: list[list[int]] = []
    for item in items:
        token_ids = renderer.text_tokens(item) if isinstance(item, str) else item
        if not token_ids:
            raise errors.bad_request("'prompt' must have at least one token.", "prompt")
        if len(token_ids) >= model.context_tokens and not model.is_estimated:
            raise errors.context_too_long(model.context_tokens, len(token_ids), None, "prompt")
        for token_id in token_ids:
            if not 0 <= token_id < model.vocabulary:
                raise errors.bad_request(
                    f"Invalid 'prompt': token id {token_id} is not in 0..{model.vocabulary - 1}.", "prompt"
                )
        prompts.append(token_ids)
    return prompts


def _sampling(
    request: Sampling, logprobs: int | None, model: ServedModel, config: GatewayConfig
) -> SamplingParams:
    top_k = _integer(request.top_k, "top_k", -1, None, default=0)
    top_p = _number(request.top_p, "top_p", 0, 1, default=1.0)
    seed = request.seed
    if seed is not None and seed not in _SEED_RANGE:
        raise errors.bad_request("Invalid 'seed': it must fit in 64 bits with a sign.", "seed")
    return SamplingParams(
        temperature=_number(request.temperature, "temperature", 0, 2, default=1.0),
        top_p=max(top_p, SMALLEST_TOP_P),
        top_k=min(max(0, top_k), model.vocabulary),
        min_p=_number(request.min_p, "min_p", 0, 1, default=0.0),
        repetition_penalty=_number(
            request.repetition_penalty, "repetition_penalty", 0, 10, default=1.0, above=True
        ),
        presence_penalty=_number(request.presence_penalty, "presence_penalty", -2, 2, default=0.0),
        frequency_penalty=_number(request.frequency_penalty, "frequency_penalty", -2, 2, default=0.0),
        logit_bias=_logit_bias(request.logit_bias, model, config),
        seed=seed,
        stop=_stop(request.stop, config),
        logprobs=logprobs,
        ignore_eos=bool(request.ignore_eos),
    )


def _logit_bias(bias: dict[str, float] | None, model: ServedModel, config: GatewayConfig) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > config.max_logit_bias:
        raise errors.bad_request(
            f"'logit_bias' has {len(bias)} entries; the most is {config.max_logit_bias}.", "logit_bias"
        )
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) <= 9 else -1
        if not 0 <= token_id < model.vocabulary:
            raise errors.bad_request(
                f"Invalid 'logit_bias': '{key[:32]}' is not a token id in 0..{model.vocabulary - 1}.",
                "logit_bias",
            )
        checked[token_id] = _number(value, f"logit_bias.{token_id}", -100, 100, default=0.0)
    return checked


def _stop(stop: str | list[str] | None, config: GatewayConfig) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > config.max_stop_strings:
        raise errors.bad_request(
            f"'stop' holds {len(strings)} strings; the most is {config.max_stop_strings}.", "stop"
        )
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= config.max_stop_characters:
            raise errors.bad_request(
                f"Invalid 'stop': string {index} has {len(string)} characters;"
                f" it must have 1 to {config.max_stop_characters}.",
                "stop",
            )
    return strings


def _number(
    value: float | None,
    name: str,
    lowest: float,
    highest: float,
    *,
    default: float,
    above: bool = False,
) -> float:
    """`value` within `lowest..highest` (`above`: not `lowest` itself), or `default` when absent."""
    if value is None:
        return default
    if not math.isfinite(value) or value < lowest or value > highest or (above and value == lowest):
        least = f"greater than {lowest:g}" if above else f"at least {lowest:g}"
        raise errors.bad_request(
            f"Invalid '{name}': {value:g} must be {least} and at most {highest:g}.", name
        )
    return float(value)


def _integer(value: int | None, name: str, lowest: int, highest: int | None, *, default: int = 0) -> int:
    if value is None:
        return default
    if value < lowest or (highest is not None and value > highest):
        most = "" if highest is None else f" and at most {highest}"
        raise errors.bad_request(f"Invalid '{name}': {value} must be at least {lowest}{most}.", name)
    return value


# Features for the length forecast (`engine/forecast/length/features.py`): the last question, and what else is
# known of the request before it runs.


def traits_of(
    wording: Wording | None,
    prompt: list[int],
    max_tokens: int | None,
    sampling: SamplingParams,
    tenant_id: str,
    user: str | None,
) -> Features:
    """The features of a request by its first prompt: all its sequences count as alike. `max_tokens`: None
    where the client named no length; `user`: the end user that it named."""
    text, turns = "", 1
    if wording is not None and wording.messages is not None:
        text, turns = last_asked(wording.messages), len(wording.messages)
    elif wording is not None and isinstance(wording.prompt, str):
        text = wording.prompt
    return features_of(
        text,
        prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        turns=turns,
        temperature=sampling.temperature,
        has_stop=bool(sampling.stop),
        user=user or "",
        blocks=prefix_hashes(prompt, tenant_id),
    )


def last_asked(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message of a conversation; empty where there is none."""
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else ""
