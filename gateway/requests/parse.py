"""Parses a decoded body into a `Call`, or refuses it with the field's name. Pure but for tokenising."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from gateway import errors
from gateway.config import GatewayConfig
from gateway.domain.call import Call, ServedModel
from gateway.domain.ids import session_id
from gateway.domain.tiers import tier_of
from gateway.requests.fields.checked_answers import CheckedAnswers
from gateway.requests.fields.own_answer import NAMES, PLAIN_FORM, OwnAnswer, OwnForm, template_tools
from gateway.requests.fields.passed import Passed, passed_of_chat, passed_of_text
from gateway.requests.fields.sampling import integer, said_sampling, sampling_of
from gateway.requests.fields.servers import endpoint_needs, may_run_in_own_engine, require_servers
from gateway.requests.fields.tools import require_name
from gateway.requests.fields.traits import traits_of
from gateway.requests.inputs import media, uncounted
from gateway.requests.inputs.uncounted import margin_ids
from gateway.requests.prompt import Fits, PromptRefused
from gateway.requests.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    Sampling,
    ToolCall,
    require_number,
    user_of,
)
from gateway.trace_context import TraceContext
from gateway.upstream.base import Wording
from gateway.upstream.capabilities import Endpoint
from gateway.upstream.openai.server_kinds import PROMPT_FIELDS
from tenants.types import MAX_END_USER_CHARS, Labels, Principal

DEFAULT_TEXT_TOKENS = 16
"""`max_tokens` of a text completion that names none, as OpenAI has it."""
OPENING_TOKENS = 64
"""At the end of a prompt, with the opening of the answer among them."""
MAX_TOOL_CALLS = 128
"""Of one message."""
MAX_TOOL_CALL_ID = 4096
"""Characters: some services put a signature of the reasoning there."""
LEFT_OUT_PARTS = ("refusal", "thinking", "redacted_thinking")
"""Parts of an assistant's message that clients send back as an answer had them, and no server here reads."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512


