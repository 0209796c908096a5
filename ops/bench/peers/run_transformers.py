"""Runner of transformers' continuous batching. Imports nothing of ours."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from .stdio import serve

PAGE_TOKENS = 32
NO_EOS = -1
POLL_S = 1.0
MAX_SILENCE_S = 600.0


class TransformersEngine:
    def __init__(self) -> None:
        self._model: Any
        self._manager: Any
        self._runs = 0

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(options["threads"])
        transformers.utils.logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(
            options["model_dir"],
            dtype=getattr(torch, options["dtype"]),
            attn_implementation="sdpa",
            local_files_only=True,
        )
        self._model = model.to(options["device"]).eval()
        on_cpu = self._model.device.type == "cpu"
        num_blocks = -(-options["kv_tokens"] // PAGE_TOKENS) + options["max_sequences"]
        self._manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=NO_EOS),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=num_blocks,
                max_batch_tokens=options["max_batched_tokens"],
                max_requests_per_batch=options["max_sequences"],
                allow_block_sharing=False,
                # What only a GPU has is left to its own choice there.
                **({"auto_switch_to_flash": False, "use_cuda_graph": False, "use_async_batching": False}
                   if on_cpu else {}),
            ),
        )  # fmt: skip
        with torch.no_grad():
            self._manager.warmup()
        self._manager.start()
        return {
            "name": "transformers",
            "version": transformers.__version__,
            "torch": torch.__version__,
            "device": str(self._model.device),
            "dtype": options["dtype"],
            "kv_blocks": num_blocks,
            "block_tokens": PAGE_TOKENS,
        }

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self._runs += 1
        order = sorted(range(len(requests)), key=lambda index: requests[index]["arrival_s"])
        started_s = time.perf_counter()
        for index in order:
            request = requests[index]
            wait_s = request["arrival_s"] - (time.perf_counter() - started_s)
            if wait_s > 0:
                time.sleep(wait_s)
            self._manager.add_request(
                request["prompt_token_ids"],
                request_id=f"run-{self._runs}-{index}",
                max_new_tokens=request["output_tokens"],
                record_timestamps=True,
                eos_token_id=NO_EOS,
            )
        answers: dict[int, dict[str, Any]] = {}
        answered_s = time.perf_counter()
        while len(answers) < len(requests):
            result = self._manager.get_result(timeout=POLL_S)
            if result is None:
                if not self._manager.is_running() or time.perf_counter() - answered_s > MAX_SILENCE_S:
                    raise RuntimeError(f"only {len(answers)} of {len(requests)} requests were answered")
                continue
            answered_s = time.perf_counter()
            if result.error:
                raise RuntimeError(f"{result.request_id}: {result.error}")
            answers[int(result.request_id.rpartition("-")[2])] = {
                "token_ids": list(result.generated_tokens),
                "token_s": [at_s - started_s for at_s in result.timestamps],
            }
        return [answers[index] for index in range(len(requests))]


if __name__ == "__main__":
    serve(TransformersEngine())
