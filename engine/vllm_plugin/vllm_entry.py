"""Makes `FairScheduler`, the class for vLLM's `--scheduler-cls`. The only module that imports vLLM."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from engine.vllm_plugin.fair_steps import FairSteps
from engine.vllm_plugin.seam import VllmRequest
from engine.vllm_plugin.seam_check import OtherVllm, VllmClasses, check_seams, refusal


def vllm_classes() -> VllmClasses:
    """vLLM's own. Raises ImportError where vLLM is not installed, or has no such modules."""
    return VllmClasses(
        scheduler=import_module("vllm.v1.core.sched.async_scheduler").AsyncScheduler,
        queue=import_module("vllm.v1.core.sched.request_queue").RequestQueue,
        request=import_module("vllm.v1.request").Request,
    )


@cache
def fair_scheduler() -> type[FairSteps]:
    """vLLM's scheduler with fair steps. Raises `OtherVllm` for a version with another interface."""
    version = str(import_module("vllm").__version__)
    try:
        classes, messages = vllm_classes(), import_module("vllm.v1.engine")
    except (ImportError, AttributeError) as error:
        raise OtherVllm(refusal([str(error)], version)) from error
    check_seams(classes, version)

    def note_end(self: FairSteps, outputs: dict[int, Any], request: VllmRequest) -> None:
        last = messages.EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        of_client = outputs.get(request.client_index)
        if of_client is None:
            outputs[request.client_index] = messages.EngineCoreOutputs(outputs=[last])
        else:
            of_client.outputs.append(last)

    return type(
        "FairScheduler",
        (FairSteps, classes.scheduler),
        {"vllm_version": version, "note_end": note_end, "__module__": __name__},
    )
