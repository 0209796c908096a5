"""A first request to this server, ready to be copied."""

from __future__ import annotations

import json

from gateway.console.access import visit_of
from gateway.http.asgi import Request, headers_of
from gateway.routes.context import gateway_of


def curl_line(request: Request, key: str) -> str:
    """Empty: no model is served."""
    gateway = gateway_of(request)
    host = headers_of(request.scope).get("host", "127.0.0.1")
    model, pool = next(iter(gateway.pools.items()), ("", None))
    if pool is None:
        return ""
    has_chat = getattr(pool.spec.renderer, "has_chat_template", True)
    asked = {"messages": [{"role": "user", "content": "Hello"}]} if has_chat else {"prompt": "Hello"}
    body = json.dumps({"model": model, **asked, "max_tokens": 32})
    scheme = "https" if visit_of(request).is_https else "http"
    return (
        f"curl {scheme}://{host}/v1/{'chat/' * has_chat}completions"
        f' -H "authorization: Bearer {key}" -H "content-type: application/json" -d \'{body}\''
    )
