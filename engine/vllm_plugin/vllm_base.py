"""What the plug-in uses of vLLM's scheduler, for the type checker: when it runs, the base class is vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.vllm_plugin.seam import VllmRequest

if TYPE_CHECKING:

    class VllmSchedulerBase:
        """What the mixin uses of vLLM's scheduler."""

        block_size: int
        current_step: int
        kv_cache_config: Any
        kv_cache_manager: Any
        max_model_len: int
        max_num_running_reqs: int
        max_num_scheduled_tokens: int
        need_mamba_block_aligned_split: bool
        requests: dict[str, VllmRequest]
        running: list[VllmRequest]
        waiting: Any
        vllm_config: Any
        _pause_state: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def schedule(self, *args: Any, **kwargs: Any) -> Any: ...
        def add_request(self, request: VllmRequest) -> None: ...
        def finish_requests(self, request_ids: Any, finished_status: Any) -> Any: ...
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]: ...
        def _preempt_request(self, request: VllmRequest, timestamp: float, *args: Any, **kw: Any) -> None: ...
        def _free_request(self, request: VllmRequest, *args: Any, **kwargs: Any) -> Any: ...
        def _mamba_block_aligned_split(
            self, request: VllmRequest, num_new_tokens: int, *args: Any, **kwargs: Any
        ) -> int: ...
        def _is_blocked_waiting_status(self, status: Any) -> bool: ...

else:
    VllmSchedulerBase = object
