"""Runner of our own engine, driven as its server drives it, without the sockets."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from engine.core.core import EngineConfig, EngineCore
from engine.core.detokenizer import load_texts
from engine.messages import SamplingParams, Submit
from ops.bench.peers.stdio import drive, serve

GATEWAY = "bench"
TENANT = "bench"


class NoText:
    stopped = ""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def logprob_text(self, token_id: int) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class NoTexts:
    def open(self, prompt_token_ids: list[int], sampling: SamplingParams) -> NoText:
        return NoText()


class FairgateEngine:
    """Implements `Engine` and `Stepped` over one engine core."""

    def __init__(self) -> None:
        self._core: EngineCore
        self._predicted_tokens = 1
        self._prefix = ""
        self._runs = 0

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        from engine.model.loader import DEFAULT_BLOCK_TOKENS, load_runner

        model_dir = Path(options["model_dir"])
        # A last block that is not full for each sequence, and the watermark that admissions leave free.
        blocks = -(-options["kv_tokens"] // DEFAULT_BLOCK_TOKENS) + options["max_sequences"]
        runner = load_runner(
            model_dir,
            dtype=options["dtype"],
            device=options["device"],
            num_blocks=blocks + blocks // 20,
            block_tokens=DEFAULT_BLOCK_TOKENS,
            num_rows=options["max_sequences"],
            threads=options["threads"],
        )
        config = EngineConfig(
            policy=options["policy"],
            max_batched_tokens=options["max_batched_tokens"],
            max_sequences=options["max_sequences"],
            max_waiting=options["max_waiting"],
        )
        texts = load_texts(model_dir) if options["detokenize"] else NoTexts()
        self._core = EngineCore(runner, texts, config, time.monotonic)
        return {
            "name": "fairgate",
            "policy": self._core.policy,
            "attention": runner.info.attention,
            "device": runner.info.device,
            "dtype": runner.info.dtype,
            "kv_blocks": runner.num_blocks,
            "block_tokens": runner.block_tokens,
            "text": bool(options["detokenize"]),
            "pid": os.getpid(),
        }

    def run(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self._runs += 1
        self._prefix = f"run-{self._runs}-"
        # As a forecast of such requests: their median.
        self._predicted_tokens = round(median(request["output_tokens"] for request in requests))
        return drive(self, requests)

    def submit(self, index: int, request: dict[str, Any]) -> None:
        sequence_id = f"{self._prefix}{index}"
        refused = self._core.submit(
            Submit(
                sequence_id=sequence_id,
                request_id=sequence_id,
                tenant_id=TENANT,
                prompt_token_ids=request["prompt_token_ids"],
                max_tokens=request["output_tokens"],
                lease_tokens=request["output_tokens"],
                sampling=SamplingParams(temperature=0.0, ignore_eos=True),
                predicted_output_tokens=self._predicted_tokens,
            ),
            GATEWAY,
        )
        if refused is not None:
            raise RuntimeError(f"request {index} was refused: {refused.message}")

    def has_work(self) -> bool:
        return self._core.has_work()

    def step(self) -> list[tuple[int, list[int]]]:
        emitted = []
        for delta in self._core.step().deltas.get(GATEWAY, ()):
            if delta.outcome is not None and delta.outcome.finish != "length":
                raise RuntimeError(f"{delta.sequence_id} ended with {delta.outcome.finish}")
            emitted.append((int(delta.sequence_id.removeprefix(self._prefix)), delta.token_ids))
        return emitted


if __name__ == "__main__":
    serve(FairgateEngine())
