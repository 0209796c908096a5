"""Kinds of servers that speak OpenAI's API, and the server-specific request fields that are passed on. Pure.

An allow-list by kind (vLLM 0.32, SGLang 0.5, llama.cpp's server). Fields that would change what is metered,
whose turn it is, or whose cache is read are refused by name, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

from gateway.upstream.capabilities import MEDIA_NEEDS, Capability, need_of_field


class ServerKind(StrEnum):
    """Also the words of the setting `server`."""

    AUTO = "auto"
    """As its list of models says."""
    VLLM = "vllm"
    SGLANG = "sglang"
    LLAMA_CPP = "llama.cpp"
    OTHER = "other"


_OWNERS = {"vllm": ServerKind.VLLM, "sglang": ServerKind.SGLANG, "llamacpp": ServerKind.LLAMA_CPP}


def kind_of_owner(owned_by: str | None) -> ServerKind:
    return _OWNERS.get(owned_by or "", ServerKind.OTHER)


KIND_FIELDS: Mapping[ServerKind, frozenset[str]] = {
    ServerKind.VLLM: frozenset(
        {
            "add_generation_prompt", "add_special_tokens", "allowed_token_ids", "bad_words",
            "chat_template_kwargs", "continue_final_message", "documents", "echo", "enable_thinking",
            "guided_choice", "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern",
            "include_reasoning", "include_stop_str_in_output", "min_tokens", "prompt_logprobs",
            "repetition_detection", "return_token_ids", "return_tokens_as_token_ids", "skip_special_tokens",
            "spaces_between_special_tokens", "stop_token_ids", "structural_tag", "structured_outputs",
            "thinking", "thinking_token_budget", "truncate_prompt_tokens", "truncation_side",
        }
    ),
    ServerKind.SGLANG: frozenset(
        {
            "chat_template_kwargs", "continue_final_message", "ebnf", "echo", "enable_thinking",
            "json_schema", "min_tokens", "no_stop_trim", "reasoning", "regex", "separate_reasoning",
            "skip_special_tokens", "stop_regex", "stop_token_ids", "stream_reasoning", "structural_tag",
            "suffix", "thinking",
        }
    ),
    ServerKind.LLAMA_CPP: frozenset(
        {
            "add_generation_prompt", "chat_template_kwargs", "dry_allowed_length", "dry_base",
            "dry_multiplier", "dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent",
            "dynatemp_range", "enable_thinking", "grammar", "json_schema", "mirostat", "mirostat_eta",
            "mirostat_tau", "reasoning_format", "repeat_last_n", "repeat_penalty", "samplers", "thinking",
            "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold",
        }
    ),
}  # fmt: skip

KIND_TRIALS: Mapping[ServerKind, Mapping[str, Any]] = {
    ServerKind.VLLM: {"min_tokens": 1, "skip_special_tokens": True, "stop_token_ids": [], "bad_words": []},
    ServerKind.SGLANG: {"min_tokens": 1, "skip_special_tokens": True, "no_stop_trim": False},
    ServerKind.LLAMA_CPP: {"typical_p": 1.0, "mirostat": 0, "repeat_last_n": 64},
}
"""Fields whose acceptance shows that a server of this kind takes those of its kind."""

_CACHE = "the gateway keeps the prefix caches of tenants apart"
_TURN = "the gateway decides whose turn it is, by your key's weight and tier"
_ROUTE = "it addresses parts inside the server, which are its operator's"
_METER = "it would have tokens generated that are not metered"
_PROMPT = "it changes how much prompt there is to compute behind its count"
_LENGTH = "say it with max_tokens, which is what budgets hold"
_SHAPE = "what it adds to the answer is not passed on"
_CODE = "it runs code or adapters of the client's choice on the server"

REFUSED_FIELDS: Mapping[str, str] = {
    "cache_salt": _CACHE, "extra_key": _CACHE, "id_slot": _CACHE, "cache_prompt": _CACHE,
    "session_id": _CACHE, "session_params": _CACHE, "ngram_corpus_id": _CACHE, "n_cache_reuse": _CACHE,
    "priority": _TURN, "vllm_xargs": _TURN, "custom_params": _TURN, "custom_labels": _TURN,
    "request_id": _ROUTE, "rid": _ROUTE, "kv_transfer_params": _ROUTE, "ec_transfer_params": _ROUTE,
    "bootstrap_host": _ROUTE, "bootstrap_port": _ROUTE, "bootstrap_room": _ROUTE,
    "routed_dp_rank": _ROUTE, "data_parallel_rank": _ROUTE, "disagg_prefill_dp_rank": _ROUTE,
    "use_beam_search": _METER, "length_penalty": _METER,
    "max_new_tokens": _LENGTH, "n_predict": _LENGTH, "t_max_predict_ms": _LENGTH,
    "prompt_embeds": _PROMPT, "input_ids": _PROMPT, "input_embeds": _PROMPT, "n_keep": _PROMPT,
    "mm_processor_kwargs": _PROMPT, "media_io_kwargs": _PROMPT, "images_config": _PROMPT,
    "max_dynamic_patch": _PROMPT, "min_dynamic_patch": _PROMPT, "use_audio_in_video": _PROMPT,
    "chat_template": _CODE, "custom_logit_processor": _CODE, "logits_processors": _CODE,
    "lora_path": _CODE, "lora": _CODE,
    "return_hidden_states": _SHAPE, "return_routed_experts": _SHAPE,
    "return_prompt_text": _SHAPE, "return_prompt_token_ids": _SHAPE, "return_meta_info": _SHAPE,
    "return_tokens": _SHAPE, "logprob_token_ids": _SHAPE, "n_probs": _SHAPE, "timings_per_token": _SHAPE,
    "stream_interval": _SHAPE,
}  # fmt: skip
"""Known fields that are never passed: why not."""

TEMPLATE_ARGUMENTS_REFUSED = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
        "max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors",
        "tokenize", "tokenizer", "tokenizer_kwargs", "tools", "truncation",
    }
)  # fmt: skip
"""Names in `chat_template_kwargs` that are arguments of the renderer, not of the template."""

PROMPT_FIELDS = frozenset(
    {
        "add_generation_prompt", "add_special_tokens", "chat_template_kwargs", "continue_final_message",
        "documents", "enable_thinking", "reasoning", "reasoning_effort", "suffix", "thinking", "tools",
        "truncate_prompt_tokens", "truncation_side",
    }
)  # fmt: skip
"""Passed fields that change the rendered prompt, so that it is not the one counted here."""

COUNTED_FIELDS = PROMPT_FIELDS | {
    "include_reasoning", "separate_reasoning", "stream_reasoning", "echo", *MEDIA_NEEDS
}  # fmt: skip
"""Passed fields that change the prompt, hide output or precede it: only the server's count is right."""

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")

