"""Bodies of embedding and rerank answers: OpenAI's shape, and that of vLLM and Jina."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.domain.account import Account
from gateway.domain.call import Call
from gateway.upstream.base import RequestTask


def vectors_body(call: Call, found: str, account: Account) -> dict[str, Any]:
    """`found`: the checked list of the server's answer, as JSON (`gateway/upstream/openai/vectors.py`)."""
    tokens = account.charged.input_tokens
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    shown = msgspec.Raw(found.encode())
    told = {"model": call.model, "usage": usage, "fairgate": account.as_json()}
    if call.task is RequestTask.EMBED:
        return {"object": "list", "data": shown} | told
    return {"id": call.request_id, "results": shown} | told
