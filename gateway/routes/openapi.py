"""The OpenAPI document, and a plain HTML page of it that needs no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any

import msgspec
from litestar import Litestar, MediaType, Response, get
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme, Tag

from gateway.http.asgi import Request
from gateway.routes import openapi_fields
from gateway.routes.context import gateway_of, json_response

API_VERSION = "1"
_REFERENCE = "#/components/schemas/{name}"


@get("/", include_in_schema=False)
async def root(request: Request) -> Response[bytes]:
    return json_response(
        {
            "service": "fairgate",
            "model": gateway_of(request).deps.model_name,
            "api": "/v1",
            "docs": "/docs",
            "openapi": "/openapi.json",
            "health": ["/healthz", "/readyz", "/metrics"],
        }
    )


@get("/openapi.json", include_in_schema=False)
async def openapi_json(request: Request) -> Response[bytes]:
    return json_response(document(request.app, request.app.openapi_schema.to_schema()))


@get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response[bytes]:
    contents = document(request.app, request.app.openapi_schema.to_schema())
    text = page(contents, str(request.base_url).rstrip("/"), gateway_of(request).deps.model_name)
    return Response(text.encode(), media_type=MediaType.HTML)


def openapi_config() -> OpenAPIConfig:
    bearer = SecurityScheme(type="http", scheme="bearer", description="fg_live_<public id>_<secret>")
    azure, anthropic = (
        SecurityScheme(type="apiKey", name=name, security_scheme_in="header", description="The same.")
        for name in ("api-key", "x-api-key")
    )
    return OpenAPIConfig(
        title="Fairgate",
        version=API_VERSION,
        summary="OpenAI-compatible inference, shared by contract.",
        description="Token budgets, fair queueing, estimates and accounts in front of one engine pool.",
        components=Components(security_schemes={"key": bearer, "azure": azure, "anthropic": anthropic}),
        security=[{"key": []}, {"azure": []}, {"anthropic": []}],
        tags=[Tag("inference"), Tag("operation"), Tag("admin")],
        render_plugins=[],  # its pages load a renderer from a CDN
    )


def document(app: Litestar, schema: dict[str, Any]) -> dict[str, Any]:
    """The framework's document, completed by the bodies and answers that routes handle themselves."""
    contents: dict[str, Any] = json.loads(msgspec.json.encode(schema))
    components = contents.setdefault("components", {}).setdefault("schemas", {})
    bodies: set[type[msgspec.Struct]] = set()
    for path in contents["paths"].values():
        path.pop("head", None)  # as GET, without a body
    for route in app.routes:
        for handler in getattr(route, "route_handlers", ()):
            for method in handler.http_methods:
                operation = contents["paths"].get(route.path_format, {}).get(method.lower())
                if operation is not None:
                    describe(operation, handler.opt)
                    bodies |= {handler.opt["body"]} if "body" in handler.opt else set()
    structs = sorted(bodies, key=lambda struct: struct.__name__)
    components.update(msgspec.json.schema_components(structs, ref_template=_REFERENCE)[1])
    openapi_fields.complete(components)
    openapi_fields.annotate(components, structs)
    components["Error"] = _ERROR
    return contents


def describe(operation: dict[str, Any], opt: Mapping[str, Any]) -> None:
    """Completes an operation from its route's `opt`: `scope` of the key, `body` (`body_is_optional`),
    `headers`, the `query` of a list (`is_own`: of the key's tenant), bounds of its `parameters`,
    other `answers` by status (`plain`: the one that is no error),
    `streams`, `media_types`."""
    body = opt.get("body")
    if (query := opt.get("query")) is not None:
        operation["parameters"] = openapi_fields.query_parameters(query, is_own=opt.get("is_own", False))
    if opt.get("in_tenant"):
        whose = {"type": "string"} | openapi_fields.PARAMETERS["tenant"]
        operation["parameters"].append({"name": "tenant", "in": "query", "required": False, "schema": whose})
    if body is not None:
        reference = {"$ref": _REFERENCE.format(name=body.__name__)}
        operation["requestBody"] = {
            "required": not opt.get("body_is_optional", False),
            "content": {"application/json": {"schema": reference}},
        }
    for parameter in operation.get("parameters", []) if query is None else []:
        known = openapi_fields.PARAMETERS | opt.get("parameters", {})
        kinds = parameter["schema"].pop("oneOf", [{}])
        parameter["schema"] |= next(kind for kind in kinds if kind.get("type") != "null")  # no text is null
        openapi_fields.narrow(parameter["schema"], known.get(parameter["name"], {}))
    for name, (what, schema) in opt.get("headers", {}).items():
        operation.setdefault("parameters", []).append(
            {"name": name, "in": "header", "required": False, "description": what, "schema": schema}
        )
    answers = dict(opt.get("answers", {}))
    scope = opt.get("scope")
    if scope is None:
        operation |= {"tags": ["operation"], "security": []}
    else:
        operation["tags"] = ["admin" if scope.startswith("admin:") else "inference"]
        answers |= _OF_KEYS
    if body is not None:
        answers |= _OF_BODIES
    if operation.get("parameters"):
        answers |= _OF_PARAMETERS
    if scope == "admin:write":
        answers |= {
            404: "It names something that does not exist.",
            409: "It contradicts what is there already.",
        } | dict(opt.get("answers", {}))
    for status, answer in operation["responses"].items():
        if status.startswith("2"):
            kinds = opt.get("media_types", ("application/json",))
            answer["content"] = {kind: {"schema": {}} for kind in kinds}
            if opt.get("streams"):
                answer["content"]["text/event-stream"] = {"schema": {}}
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Error")}}}
    for status, what in sorted(answers.items()):
        content = {"application/json": {"schema": {}}} if status == opt.get("plain") else error
        operation["responses"][str(status)] = {"description": what, "content": content}