class Renderer(Protocol):
    """The part of `PromptRenderer` that is needed here."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def own_form(self) -> OwnForm: ...

    def chat_tokens(
        self,
        messages: Sequence[dict[str, Any]],
        fits: Fits | None = None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        effort: str | None = None,
    ) -> list[int]: ...

    def text_tokens(self, text: str, fits: Fits | None = None) -> list[int]: ...

    def text_of(self, ids: Sequence[int]) -> str: ...


class RequestContext(msgspec.Struct, frozen=True):
    """What a call takes from elsewhere than its body: the key, the headers, the served model."""

    request_id: str
    principal: Principal
    model: ServedModel
    renderer: Renderer
    config: GatewayConfig
    created: int
    """Unix time."""
    trace: TraceContext | None = None
    timeout_s: float | None = None
    progress: bool | None = None
    max_wait_s: float | None = None
    max_cost_nanousd: int | None = None
    names_timeout: bool = False
    first_byte_s: float | None = None
    route: str = ""
    session: str | None = None
    """As a header names it, before the body."""
    require_budget: Callable[[int], None] | None = None
    """Called with the least tokens of its prompts. Raises `BudgetDenied`. None: only the reservation asks."""
    answers: CheckedAnswers = msgspec.field(default_factory=CheckedAnswers)
    is_on_loop: bool = False


def parse_chat(request: ChatCompletionRequest, context: RequestContext) -> Call:
    """A chat completion. Raises `ApiError`, `NeedsThread`."""
    check_model(request.model, context)
    passed = passed_of_chat(request)
    passed.needs.update(media.needs_of(request.messages))
    passed.needs.update(endpoint_needs(context.model, Endpoint.CHAT, "messages"))
    require_servers(context.model, passed.needs)
    passed.leave_out_idle(_offers(context.model))
    messages = chat_messages(request.messages, context.config, context.model)
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        raise errors.bad_request(
            "Send either 'max_tokens' or 'max_completion_tokens', not both.", "max_tokens"
        )
    param = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
    asked = request.max_completion_tokens if request.max_tokens is None else request.max_tokens
    logprobs: int | None = None
    if request.logprobs:
        logprobs = integer(request.top_logprobs, "top_logprobs", 0, context.config.max_top_logprobs)
    elif request.top_logprobs is not None:
        raise errors.bad_request("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    fits = fits_context(context.model, "messages", context.require_budget)
    is_own = may_run_in_own_engine(context.model, passed.needs)
    prompt = chat_prompt(context.renderer, messages, context.model, fits, passed.fields, is_own=is_own)
    wording = _wording(
        request, passed, messages=messages, is_rendered_there=uncounted.is_rendered_there(messages)
    )
    return _call(request, True, [prompt], (wording,), asked, param, "messages", logprobs, context)


def parse_text(request: CompletionRequest, context: RequestContext) -> Call:
    """A text completion. Raises `ApiError`, `NeedsThread`."""
    check_model(request.model, context)
    if request.best_of is not None and request.best_of != (1 if request.n is None else request.n):
        raise errors.unsupported_parameter("best_of", "'best_of' must equal 'n' or be left out.")
    passed = passed_of_text(request)
    passed.needs.update(endpoint_needs(context.model, Endpoint.TEXT, "prompt"))
    require_servers(context.model, passed.needs)
    passed.leave_out_idle(_offers(context.model))
    logprobs: int | None = None
    if request.logprobs is not None:
        logprobs = integer(request.logprobs, "logprobs", 0, context.config.max_top_logprobs)
    items = _prompt_items(request.prompt, context.config)
    prompts = _prompts(items, context)
    is_own = may_run_in_own_engine(context.model, passed.needs)
    if more := () if is_own else _margin(context.renderer, passed.fields, "prompt"):
        prompts = [[*prompt, *more] for prompt in prompts]
    wordings = tuple(_wording(request, passed, prompt=item) for item in items)
    return _call(
        request, False, prompts, wordings, request.max_tokens, "max_tokens", "prompt", logprobs, context
    )  # fmt: skip


def _offers(model: ServedModel) -> frozenset[str]:
    """The needs that some server meets; none where our own engine may run it, with the ids counted here."""
    if may_run_in_own_engine(model):
        return frozenset()
    return frozenset().union(*(each.capabilities.offers for each in model.servers))


def _wording(
    request: Sampling,
    passed: Passed,
    *,
    messages: list[dict[str, Any]] | None = None,
    prompt: str | list[int] = "",
    is_rendered_there: bool = False,
) -> Wording:
    return Wording(
        messages,
        prompt=prompt,
        fields=passed.fields,
        sampling=said_sampling(request),
        needs=frozenset(passed.needs),
        is_uncountable=is_rendered_there or passed.changes_prompt,
    )


def chat_prompt(
    renderer: Renderer,
    messages: Sequence[dict[str, Any]],
    model: ServedModel,
    fits: Fits | None = None,
    fields: Mapping[str, Any] = MappingProxyType({}),
    *,
    is_own: bool = False,
) -> list[int]:
    """A conversation's tokens, and what is held for images, thoughts and `fields`; `is_own`: with tools, as
    our own engine gets it. Raises `ApiError`."""
    try:
        counted = uncounted.as_counted(messages)
        if is_own and fields:
            effort = fields.get("reasoning_effort")
            return renderer.chat_tokens(counted, fits, tools=template_tools(fields), effort=effort)
        prompt = renderer.chat_tokens(counted, fits)
    except PromptRefused as refused:
        raise _prompt_refused(refused, "messages") from None
    more = () if counted is messages else messages
    margin = _margin(renderer, fields, "tools" if "tools" in fields else "messages", more)
    margin += media.media_ids(more, model.image_tokens)
    return [*prompt, *margin] if margin else prompt


def _margin(
    renderer: Renderer, fields: Mapping[str, Any], param: str, messages: Sequence[dict[str, Any]] = ()
) -> list[int]:
    """What is held for what a server writes of fields, and beside messages' texts. Raises `ApiError`."""
    try:
        margin = margin_ids(fields, PROMPT_FIELDS, renderer) if fields else []
        return margin + uncounted.message_margin_ids(messages, renderer)
    except PromptRefused as refused:
        raise _prompt_refused(refused, param) from None


