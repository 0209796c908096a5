"""Features of a request for the length forecast (`engine/forecast/length/features.py`). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.forecast.length.features import Features, features_of
from engine.messages import SamplingParams
from gateway.flow.routing import prefix_hashes
from gateway.requests.inputs import media
from gateway.upstream.base import Wording


def traits_of(
    wording: Wording | None,
    prompt: list[int],
    max_tokens: int | None,
    sampling: SamplingParams,
    tenant_id: str,
    user: str | None,
) -> Features:
    """By the first prompt: all sequences count as alike. `max_tokens` None: the client set no length."""
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
    """The text of the last message; empty: none."""
    return media.text_of(messages[-1].get("content")) if messages else ""
