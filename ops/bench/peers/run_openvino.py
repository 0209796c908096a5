"""Runner of OpenVINO GenAI's continuous batching, with explicit precisions. Imports nothing of ours."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

from .stdio import drive, serve

BLOCK_TOKENS = 32
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoEngine:
    def __init__(self) -> None:
        self._pipe: Any
        self._open: dict[int, Any] = {}
        self._next_id = 0

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        """The pipeline; see `Engine`. The directory holds the model exported to OpenVINO's format."""
        precision = PRECISIONS[options["dtype"]]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = -(-options["kv_tokens"] // BLOCK_TOKENS) + options["max_sequences"]
        scheduler.max_num_seqs = options["max_sequences"]
        scheduler.max_num_batched_tokens = options["max_batched_tokens"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "INFERENCE_NUM_THREADS": options["threads"],
        }
        self._pipe = openvino_genai.ContinuousBatchingPipeline(
            options["model_dir"], scheduler, "CPU", properties
        )
        return {
            "name": "openvino",
            "version": openvino_genai.get_version(),
            "openvino": openvino.get_version(),
            "dtype": options["dtype"],
            "kv_blocks": scheduler.num_kv_blocks,
            "block_tokens": BLOCK_TOKENS,
            "pid": os.getpid(),
        }

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return drive(self, requests)

    def submit(self, index: int, request: dict[str, Any]) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["output_tokens"]
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(np.array([request["prompt_token_ids"]], dtype=np.int64))
        self._open[index] = self._pipe.add_request(self._next_id, prompt, config)
        self._next_id += 1

    def has_work(self) -> bool:
        return bool(self._open)

    def step(self) -> list[tuple[int, list[int]]]:
        self._pipe.step()
        emitted = []
        for index, handle in list(self._open.items()):
            token_ids: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    token_ids += output.generated_ids
            if token_ids:
                emitted.append((index, token_ids))
            if handle.get_status() != openvino_genai.GenerationStatus.RUNNING and not handle.can_read():
                del self._open[index]
        return emitted


if __name__ == "__main__":
    serve(OpenVinoEngine())