def text_prompt(renderer: Renderer, text: str, fits: Fits | None = None, param: str = "prompt") -> list[int]:
    """The tokens of a plain prompt. Raises `ApiError`."""
    try:
        return renderer.text_tokens(text, fits)
    except PromptRefused as refused:
        raise _prompt_refused(refused, param) from None


def _prompt_refused(refused: PromptRefused, param: str) -> errors.ApiError:
    field = refused.field or param
    return errors.bad_request(f"Invalid '{field}': {refused}.", field)


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
    choices = integer(request.n, "n", 1, config.max_choices, default=1)
    longest = max(len(prompt) for prompt in prompts)
    is_own = may_run_in_own_engine(model, wordings[0].needs)
    is_estimated = model.is_estimated or (not is_own and any(each.is_uncountable for each in wordings))
    context_left = context_left_of(model.context_tokens, longest, is_estimated=is_estimated)
    if context_left < 1:
        raise errors.context_too_long(model.context_tokens, longest, None, prompt_param)
    if asked_max_tokens is None:
        max_tokens = context_left if chat else min(context_left, DEFAULT_TEXT_TOKENS)
    elif asked_max_tokens < 1:
        raise errors.bad_request(
            f"Invalid '{max_tokens_param}': {asked_max_tokens} is less than the minimum of 1.",
            max_tokens_param,
        )
    elif asked_max_tokens > (model.context_tokens if is_estimated else context_left):
        raise errors.context_too_long(model.context_tokens, longest, asked_max_tokens, max_tokens_param)
    else:
        max_tokens = asked_max_tokens
    if request.stream_options is not None and not request.stream:
        raise errors.bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    sampling = sampling_of(request, logprobs, model, config)
    if is_estimated:
        most = most_held(max_tokens, model.context_tokens)
        prompts = [prompt[:most] for prompt in prompts]
    own = _own_answer(chat, wordings[0].fields, prompts[0], context) if is_own else OwnAnswer()
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
        trace=context.trace,
        asked_max_tokens=asked_max_tokens is not None,
        timeout_s=context.timeout_s,
        progress=context.progress if request.stream else False,
        max_wait_s=context.max_wait_s,
        max_cost_nanousd=context.max_cost_nanousd,
        names_timeout=context.names_timeout,
        wordings=wordings,
        needs=wordings[0].needs,
        grammar=own.grammar,
        parts=own.parts,
        not_enforced=own.not_enforced,
        pool=model.pool,
        end_user=end_user_of(request),
        session=session_id(context.session or getattr(request, "prompt_cache_key", None)),
        names_tier=request.service_tier not in (None, "auto"),
        labels=labels_of(request.metadata, principal.labels),
        first_byte_s=context.first_byte_s,
        route=context.route,
        traits=traits_of(
            wordings[0] if wordings else None,
            prompts[0],
            max_tokens if asked_max_tokens is not None else None,
            sampling,
            principal.tenant_id,
            request.end_user,
        ),
    )


def _own_answer(
    chat: bool, fields: Mapping[str, Any], prompt: Sequence[int], context: RequestContext
) -> OwnAnswer:
    form = context.renderer.own_form if chat else PLAIN_FORM
    is_open = False
    if form.answers is not None and not NAMES.isdisjoint(fields):
        is_open = form.answers.opens_thoughts(context.renderer.text_of(prompt[-OPENING_TOKENS:]))
    return context.answers.of(
        fields,
        form,
        tenant_id=context.principal.tenant_id,
        model=context.model.pool or context.model.name,
        is_open=is_open,
        is_on_loop=context.is_on_loop,
    )


class FromEndUser(Protocol):
    """A body that may name an end user."""

    user: Any
    safety_identifier: str | None