_OF_KEYS = {
    401: "The key is missing, malformed, unknown, revoked or expired.",
    403: "The key lacks the scope, may not use the tier, or not from this address, or its tenant or project"
    " is suspended.",
    503: "Database, quota store or all that runs the model is away; the headers say when to try again.",
}
_OF_BODIES = {
    400: "The body, a field or a header cannot be taken; `param` names it.",
    408: "The body did not arrive in time.",
    413: "The body is larger than the server reads.",
    415: "The body is not JSON.",
}
_OF_PARAMETERS = {
    400: "A parameter cannot be taken; `param` names it.",
    404: "There is no such thing, or it is not yours.",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
                "current": {"description": "With 412: the object as it is now; null: there is none."},
            },
        },
        "fairgate": {
            "type": "object",
            "description": "`fallback`: the models of a chain that were tried, each with the reason why it"
            " did not take the request.",
        },
    },
}
"""OpenAI's error object with our members."""


def page(found: dict[str, Any], base: str, model: str) -> str:
    schemas = found["components"]["schemas"]
    sections: list[str] = []
    for tag in found.get("tags", []):
        operations = [
            _operation(path, method, operation, schemas)
            for path, methods in sorted(found["paths"].items())
            for method, operation in methods.items()
            if tag["name"] in operation.get("tags", [])
        ]
        sections.append(f"<h2>{html.escape(tag['name'])}</h2>" + "".join(operations))
    example = (
        f"curl {base}/v1/chat/completions \\\n"
        '  -H "Authorization: Bearer $FAIRGATE_KEY" -H "Content-Type: application/json" \\\n'
        f'  -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
    )
    return _PAGE.format(example=html.escape(example), sections="".join(sections))


def _operation(path: str, method: str, operation: dict[str, Any], schemas: dict[str, Any]) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    name = body.get("$ref", "").rpartition("/")[2]
    fields = _fields(schemas.get(name, {}))
    description = operation.get("description") or ""
    parameters = "".join(
        f"<tr><td><code>{html.escape(parameter['name'])}</code></td><td>{html.escape(parameter['in'])}</td>"
        f"<td>{html.escape(parameter.get('description') or '')}</td></tr>"
        for parameter in operation.get("parameters", [])
    )
    table = f"<table>{parameters}{fields}</table>" if parameters or fields else ""
    return (
        f"<details><summary><b class={method}>{method.upper()}</b> <code>{html.escape(path)}</code> "
        f"{html.escape(operation.get('summary') or '')}</summary>"
        f"<p>{html.escape(description)}</p>{table}</details>"
    )


def _fields(schema: dict[str, Any]) -> str:
    required = set(schema.get("required", []))
    rows: list[str] = []
    for name, field in schema.get("properties", {}).items():
        note = "required" if name in required else ""
        rows.append(
            f"<tr><td><code>{html.escape(name)}</code></td>"
            f"<td>{html.escape(_type(field))}</td><td>{note}</td></tr>"
        )
    return "".join(rows)


def _type(field: dict[str, Any]) -> str:
    if "anyOf" in field:
        return " | ".join(_type(option) for option in field["anyOf"])
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Fairgate API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ background: #f4f4f5; padding: 1rem; overflow-x: auto; border-radius: 6px; }}
code {{ font-family: ui-monospace, monospace; }}
details {{ border: 1px solid #ddd; border-radius: 6px; padding: .5rem 1rem; margin: .5rem 0; }}
summary {{ cursor: pointer; }}
b {{ display: inline-block; min-width: 4.5rem; }}
.get {{ color: #0969da; }} .post {{ color: #1a7f37; }} .delete {{ color: #cf222e; }}
table {{ border-collapse: collapse; }} td {{ padding: .15rem 1rem .15rem 0; vertical-align: top; }}
</style></head><body>
<h1>Fairgate API</h1>
<p>OpenAI-compatible. The machine-readable document is at <a href="/openapi.json">/openapi.json</a>.</p>
<pre>{example}</pre>
{sections}
</body></html>
"""

HANDLERS = [root, openapi_json, docs]
