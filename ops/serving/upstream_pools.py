"""Pools of replicas, of the servers that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import asdict

from engine.vllm_plugin.key_file import read_key
from gateway.domain.call import OPENAI_DEFAULTS
from gateway.fair_threads import FairThreads
from gateway.pools.pool import PoolSpec
from gateway.requests.parse import Renderer
from gateway.requests.prompt import EstimatedRenderer, PromptRenderer, SpecialTokensInText
from gateway.upstream.http.target import BadUrl
from gateway.upstream.openai.config import OpenAIServer, UpstreamSettings
from gateway.upstream.openai.upstream import OpenAIUpstream
from gateway.upstream.replica_set import ReplicaSet
from tenants.errors import Invalid


def server_of(settings: UpstreamSettings, environment: Mapping[str, str]) -> OpenAIServer:
    """Raises `Invalid` where its key is not in the environment, or the plug-in's not in its file."""
    key = ""
    if settings.api_key_env:
        key = environment.get(settings.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise Invalid(
                "upstreams",
                f"{settings.name}: the environment variable {settings.api_key_env} holds no API key; set it,"
                " or leave api_key_env out",
            )
    plugin_key = b""
    if settings.plugin_key_file:
        try:
            plugin_key = read_key(str(Path(settings.plugin_key_file).expanduser()))
        except ValueError as error:
            raise Invalid("upstreams", f"{settings.name}: plugin_key_file: {error}") from None
    return OpenAIServer(**asdict(settings), api_key=key, plugin_key=plugin_key)


def upstream_of(
    settings: UpstreamSettings,
    environment: Mapping[str, str],
    renderer: Renderer,
    cache_secret: bytes | None = None,
    threads: FairThreads | None = None,
    gateway_id: str = "",
) -> OpenAIUpstream:
    """`cache_secret` makes cache salts; None: random. `gateway_id` is for the plug-in. Raises `Invalid`."""
    count: Callable[[str], int] | None = None
    if isinstance(renderer, PromptRenderer):
        count = renderer.count
    try:
        return OpenAIUpstream(
            server_of(settings, environment),
            vocabulary=renderer.vocabulary if count is not None else None,
            tokenize=count,
            cache_secret=cache_secret,
            threads=threads,
            gateway_id=gateway_id,
        )
    except BadUrl as error:
        raise Invalid("upstreams", f"{settings.name}: url {settings.url!r}: {error}") from None


def renderer_of(
    settings: UpstreamSettings, special_tokens_in_text: SpecialTokensInText = "text"
) -> PromptRenderer | EstimatedRenderer:
    """The model's own, or an estimate. Raises `TokenizerMissing`."""
    if not settings.tokenizer_dir:
        return EstimatedRenderer()
    return PromptRenderer(Path(settings.tokenizer_dir).expanduser(), special_tokens_in_text, is_foreign=True)


def pools_of(
    servers: tuple[UpstreamSettings, ...],
    environment: Mapping[str, str],
    own: PoolSpec | None,
    cache_secret: bytes | None = None,
    special_tokens_in_text: SpecialTokensInText = "text",
    threads: FairThreads | None = None,
    gateway_id: str = "",
) -> tuple[tuple[PoolSpec, ...], tuple[OpenAIUpstream, ...]]:
    """Every served model, our own engine's first, and the servers to start. Servers of a model with our
    engine's name are its further replicas, counted by its tokenizer. Raises `Invalid`, `TokenizerMissing`."""
    specs: dict[str, PoolSpec] = {own.name: own} if own is not None else {}
    started: list[OpenAIUpstream] = []
    for name in dict.fromkeys(server.pool_name for server in servers):
        mine = [server for server in servers if server.pool_name == name]
        earlier = specs.get(name)
        if earlier is not None and mine[0].tokenizer_dir:
            raise Invalid(
                "upstreams",
                f"{name!r} is our engine's model, which has its tokenizer: leave tokenizer_dir out",
            )
        renderer = earlier.renderer if earlier is not None else renderer_of(mine[0], special_tokens_in_text)
        replicas = [
            upstream_of(server, environment, renderer, cache_secret, threads, gateway_id) for server in mine
        ]
        for replica in replicas:
            replica.stand_ins = tuple(other for other in replicas if other is not replica)
        started += replicas
        upstreams = ReplicaSet(replicas) if earlier is None else earlier.upstreams.beside(replicas)
        specs[name] = PoolSpec(
            name,
            upstreams,
            renderer,
            isinstance(renderer, EstimatedRenderer),
            is_foreign=True,
            image_tokens=max(server.image_tokens for server in mine),
            # Any replica may get the request, so the smallest limit counts.
            max_body_bytes=min(server.max_body_bytes for server in mine),
            is_token_fair=all(replica.link.has_plugin for replica in replicas),
            sampling=earlier.sampling if earlier is not None else OPENAI_DEFAULTS,
        )
    if not specs:
        raise Invalid(
            "upstreams", "engine.serve is no, and there is no other server: name one, or serve a model"
        )
    return tuple(specs.values()), tuple(started)