def end_user_of(request: FromEndUser) -> str:
    """The end user that the request names; empty: none. Raises `ApiError`."""
    named = {"safety_identifier": request.safety_identifier, "user": user_of(request.user)}
    for name, value in named.items():
        if value is not None and len(value) > MAX_END_USER_CHARS:
            raise errors.bad_request(
                f"Invalid '{name}': it has {len(value)} characters; the most is {MAX_END_USER_CHARS}. Send a"
                " digest of a longer one.",
                name,
            )
    return named["safety_identifier"] or named["user"] or ""


def labels_of(metadata: Mapping[str, str] | None, declared: Labels) -> dict[str, str]:
    """The pairs of its metadata that its tenant has declared as labels. Raises `ApiError`."""
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
            raise errors.invalid_label(param=f"metadata.{key}", value=value, allowed=", ".join(declared[key]))
    return {key: value for key, value in metadata.items() if key in declared}


def context_left_of(context_tokens: int, prompt_tokens: int, *, is_estimated: bool) -> int:
    """What the context leaves for the answer; an eighth in any case if the prompt is only estimated."""
    left = context_tokens - prompt_tokens
    return max(left, context_tokens // 8, 1) if is_estimated else left


def most_held(max_tokens: int, context_tokens: int) -> int:
    """The most tokens held for an estimated prompt: what does not fit into a context its server refuses."""
    return max(1, context_tokens - min(max_tokens, context_tokens // 8))


def check_model(name: str, context: RequestContext) -> None:
    """Raises `ApiError` (404) for a model that the key may not use."""
    allowed = context.principal.models
    asked = context.model.asked or context.model.name
    if name != asked or (allowed is not None and name not in allowed):
        raise errors.model_not_found(name=name)


def chat_messages(
    messages: list[ChatMessage], config: GatewayConfig, model: ServedModel
) -> list[dict[str, Any]]:
    """Checked messages for templates; where only other servers run it, extras too. Raises `ApiError`."""
    if not messages:
        raise errors.bad_request("'messages' must hold at least one message.", "messages")
    require_number("messages", len(messages), config.max_messages)
    as_sent = not may_run_in_own_engine(model)
    checked = [
        _message(message, f"messages[{index}]", config, as_sent) for index, message in enumerate(messages)
    ]
    media.require_number(checked, config.max_images)
    return checked


_of_answers = attrgetter(*uncounted.OF_ANSWERS)


def _message(message: ChatMessage, path: str, config: GatewayConfig, as_sent: bool) -> dict[str, Any]:
    for field in ("audio", "function_call"):
        if getattr(message, field):
            raise errors.unsupported_parameter(
                f"{path}.{field}", f"'{path}.{field}' is not supported; leave it out, or say it in 'content'."
            )
    if message.role not in ROLES:
        raise errors.bad_request(
            f"Invalid '{path}.role': '{message.role[:64]}' is not one of {', '.join(sorted(ROLES))}.",
            f"{path}.role",
        )
    # "developer" is OpenAI's newer name of the system role; templates know the older one.
    rendered: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _content(message, path, config, as_sent),
    }
    if message.name is not None:
        rendered["name"] = require_name(message.name, f"{path}.name")
    for name, said in zip(uncounted.OF_ANSWERS, _of_answers(message), strict=True):
        if said:
            if message.role != "assistant":
                raise errors.bad_request(
                    f"'{path}.{name}' is only allowed in a message of role 'assistant'.", f"{path}.{name}"
                )
            if as_sent:
                rendered[name] = said
    if message.tool_calls:
        if message.role != "assistant":
            raise errors.bad_request(
                f"'{path}.tool_calls' is only allowed in a message of role 'assistant'.", f"{path}.tool_calls"
            )
        rendered["tool_calls"] = _tool_calls(message.tool_calls, f"{path}.tool_calls")
    if message.tool_call_id is not None:
        if message.role != "tool":
            raise errors.bad_request(
                f"'{path}.tool_call_id' is only allowed in a message of role 'tool'.", f"{path}.tool_call_id"
            )
        rendered["tool_call_id"] = _tool_call_id(message.tool_call_id, f"{path}.tool_call_id")
    return rendered


def _content(
    message: ChatMessage, path: str, config: GatewayConfig, as_sent: bool
) -> str | list[dict[str, Any]] | None:
    """A message's text; with media, or `as_sent`, its parts; None: it only calls tools. Raises `ApiError`."""
    if message.content is None:
        if message.role != "assistant":
            raise errors.bad_request(
                f"'{path}.content' must be text: only an assistant's message may leave it out.",
                f"{path}.content",
            )
        return None if message.tool_calls else ""
    if isinstance(message.content, str):
        return message.content
    parts: list[dict[str, Any]] = []
    for position, part in enumerate(message.content):
        at = f"{path}.content[{position}]"
        if part.type in media.TYPES:
            parts.append(media.media_part(part, at, config))
        elif part.type in LEFT_OUT_PARTS and message.role == "assistant":
            continue
        elif part.type != "text":
            raise errors.bad_request(
                f"'{at}' is of type '{part.type[:64]}': only parts of the types 'text' and"
                f" {', '.join(map(repr, media.TYPES))} can be taken.",
                f"{at}.type",
            )
        elif part.text is None:
            raise errors.bad_request(
                f"Missing required parameter: '{at}.text'.", f"{at}.text", code="missing_required_parameter"
            )
        else:
            parts.append({"type": "text", "text": part.text})
    is_plain = all(part["type"] == "text" for part in parts)
    return media.text_of(parts) if not parts or (is_plain and not as_sent) else parts


def _tool_calls(calls: Sequence[ToolCall], path: str) -> list[dict[str, Any]]:
    if len(calls) > MAX_TOOL_CALLS:
        raise errors.bad_request(f"'{path}' holds {len(calls)} calls; the most is {MAX_TOOL_CALLS}.", path)
    found: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        at = f"{path}[{index}]"
        if call.type != "function":
            raise errors.bad_request(
                f"'{at}' is of type '{call.type[:64]}': only calls of type 'function' can be taken.",
                f"{at}.type",
            )
        name = require_name(call.function.name, f"{at}.function.name")
        found.append(
            {
                "id": _tool_call_id(call.id, f"{at}.id"),
                "type": "function",
                "function": {"name": name, "arguments": call.function.arguments},
            }
        )
    return found


def _tool_call_id(call_id: str, path: str) -> str:
    if not 1 <= len(call_id) <= MAX_TOOL_CALL_ID:
        raise errors.bad_request(
            f"Invalid '{path}': it has {len(call_id)} characters; it must have 1 to {MAX_TOOL_CALL_ID}.", path
        )
    return call_id


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


def _prompts(items: Sequence[str | list[int]], context: RequestContext) -> list[list[int]]:
    model, prompts, before = context.model, list[list[int]](), 0
    for item in items:
        fits = fits_context(model, "prompt", context.require_budget, before)
        if isinstance(item, str):
            token_ids = text_prompt(context.renderer, item, fits)
        else:
            token_ids = item
            fits(len(token_ids), True)
        if not token_ids:
            raise errors.bad_request("'prompt' must have at least one token.", "prompt")
        lowest, highest = min(token_ids), max(token_ids)
        if lowest < 0 or highest >= model.vocabulary:
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < model.vocabulary)
            raise errors.bad_request(
                f"Invalid 'prompt': token id {wrong} is not in 0..{model.vocabulary - 1}.", "prompt"
            )
        prompts.append(token_ids)
        before += len(token_ids)
    return prompts


def fits_context(
    model: ServedModel,
    param: str,
    require_budget: Callable[[int], None] | None = None,
    before: int = 0,
) -> Fits:
    """Refuses a prompt as early as its tokens are known, if it leaves no room in the context (`ApiError`) or
    in its limits. `before`: tokens of the request's other prompts."""

    def fits(tokens: int, is_exact: bool) -> None:
        if tokens >= model.context_tokens and not (model.is_estimated and is_exact):
            raise errors.context_too_long(model.context_tokens, tokens, None, param, is_least=not is_exact)
        if require_budget is not None:
            require_budget(before + tokens)

    return fits