OPENAI_FIELDS = frozenset(
    {
        "parallel_tool_calls", "reasoning_effort", "response_format", "tool_choice", "tools", "verbosity",
    }
)  # fmt: skip

PASSED_FIELDS = OPENAI_FIELDS.union(*KIND_FIELDS.values())

IDLE_VALUES: Mapping[str, Any] = {
    "add_generation_prompt": True, "bad_words": [], "chat_template_kwargs": {},
    "continue_final_message": False, "documents": [], "echo": False, "enable_thinking": False,
    "include_reasoning": True, "include_stop_str_in_output": False, "min_tokens": 0, "no_stop_trim": False,
    "reasoning": {}, "reasoning_effort": "none", "return_token_ids": False,
    "return_tokens_as_token_ids": False, "separate_reasoning": True, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "stop_token_ids": [], "stream_reasoning": True, "suffix": "",
    "thinking": {"type": "disabled"}, "verbosity": "medium",
}  # fmt: skip
"""Values without effect: a server that does not take the field is sent the request without it."""

_NEEDS = {"reasoning_effort": Capability.REASONING, **dict.fromkeys(TOOL_FIELDS, Capability.TOOLS)}


def is_idle(name: str, value: object) -> bool:
    return name in IDLE_VALUES and value == IDLE_VALUES[name]


def taken_of(fields: Mapping[str, Any], offers: Collection[str]) -> dict[str, Any]:
    idle = {name for name, value in fields.items() if is_idle(name, value)}
    if fields.get("tool_choice") == "none":
        idle.update(TOOL_FIELDS)
    return {
        name: value
        for name, value in fields.items()
        if name not in idle or _NEEDS.get(name, need_of_field(name)) in offers
    }
