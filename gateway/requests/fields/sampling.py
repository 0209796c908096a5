"""Checks the sampling parameters of a request, and reads a model's own defaults of them."""

from __future__ import annotations

import math
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from engine.messages import SamplingParams
from gateway import errors
from gateway.config import GatewayConfig
from gateway.domain.call import OPENAI_DEFAULTS, ServedModel
from gateway.requests.schemas import RANGES, Sampling
from tenants.errors import Invalid

SMALLEST_TOP_P = 1e-9
_SEED_RANGE = range(-(2**63), 2**63)
_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "seed", "stop", "ignore_eos", "logprobs", "top_logprobs",
)  # fmt: skip


class _GenerationConfig(msgspec.Struct):
    """As vLLM reads it, which has no use for `do_sample`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def model_defaults(model_dir: Path) -> SamplingParams:
    """By `generation_config.json`; without it, OpenAI's. Raises `Invalid` naming file and field."""
    file = model_dir / "generation_config.json"
    if not file.is_file():
        return OPENAI_DEFAULTS
    try:
        said = msgspec.structs.asdict(msgspec.json.decode(file.read_bytes(), type=_GenerationConfig))
        checked: dict[str, Any] = {
            name: _number(value, name, default=0) for name, value in said.items() if value is not None
        }
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid("model", f"{file}: {error}") from None
    except errors.ApiError as error:
        raise Invalid("model", f"{file}: {error.message}") from None
    return SamplingParams(**checked)


def said_sampling(request: Sampling) -> dict[str, Any]:
    """The sampling fields that the client set, for servers with defaults of their own."""
    names, values = _said_of(type(request))
    return {name: value for name, value in zip(names, values(request), strict=True) if value is not None}


@cache
def _said_of(kind: type[Sampling]) -> tuple[tuple[str, ...], attrgetter[tuple[Any, ...]]]:
    names = tuple(name for name in _NAMES if name in kind.__struct_fields__)
    return names, attrgetter(*names)


def sampling_of(
    request: Sampling, logprobs: int | None, model: ServedModel, config: GatewayConfig
) -> SamplingParams:
    """The sampling in our own engine. Raises `ApiError`."""
    unsaid = model.sampling
    top_k = int(_number(request.top_k, "top_k", default=unsaid.top_k))
    top_p = _number(request.top_p, "top_p", default=unsaid.top_p)
    repetition_penalty = _number(
        request.repetition_penalty, "repetition_penalty", default=unsaid.repetition_penalty
    )
    seed = request.seed
    if seed is not None and seed not in _SEED_RANGE:
        raise errors.bad_request("Invalid 'seed': it must fit in 64 bits with a sign.", "seed")
    return SamplingParams(
        temperature=_number(request.temperature, "temperature", default=unsaid.temperature),
        top_p=max(top_p, SMALLEST_TOP_P),
        top_k=min(max(0, top_k), model.vocabulary),
        min_p=_number(request.min_p, "min_p", default=unsaid.min_p),
        repetition_penalty=repetition_penalty,
        presence_penalty=_number(request.presence_penalty, "presence_penalty", default=0.0),
        frequency_penalty=_number(request.frequency_penalty, "frequency_penalty", default=0.0),
        logit_bias=_logit_bias(request.logit_bias, model, config),
        seed=seed,
        stop=_stop(request.stop, config),
        logprobs=logprobs,
        ignore_eos=bool(request.ignore_eos),
    )


def _logit_bias(bias: dict[str, float] | None, model: ServedModel, config: GatewayConfig) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > config.max_logit_bias:
        raise errors.bad_request(
            f"'logit_bias' has {len(bias)} entries; the most is {config.max_logit_bias}.", "logit_bias"
        )
    checked: dict[int, float] = {}
    for key, value in bias.items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) <= 9 else -1
        if not 0 <= token_id < model.vocabulary:
            raise errors.bad_request(
                f"Invalid 'logit_bias': '{key[:32]}' is not a token id in 0..{model.vocabulary - 1}.",
                "logit_bias",
            )
        checked[token_id] = _number(value, "logit_bias", f".{token_id}", default=0.0)
    return checked


def _stop(stop: str | list[str] | None, config: GatewayConfig) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(strings) > config.max_stop_strings:
        raise errors.bad_request(
            f"'stop' holds {len(strings)} strings; the most is {config.max_stop_strings}.", "stop"
        )
    for index, string in enumerate(strings):
        if not 1 <= len(string) <= config.max_stop_characters:
            raise errors.bad_request(
                f"Invalid 'stop': string {index} has {len(string)} characters;"
                f" it must have 1 to {config.max_stop_characters}.",
                "stop",
            )
    return strings


def _number(value: float | None, name: str, item: str = "", *, default: float) -> float:
    """`value` within the `RANGES` of `name`, or `default`. `item`: one of several values."""
    if value is None:
        return default
    lowest, highest, is_above = RANGES[name]
    is_over = highest is not None and value > highest
    if not math.isfinite(value) or value < lowest or is_over or (is_above and value == lowest):
        least = f"greater than {lowest:g}" if is_above else f"at least {lowest:g}"
        most = "" if highest is None else f" and at most {highest:g}"
        raise errors.bad_request(f"Invalid '{name}{item}': {value:g} must be {least}{most}.", name + item)
    return value


def integer(value: int | None, name: str, lowest: int, highest: int | None, *, default: int = 0) -> int:
    """Raises `ApiError`."""
    if value is None:
        return default
    if value < lowest or (highest is not None and value > highest):
        most = "" if highest is None else f" and at most {highest}"
        raise errors.bad_request(f"Invalid '{name}': {value} must be at least {lowest}{most}.", name)
    return value
