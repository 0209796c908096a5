"""What the plug-in needs of vLLM's scheduler, checked at start: another version fails with a clear line.

A seam is an attribute or method that the plug-in reads, sets or overrides. A setting of vLLM with which
tokens could not be counted is refused; what the plug-in was merely never run with is named.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

RUN_WITH = ("0.29.0", "0.32.0")
"""Versions of vLLM that the plug-in was run with (`make bench-vllm`)."""

METHODS: dict[str, tuple[str, ...]] = {
    "schedule": (),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
    "update_from_output": ("scheduler_output", "model_runner_output"),
    "_preempt_request": ("request", "timestamp"),
    "_free_request": ("request",),
    "_mamba_block_aligned_split": ("request", "num_new_tokens"),
    "_is_blocked_waiting_status": ("status",),
}
"""Of the scheduler, with the first parameters after `self`."""
PROMOTE = ("_handle_blocked_waiting_request", "_try_promote_blocked_waiting_request")
"""One of these: whether a request that waited for its grammar is ready now."""
ATTRIBUTES = (
    "block_size",
    "current_step",
    "kv_cache_config",
    "kv_cache_manager",
    "max_num_running_reqs",
    "max_num_scheduled_tokens",
    "max_model_len",
    "need_mamba_block_aligned_split",
    "requests",
    "running",
    "waiting",
    "_pause_state",
)
STEP_READS = (
    "_mamba_block_aligned_split",
    "_preempt_request",
    "need_mamba_block_aligned_split",
    "next_decode_eligible_step",
    "num_output_placeholders",
    "peek_request",
    "pop_request",
    "running",
    "waiting",
)
"""Names that its `schedule` reads: without one of them a decision of ours would have no effect."""
REQUEST_ATTRIBUTES = (
    "max_tokens",
    "next_decode_eligible_step",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_output_placeholders",
    "num_prompt_tokens",
    "num_stale_output_tokens",
    "request_id",
    "sampling_params",
    "status",
)
"""That the constructor of a request sets."""
REQUEST_PROPERTIES = ("has_encoder_inputs", "is_finished", "num_output_tokens", "num_tokens")
QUEUE_METHODS = (
    "add_request",
    "peek_request",
    "pop_request",
    "prepend_request",
    "prepend_requests",
    "remove_request",
    "remove_requests",
)
"""Of the waiting queue, which ours replaces: all that it has to have."""


class OtherVllm(RuntimeError):
    """This vLLM has another scheduler interface, or is set up in a way that the plug-in cannot count."""


@dataclass(frozen=True, slots=True)
class VllmClasses:
    scheduler: type[Any]
    queue: type[Any]
    request: type[Any]


@dataclass(slots=True)
class Found:
    """What a version has of the seams."""

    methods: dict[str, list[str]] = field(default_factory=dict)
    promote: list[str] = field(default_factory=list)
    step_reads: list[str] = field(default_factory=list)
    request_attributes: list[str] = field(default_factory=list)
    request_properties: list[str] = field(default_factory=list)
    queue_methods: list[str] = field(default_factory=list)


def look(classes: VllmClasses) -> Found:
    scheduler, request = classes.scheduler, classes.request
    methods = {
        name: _parameters(inspect.getattr_static(scheduler, name))
        for name in METHODS
        if hasattr(scheduler, name)
    }
    reads = _names(scheduler, "schedule")
    sets = _names(request, "__init__")
    abstract: frozenset[str] = getattr(classes.queue, "__abstractmethods__", frozenset())
    return Found(
        methods=methods,
        promote=[name for name in PROMOTE if hasattr(scheduler, name)],
        step_reads=[name for name in STEP_READS if name in reads],
        request_attributes=[name for name in REQUEST_ATTRIBUTES if name in sets],
        request_properties=[name for name in REQUEST_PROPERTIES if hasattr(request, name)],
        queue_methods=sorted(name for name in abstract if not name.startswith("__")),
    )


def differences(found: Found) -> list[str]:
    """What of the seams is missing or different; empty: nothing."""
    wrong: list[str] = []
    for name, wanted in METHODS.items():
        have = found.methods.get(name)
        if have is None:
            wrong.append(f"the scheduler has no {name}()")
        elif tuple(have[: len(wanted)]) != wanted:
            wrong.append(f"{name}() takes ({', '.join(have)}), not ({', '.join(wanted)}, ...)")
    if not found.promote:
        wrong.append(f"the scheduler has neither {PROMOTE[0]}() nor {PROMOTE[1]}()")
    wrong += [f"schedule() does not read {name}" for name in STEP_READS if name not in found.step_reads]
    wrong += [
        f"a request has no {name}" for name in REQUEST_ATTRIBUTES if name not in found.request_attributes
    ]
    wrong += [
        f"a request has no {name}" for name in REQUEST_PROPERTIES if name not in found.request_properties
    ]
    if found.queue_methods != sorted(QUEUE_METHODS):
        wrong.append(f"the waiting queue has the methods {', '.join(found.queue_methods)}")
    return wrong


def check_seams(classes: VllmClasses, version: str) -> None:
    """Raises `OtherVllm` naming the version, what differs, and the versions that work."""
    refuse(differences(look(classes)), version)


def check_instance(scheduler: object, version: str) -> None:
    """The attributes of a scheduler that was made. Raises `OtherVllm`."""
    refuse([f"the scheduler has no {name}" for name in ATTRIBUTES if not hasattr(scheduler, name)], version)


def refuse(wrong: list[str], version: str) -> None:
    """Raises `OtherVllm` where something is wrong."""
    if wrong:
        raise OtherVllm(refusal(wrong, version))


def refusal(wrong: list[str], version: str) -> str:
    """What differs in a version, and the way out."""
    return (
        f"vLLM {version} has another scheduler interface than fairgate-vllm needs ({'; '.join(wrong)})."
        f" Versions that work: {', '.join(RUN_WITH)}. Start vLLM without --scheduler-cls, or install one"
        " of those."
    )


def not_run_with(scheduler: Any, version: str) -> list[str]:
    """Features in use that it was never run with. Raises `OtherVllm` where tokens cannot be counted."""
    config = scheduler.vllm_config
    refused = {
        "speculative decoding": getattr(config, "speculative_config", None) is not None,
        "a KV connector (prefill and decode on different servers, KV offloading)": getattr(
            config, "kv_transfer_config", None
        )
        is not None,
        "pipeline parallelism": getattr(config.parallel_config, "pipeline_parallel_size", 1) > 1,
        "LoRA (resting sequences keep their adapters: more than --max-loras in a step end vLLM)": (
            getattr(config, "lora_config", None) is not None
        ),
        "data parallelism behind one API server (only the first rank's reports reach a gateway)": (
            getattr(config.parallel_config, "data_parallel_size", 1) > 1
            and not getattr(config.parallel_config, "data_parallel_external_lb", False)
        ),
        "a pooling or diffusion model": getattr(scheduler, "num_sampled_tokens_per_step", 1) == 0,
        "an encoder-decoder model": getattr(scheduler, "is_encoder_decoder", False),
        "--scheduling-policy other than fcfs": str(config.scheduler_config.policy) != "fcfs",
    }
    wrong = [name for name, is_on in refused.items() if is_on]
    if wrong:
        raise OtherVllm(
            f"fairgate-vllm cannot keep count of tokens with {', '.join(wrong)}: start vLLM without that, or"
            " without --scheduler-cls"
        )
    unknown = {
        f"vLLM {version} (run with {', '.join(RUN_WITH)})": version.split("+")[0] not in RUN_WITH,
        "the V2 model runner": bool(getattr(scheduler, "use_v2_model_runner", False)),
        "data parallelism (each rank counts by itself)": getattr(
            config.parallel_config, "data_parallel_size", 1
        )
        > 1,
        "a device other than a CPU": _device(config) != "cpu",
        "a model with Mamba layers (prompts are not divided inside a step)": bool(
            getattr(scheduler, "has_mamba_layers", False)
        ),
    }
    return [name for name, is_on in unknown.items() if is_on]


def _device(config: Any) -> str:
    return str(getattr(getattr(config, "device_config", None), "device_type", "cpu"))


def _parameters(member: Any) -> list[str]:
    function = getattr(member, "__func__", member)
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _names(cls: type[Any], method: str) -> set[str]:
    """Names that a method's code reads or sets, in any class that defines it."""
    names: set[str] = set()
    for base in cls.__mro__:
        code = getattr(base.__dict__.get(method), "__code__", None)
        if code is not None:
            names.update(code.co_names)
    return names
