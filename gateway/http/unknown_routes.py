"""Errors for paths and methods that have no route."""

from __future__ import annotations

from gateway.errors import ApiError

_INSTEAD = {
    "assistants": "use /v1/chat/completions",
    "threads": "use /v1/responses with the items so far",
    "conversations": "use /v1/responses with the items so far",
    "realtime": "use /v1/chat/completions with 'stream': true",
    "edits": "use /v1/chat/completions",
    "engines": "use /v1/models",
    "batches": "use /v1/chat/completions with 'service_tier': 'flex' (batch) for each request",
    "files": "use /v1/chat/completions with 'service_tier': 'flex' (batch) for each request",
    "usage": "use /v1/limits and /v1/requests",
    "organization": "use /v1/limits and /v1/requests",
}
"""What to use instead of OpenAI routes that are missing, by what follows `/v1/`."""
_NOT_SERVED = (
    *("moderations", "images", "audio", "videos", "fine_tuning", "fine-tunes", "uploads"),
    *("vector_stores", "evals", "containers", "graders"),
)
_BASE_URL = "The base URL of this server ends with one /v1."
_WITHOUT_PREFIX = frozenset(
    {
        "chat",
        "completions",
        "embeddings",
        "rerank",
        "models",
        "quotes",
        "limits",
        "requests",
        "responses",
        "messages",
    }
)


def not_found(path: str) -> ApiError:
    """Names the route that serves instead, if the path is OpenAI's."""
    message = f"Nothing at {path[:200]}. GET /docs lists what is here."
    first, _, rest = path.strip("/").partition("/")
    resource = rest.partition("/")[0]
    if first == "v1" and resource == "v1":
        message = f"Nothing at {path[:200]}: use {path[3:200]}. {_BASE_URL}"
    elif first in _WITHOUT_PREFIX:
        message = f"Nothing at {path[:200]}: use /v1{path[:200]}. {_BASE_URL}"
    elif first == "v1" and resource in _INSTEAD:
        message = f"/v1/{resource} is not served here: {_INSTEAD[resource]}."
    elif first == "v1" and resource in _NOT_SERVED:
        message = f"/v1/{resource} is not served here, only text: /v1/chat/completions, /v1/completions."
    return ApiError(404, "not_found", message)


def method_not_allowed(method: str, path: str, allowed: str) -> ApiError:
    """`allowed`: separated by commas."""
    methods = ", ".join(sorted({name.strip() for name in allowed.split(",")}))
    message = f"{method[:16]} is not possible on {path[:200]}: use {methods}."
    return ApiError(405, "method_not_allowed", message, headers={"allow": methods})
