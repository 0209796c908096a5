"""Pools of replicas, of the servers that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import asdict

from gateway.pools.pool import PoolSpec
from gateway.requests.parse import Renderer
from gateway.requests.prompt import EstimatedRenderer, PromptRenderer
from gateway.upstream.base import Upstream
from gateway.upstream.http.target import BadUrl
from gateway.upstream.openai.config import OpenAIServer, UpstreamSettings
from gateway.upstream.openai.upstream import OpenAIUpstream
from tenants.errors import Invalid


def server_of(settings: UpstreamSettings, environment: Mapping[str, str]) -> OpenAIServer:
    """Raises `Invalid` where its key is not in the environment."""
    key = ""
    if settings.api_key_env:
        key = environment.get(settings.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            raise Invalid(
                "upstreams",
                f"{settings.name}: the environment variable {settings.api_key_env} holds no API key; set it,"
                " or leave api_key_env out",
            )
    return OpenAIServer(**asdict(settings), api_key=key)


def upstream_of(
    settings: UpstreamSettings, environment: Mapping[str, str], renderer: Renderer
) -> OpenAIUpstream:
    """Raises `Invalid`."""
    count: Callable[[str], int] | None = None
    if isinstance(renderer, PromptRenderer):
        count = renderer.count
    try:
        return OpenAIUpstream(
            server_of(settings, environment),
            vocabulary=renderer.vocabulary if count is not None else None,
            tokenize=count,
        )
    except BadUrl as error:
        raise Invalid("upstreams", f"{settings.name}: url {settings.url!r}: {error}") from None


def renderer_of(settings: UpstreamSettings) -> Renderer:
    """The model's own, or an estimate. Raises `TokenizerMissing`."""
    if not settings.tokenizer_dir:
        return EstimatedRenderer()
    return PromptRenderer(Path(settings.tokenizer_dir).expanduser())


def pools_of(
    servers: tuple[UpstreamSettings, ...], environment: Mapping[str, str], own: PoolSpec | None
) -> tuple[tuple[PoolSpec, ...], tuple[OpenAIUpstream, ...]]:
    """Every served model, our own engine's first, and the servers to start. Servers whose model has the name
    of our engine's are further replicas of it, counted by its tokenizer. Raises `Invalid`,
    `TokenizerMissing`."""
    specs: dict[str, PoolSpec] = {own.name: own} if own is not None else {}
    started: list[OpenAIUpstream] = []
    for name in dict.fromkeys(each.pool_name for each in servers):
        mine = [each for each in servers if each.pool_name == name]
        earlier = specs.get(name)
        if earlier is not None and mine[0].tokenizer_dir:
            raise Invalid(
                "upstreams",
                f"{name!r} is our engine's model, which has its tokenizer: leave tokenizer_dir out",
            )
        renderer = earlier.renderer if earlier is not None else renderer_of(mine[0])
        replicas = [upstream_of(each, environment, renderer) for each in mine]
        for replica in replicas:
            replica.stand_ins = tuple(other for other in replicas if other is not replica)
        started += replicas
        upstreams: tuple[Upstream, ...] = (*(earlier.upstreams if earlier is not None else ()), *replicas)
        specs[name] = PoolSpec(
            name, upstreams, renderer, isinstance(renderer, EstimatedRenderer), is_foreign=True
        )
    if not specs:
        raise Invalid(
            "upstreams", "engine.serve is no, and there is no other server: name one, or serve a model"
        )
    return tuple(specs.values()), tuple(started)
