"""Fair steps inside vLLM, measured on vLLM's engine in this process, stock beside it.

Run by the Python of vLLM's environment, in which the wheel `fairgate-vllm` is installed; it imports nothing
else of this project:

    python in_process.py --model DIR [--cases NAME,...] [--out FILE]

Each run is a process of its own; its result is one JSON object. Texts are compared with those of stock vLLM
with as many blocks as it wants.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_TARGET_DEVICE": "cpu",
    # The model is tiny: more threads wait for each other.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # No gateway speaks here.
    "FAIRGATE_VLLM_GATEWAY_TIMEOUT_S": "3600",
}
PROMPT = list(range(20, 36))
WEIGHTS = {"a": 1.0, "b": 3.0}
SETTLED_STEPS = 100
"""From so many steps after the last prompt shares are looked at."""
WINDOW_STEPS = 1000

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
}

CASES: dict[str, dict[str, Any]] = {
    "weights-32": {"streams": 32, "places": 64, "slots": 16, "tokens": 700, "steps": 1500},
    "weights-64": {"streams": 64, "places": 128, "slots": 64, "tokens": 1400, "steps": 1400},
    "blocks-300": {"streams": 24, "places": 48, "slots": 16, "tokens": 400, "blocks": 300},
    "blocks-120": {"streams": 24, "places": 48, "slots": 16, "tokens": 400, "blocks": 120},
    "newcomer": {"places": 64, "slots": 16, "tokens": 1900, "newcomers": 20},
    "crowd": {"streams": 64, "places": 64, "slots": 64, "tokens": 400, "late": 300, "steps": 900},
    "schemas": {"streams": 12, "places": 24, "slots": 8, "tokens": 100, "has_schemas": True},
    "no-contest": {"streams": 32, "places": 64, "slots": 0, "tokens": 300},
}


class VllmRun:
    """One engine with its streams."""

    def __init__(self, model: str, case: dict[str, Any], *, is_stock: bool) -> None:
        key = secrets.token_hex(32).encode()
        self._sign = _unsigned if is_stock else _signer(key)
        with _key_file(key) as key_file:
            os.environ.update(
                ENVIRON, FAIRGATE_VLLM_SLOTS=str(case["slots"]), FAIRGATE_VLLM_KEY_FILE=key_file
            )
            self._start(model, case, is_stock=is_stock)

    def _start(self, model: str, case: dict[str, Any], *, is_stock: bool) -> None:
        vllm = import_module("vllm")
        sizes: dict[str, Any] = {
            "model": model,
            "max_num_seqs": case["places"],
            "max_num_batched_tokens": 2048,
            "max_model_len": 2048,
            "dtype": "float32",
            "block_size": 32,
            "enforce_eager": True,
            "enable_prefix_caching": False,
        }
        if case.get("blocks"):
            sizes["num_gpu_blocks_override"] = case["blocks"]
        if not is_stock:
            sizes["scheduler_cls"] = "fairgate_vllm.FairScheduler"
        self.case = case
        self.engine = vllm.LLMEngine.from_engine_args(vllm.EngineArgs(**sizes))
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.texts: dict[str, list[int]] = {}
        self.first_steps: dict[str, int] = {}
        self.emitted: list[Counter[str]] = []
        """By step: tokens that clients got, by tenant."""
        self.evictions = self.recomputed_tokens = 0
        self.schedule_s: list[float] = []
        self._spy()

    def _spy(self) -> None:
        preempt, schedule = self.scheduler._preempt_request, self.scheduler.schedule

        def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
            # The last token of a step under way is emitted all the same.
            self.evictions += 1
            self.recomputed_tokens += request.num_computed_tokens
            return preempt(request, *args, **kwargs)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            output = schedule(*args, **kwargs)
            self.schedule_s.append(time.perf_counter() - began_s)
            return output

        self.scheduler._preempt_request, self.scheduler.schedule = counted, timed

    def add(self, tenant: str, number: int, tokens: int) -> None:
        params = import_module("vllm.sampling_params")
        schema = None
        if self.case.get("has_schemas") and number % 2:
            schema = params.StructuredOutputsParams(json=SCHEMA)
        sampling = params.SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=schema is None,
            structured_outputs=schema,
            output_kind=params.RequestOutputKind.DELTA,
            extra_args=self._sign(tenant, f"{tenant}{number}", tokens),
        )
        prompt = {"prompt_token_ids": [*PROMPT, (40 if tenant == "a" else 120) + number]}
        self.engine.add_request(f"{tenant}{number}", prompt, sampling)

    def step(self) -> None:
        counts: Counter[str] = Counter()
        for output in self.engine.step():
            tokens = output.outputs[0].token_ids
            if tokens:
                name = output.request_id.split("-")[0]
                self.texts.setdefault(name, []).extend(tokens)
                self.first_steps.setdefault(name, len(self.emitted))
                counts[name[0]] += len(tokens)
        self.emitted.append(counts)

    def result(self, began_s: float) -> dict[str, Any]:
        took_s = time.perf_counter() - began_s
        times = sorted(self.schedule_s)
        total = sum(map(len, self.texts.values()))
        return {
            "steps": len(self.emitted),
            "tokens": total,
            "tokens_per_s": round(total / took_s),
            "evictions": self.evictions,
            "recomputed_tokens": self.recomputed_tokens,
            "schedule_us": round(1e6 * times[len(times) // 2]),
            **self._shares(),
        }

    def _shares(self) -> dict[str, Any]:
        """b's tokens over a's in every window, from when all prompts were computed until a stream ends."""
        begin = max(self.first_steps.values(), default=0) + SETTLED_STEPS
        end = self.case.get("ended_at", len(self.emitted))
        width = min(WINDOW_STEPS, end - begin)
        if width < SETTLED_STEPS:
            return {}
        ratios: list[float] = []
        had = Counter[str]()
        for step in range(begin, end):
            had.update(self.emitted[step])
            if step - begin >= width:
                had.subtract(self.emitted[step - width])
            if step - begin >= width - 1:
                ratios.append(had["b"] / max(1, had["a"]))
        return {"window_steps": width, "windows": len(ratios), "least": min(ratios), "most": max(ratios)}


def _unsigned(tenant: str, name: str, tokens: int) -> dict[str, str]:
    return {}


def _signer(key: bytes) -> Callable[[str, str, int], dict[str, str]]:
    """Signs requests as a gateway does."""
    protocol = import_module("fairgate_vllm.protocol")
    sign = import_module("fairgate_vllm.signature").sign

    def signed(tenant: str, name: str, tokens: int) -> dict[str, str]:
        claims = protocol.ContractClaims(
            gateway_id="bench",
            request_id=name,
            sequence_id=name,
            tenant_id=tenant,
            lease_tokens=tokens,
            issued_at_s=time.time(),
            weight=WEIGHTS[tenant],
            predicted_output_tokens=tokens,
        )
        return {"fairgate": sign(claims, key)}

    return signed


@contextmanager
def _key_file(key: bytes) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "key"
        path.touch(mode=0o600)
        path.write_bytes(key)
        yield str(path)


def run_streams(run: VllmRun) -> dict[str, Any]:
    """Streams of both tenants, b's after a's where the case says so."""
    case = run.case
    began_s = time.perf_counter()
    for number in range(case["streams"]):
        run.add("a", number, case["tokens"])
        if not case.get("late"):
            run.add("b", number, case["tokens"])
    while run.engine.has_unfinished_requests():
        if len(run.emitted) == case.get("late"):
            for number in range(case["streams"]):
                run.add("b", number, case["tokens"])
        run.step()
        if "ended_at" not in case and any(len(text) >= case["tokens"] for text in run.texts.values()):
            case["ended_at"] = len(run.emitted)
        if len(run.emitted) >= case.get("steps", 1 << 30):
            break
    late = (
        [step - case["late"] for name, step in run.first_steps.items() if name[0] == "b"]
        if case.get("late")
        else []
    )
    extra = {"late_first_steps": [min(late), max(late), len(late)]} if late else {}
    return run.result(began_s) | extra


def run_newcomers(run: VllmRun) -> dict[str, Any]:
    """Beside 60 long streams of a, one request of b after the other: steps until its first token."""
    began_s = time.perf_counter()
    for number in range(60):
        run.add("a", number, run.case["tokens"])
    waits: list[int] = []
    for _ in range(100):
        run.step()
    for number in range(run.case["newcomers"]):
        came = len(run.emitted)
        run.add("b", number, 8)
        while len(run.texts.get(f"b{number}", ())) < 8:
            run.step()
        waits.append(run.first_steps[f"b{number}"] - came + 1)
    return run.result(began_s) | {"first_token_steps": waits}


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory of the model")
    parser.add_argument("--cases", default=",".join(CASES), help="which, separated by commas")
    parser.add_argument("--out", help="file for the results, JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--texts", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, _, kind = args.one.partition(":")
        case = dict(CASES[name])
        if kind == "reference":
            case["blocks"] = 0
        run = VllmRun(args.model, case, is_stock=kind != "fair")
        result = run_newcomers(run) if "newcomers" in case else run_streams(run)
        Path(args.texts).write_text(json.dumps({"result": result, "texts": run.texts}))
        return
    results: list[dict[str, Any]] = []
    for name in args.cases.split(","):
        texts: dict[str, dict[str, list[int]]] = {}
        kinds = ("reference", "stock", "fair") if CASES[name].get("blocks") else ("stock", "fair")
        for kind in kinds:
            found = _run_apart(args.model, f"{name}:{kind}")
            texts[kind] = found["texts"]
            same = _equal(texts[kinds[0]], texts[kind])
            result = {"case": name, "scheduler": kind, **found["result"], "texts_equal": same}
            results.append(result)
            print(json.dumps(result), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=1))


def _run_apart(model: str, one: str) -> dict[str, Any]:
    path = Path(f"{os.environ.get('TMPDIR', '/tmp')}/fairgate-in-process-{os.getpid()}.json")
    command = [sys.executable, __file__, "--model", model, "--one", one, "--texts", str(path)]
    try:
        subprocess.run(command, check=True, env=os.environ | ENVIRON)
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    finally:
        path.unlink(missing_ok=True)


def _equal(reference: dict[str, list[int]], texts: dict[str, list[int]]) -> str:
    """How many answers are equal, as far as both of them came."""
    both = reference.keys() & texts.keys()
    same = sum(
        all(one == other for one, other in zip(reference[name], texts[name], strict=False)) for name in both
    )
    return f"{same}/{len(both)}"


if __name__ == "__main__":
    main()
