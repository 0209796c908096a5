"""Model directories that other servers serve: the shipped model with tools, and a small random BLIP-2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ops.settings.settings import SHIPPED_MODEL

CONTEXT_TOKENS = 2048
SEED = 20
IMAGE_TOKEN = "<image>"
TOOL_TOKEN = "<tool_call>"
IMAGE_SIDE = 32
"""Pixels: every picture is brought to this square."""
PATCH_SIDE = 8
QUERY_TOKENS = 16
MEAN = [0.5, 0.5, 0.5]

# Tool calls in the form of Hermes, which vLLM and llama.cpp both read.
CHAT_TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def save_text_model(model_dir: Path) -> Path:
    """The shipped model with a template that takes tools and a token that begins a call."""
    from safetensors.torch import load_file, save_file

    first = save_text_tokenizer(model_dir)
    shutil.copy(SHIPPED_MODEL / "generation_config.json", model_dir)
    weights = load_file(SHIPPED_MODEL / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = embedding.new_zeros(first + 1, embedding.shape[1])
    weights["model.embed_tokens.weight"][:first] = embedding
    save_file(weights, model_dir / "model.safetensors", {"format": "pt"})
    config = json.loads((SHIPPED_MODEL / "config.json").read_text(encoding="utf-8"))
    _save(model_dir / "config.json", **config | {"vocab_size": first + 1})
    return model_dir


def save_image_model(model_dir: Path) -> Path:
    """A BLIP-2 of 0.3 million parameters that takes pictures, and whose tokens can mark reasoning."""
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
    )

    first = _save_tokenizer(model_dir, (IMAGE_TOKEN, "<think>", "</think>"))
    torch.manual_seed(SEED)
    small: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = OPTConfig(
        vocab_size=first + 3,
        word_embed_proj_dim=64,
        ffn_dim=128,
        max_position_embeddings=CONTEXT_TOKENS,
        init_std=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **small,
    )
    config = Blip2Config(
        vision_config=Blip2VisionConfig(
            intermediate_size=128, image_size=IMAGE_SIDE, patch_size=PATCH_SIDE, **small
        ).to_dict(),
        qformer_config=Blip2QFormerConfig(
            intermediate_size=128, encoder_hidden_size=64, cross_attention_frequency=1, **small
        ).to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=QUERY_TOKENS,
        image_token_index=first,
    )
    Blip2ForConditionalGeneration(config).to(torch.float32).save_pretrained(model_dir)
    _save(
        model_dir / "preprocessor_config.json",
        image_processor_type="BlipImageProcessor",
        processor_class="Blip2Processor",
        size={"height": IMAGE_SIDE, "width": IMAGE_SIDE},
        image_mean=MEAN,
        image_std=MEAN,
        **dict.fromkeys(("do_resize", "do_normalize", "do_rescale", "do_convert_rgb"), True),
    )
    _save(
        model_dir / "processor_config.json", processor_class="Blip2Processor", num_query_tokens=QUERY_TOKENS
    )
    return model_dir


def save_defaults(model_dir: Path, defaults: dict[str, Any]) -> None:
    file = model_dir / "generation_config.json"
    _save(file, **json.loads(file.read_text(encoding="utf-8")) | {"do_sample": True} | defaults)


def save_text_tokenizer(model_dir: Path) -> int:
    """Of the text model, with its template; returns the number of the shipped tokenizer's tokens."""
    return _save_tokenizer(model_dir, (TOOL_TOKEN,))


def _save_tokenizer(model_dir: Path, more: tuple[str, ...]) -> int:
    """The shipped tokenizer with more tokens, and the template; returns the id of the first of them."""
    model_dir.mkdir(parents=True)
    (model_dir / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    tokenizer = json.loads((SHIPPED_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    first: int = max(tokenizer["model"]["vocab"].values()) + 1
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, word in enumerate(more):
        token = {"id": first + number, "content": word, "special": word == IMAGE_TOKEN}
        tokenizer["added_tokens"].append(plain | token)
    _save(model_dir / "tokenizer.json", **tokenizer)
    config = json.loads((SHIPPED_MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    if IMAGE_TOKEN in more:
        config["extra_special_tokens"].append(IMAGE_TOKEN)
        config |= {"processor_class": "Blip2Processor", "tokenizer_class": "PreTrainedTokenizerFast"}
    _save(model_dir / "tokenizer_config.json", **config)
    return first


def _save(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
