"""Request fields that are passed to other servers unchanged: OpenAI's, and those of vLLM, SGLang, llama.cpp.

Types only, loose where the server's own check is better. `fields/passed.py` says which need a capable server;
`gateway/upstream/openai/server_kinds.py` lists them by kind of server.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Texts = str | list[str]


class PassedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Of chat and text completions alike. None: not sent."""

    response_format: dict[str, Any] | None = None
    """OpenAI: `text`, `json_object`, `json_schema`; vLLM, SGLang: `structural_tag`."""
    # vLLM, SGLang
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    # vLLM
    add_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_whitespace_pattern: str | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    repetition_detection: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    spaces_between_special_tokens: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    structured_outputs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    # SGLang
    ebnf: str | None = None
    json_schema: dict[str, Any] | str | None = None
    no_stop_trim: bool | None = None
    regex: str | None = None
    stop_regex: Texts | None = None
    # llama.cpp
    dry_allowed_length: int | None = None
    dry_base: float | None = None
    dry_multiplier: float | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    dynatemp_exponent: float | None = None
    dynatemp_range: float | None = None
    grammar: str | None = None
    mirostat: int | None = None
    mirostat_eta: float | None = None
    mirostat_tau: float | None = None
    repeat_last_n: int | None = None
    repeat_penalty: float | None = None
    samplers: Texts | None = None
    top_n_sigma: float | None = None
    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None


CHAT_FIELDS = (
    "add_generation_prompt", "chat_template_kwargs", "continue_final_message", "documents",
    "enable_thinking", "include_reasoning", "reasoning", "reasoning_format", "separate_reasoning",
    "stream_reasoning", "thinking",
)  # fmt: skip
"""Server-specific fields of chats only (`ChatCompletionRequest`)."""
TEXT_FIELDS = ("echo", "suffix")
"""Server-specific fields of text completions only (`CompletionRequest`)."""
KIND_FIELD_NAMES = tuple(name for name in PassedFields.__struct_fields__ if name not in ("response_format",))
"""Server-specific fields of both."""
