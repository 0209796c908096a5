"""Checks what a request needs against the servers of its model. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gateway import errors
from gateway.domain.call import ServedModel
from gateway.upstream.capabilities import (
    COUNTED_BY_SERVER,
    FIELD_NEED,
    PLAIN_TEXT,
    Capabilities,
    Capability,
    Endpoint,
    ServerOffer,
)
from gateway.upstream.openai.server_kinds import COUNTED_FIELDS, ServerKind

MOST_NAMED = 3
"""Servers that a message names."""
OWN_ENGINE = ServerOffer("engine", PLAIN_TEXT, is_up=True)
REMEDIES: Mapping[tuple[str, str], str] = {
    (ServerKind.VLLM, Capability.TOOLS): "start it with --enable-auto-tool-choice and --tool-call-parser",
    (ServerKind.VLLM, Capability.FORCED_TOOLS): "start it with --tool-call-parser",
    (ServerKind.SGLANG, Capability.TOOLS): "start it with --tool-call-parser",
    (ServerKind.SGLANG, Capability.FORCED_TOOLS): "start it with --tool-call-parser",
    (ServerKind.LLAMA_CPP, Capability.TOOLS): "start it with --jinja",
    (ServerKind.LLAMA_CPP, Capability.FORCED_TOOLS): "start it with --jinja",
    (ServerKind.LLAMA_CPP, Capability.IMAGES): "start it with --mmproj",
    (ServerKind.LLAMA_CPP, Capability.AUDIO): "start it with --mmproj",
}
"""By kind of server and need: what its operator can do. Others depend on the model."""
OWN_LACKS: Mapping[str, str] = {
    Capability.TOOLS: "this model's chat template has no place for tools, or no form of calls that is known"
    " here; it can write JSON, by 'response_format'",
    Capability.FORCED_TOOLS: "the form of this model's calls is not known here, so none can be forced; it can"
    " write JSON, by 'response_format'",
    Capability.REASONING: "this model's chat template does not read 'reasoning_effort'",
}
"""By need: why a model of our own engine does not meet it."""
NO_USAGE = "its answers have no usage, by which that is charged: set usage to end or each for it"
TASKS: Mapping[str, str] = {
    Capability.TEXT: "generate text",
    Capability.EMBEDDINGS: "compute embeddings",
    Capability.RERANK: "rerank",
    Endpoint.CHAT: "take chats: send it to /v1/completions",
    Endpoint.TEXT: "take text completions: send it to /v1/chat/completions",
}
NAMES: Mapping[str, str] = {Capability.IMAGES: "images", Capability.AUDIO: "audio"}
"""Names of needs whose field is only a place in the request."""


def endpoint_needs(model: ServedModel, endpoint: Endpoint, param: str) -> dict[str, str]:
    """What a request to a text endpoint needs: nothing if all servers answer both."""
    answers = all(endpoint in server.capabilities.offers for server in model.servers)
    return {} if answers else {endpoint: param}


def require_servers(model: ServedModel, needs: Mapping[str, str]) -> None:
    """Raises `ApiError` if no server that is up can take the request: 503 if one that is down could, or if
    that is unknown, else 400. While no server is up every request is accepted. `needs`: see `Passed`."""
    servers = model.servers or (OWN_ENGINE,)
    able = [server for server in servers if server.capabilities.lacks(needs) is None]
    if any(capabilities.is_up for capabilities in able):
        return
    up = [server for server in servers if server.is_up]
    param = _to_blame(needs, up or servers)
    if able:
        if up:
            raise errors.capability_unavailable(
                what=_what(needs, param), who=f"{_names(able)} can, and is away", param=param
            )
        return
    untried = [upstream for upstream in up if upstream.capabilities.may_turn_out_to_meet(needs)]
    if untried:
        asked = f"{_names(untried)} is being asked whether it can"
        raise errors.capability_unavailable(what=_what(needs, param), who=asked, param=param)
    if not up and any(server.capabilities.may_turn_out_to_meet(needs) for server in servers):
        return
    raise errors.no_server_can(param, _refusal(model, needs, servers, param))


def may_run_in_own_engine(model: ServedModel, needs: Collection[str] = ()) -> bool:
    """Whether a replica of the model is our own engine, which runs exactly the ids counted here, and meets
    these needs."""
    return any(
        not server.capabilities.kind and server.capabilities.offers.issuperset(needs)
        for server in model.servers or (OWN_ENGINE,)
    )


def _to_blame(needs: Mapping[str, str], servers: tuple[ServerOffer, ...] | list[ServerOffer]) -> str:
    """The first field, in the request's order, that the fewest servers can honour."""
    counts = {
        field: sum(need in server.capabilities.offers for server in servers) for need, field in needs.items()
    }
    return min(counts, key=lambda field: counts[field])


def _refusal(
    model: ServedModel, needs: Mapping[str, str], servers: tuple[ServerOffer, ...], param: str
) -> str:
    if all(not server.capabilities.kind for server in servers):
        if param == "model":
            return "Our own engine, which runs this model, only generates text: ask for another model."
        what = _what(needs, param)
        lacking = next((need for need, field in needs.items() if field == param and need in OWN_LACKS), "")
        why = OWN_LACKS.get(lacking, "our own engine, which runs this model, does not do that")
        return (
            f"{what[:1].upper()}{what[1:]} cannot be taken: {why}. Leave that out, or ask for a model on a"
            " server that takes it."
        )
    said = [_lacking(server, needs) for server in servers[:MOST_NAMED]]
    if len(servers) > MOST_NAMED:
        said.append(f"{len(servers) - MOST_NAMED} more lack it too")
    return (
        f"No server of the model '{model.name[:128]}' takes this request: {'; '.join(said)}. Where a server"
        " does take it, its operator can say so with capabilities or fields in its [[upstreams]] table."
    )


def _lacking(server: ServerOffer, needs: Mapping[str, str]) -> str:
    found = server.capabilities
    missing = [need for need in needs if need not in found.offers]
    for need, what in TASKS.items():
        if need in missing:
            return f"{server.replica_id} does not {what}"
    said = [_with_remedy(found, need, needs[need]) for need in missing]
    return f"{server.replica_id} does not take {' and '.join(said)}"


def _with_remedy(found: Capabilities, need: str, field: str) -> str:
    counted = need.removeprefix(FIELD_NEED) in COUNTED_FIELDS or need in COUNTED_BY_SERVER
    if counted and not found.tells_usage:
        notes = [NO_USAGE]
    elif need.startswith(FIELD_NEED):
        notes = [f"no field of a server of the kind {found.kind or 'our own engine'}"]
    else:
        said = found.reasons.get(need)
        notes = [*filter(None, [REMEDIES.get((found.kind, need)), said and f"it says: {said}"])]
    what = _what({need: field}, field)
    name = need.removeprefix(FIELD_NEED)
    if need.startswith(FIELD_NEED) and name != field:
        what += f" of type '{name}'"
    return f"{what} ({'; '.join(notes)})" if notes else what


def _what(needs: Mapping[str, str], param: str) -> str:
    named = (name for need, name in NAMES.items() if needs.get(need) == param)
    return next(named, f"'{param}'")


def _names(servers: list[ServerOffer]) -> str:
    return ", ".join(server.replica_id for server in servers[:MOST_NAMED])
