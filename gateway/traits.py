"""What of a request says how long its answers will be?

The gateway's side of `engine/forecast/length/features.py`: which text was last asked, and what else is known
of the request before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.forecast.length.features import Features, features_of
from engine.messages import SamplingParams
from gateway.upstream.base import Wording


def traits_of(
    wording: Wording | None, prompt_tokens: int, max_tokens: int | None, sampling: SamplingParams
) -> Features:
    """The features of a request by its first prompt: all its sequences count as alike. `max_tokens`: None
    where the client named no length."""
    text, turns = "", 1
    if wording is not None and wording.messages is not None:
        text, turns = last_asked(wording.messages), len(wording.messages)
    elif wording is not None and isinstance(wording.prompt, str):
        text = wording.prompt
    return features_of(
        text,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        turns=turns,
        temperature=sampling.temperature,
        has_stop=bool(sampling.stop),
    )


def last_asked(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the last message of a conversation; empty where there is none."""
    content = messages[-1].get("content") if messages else None
    return content if isinstance(content, str) else ""
