"""Speed of our engine beside its peers: the same prompts, output lengths and arrivals, in turn."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.core.core import EngineConfig
from ops.bench.common.errors import CannotBench
from ops.bench.common.report import QUIET_CORES, Progress, machine, rotated, spread
from ops.bench.engine.masks import mask_s
from ops.bench.engine.metrics import BadAnswers, agreement, measure, ratios
from ops.bench.engine.models import NoModel, cache_dir, export_for_openvino, find_model, read_config
from ops.bench.engine.process import BENCH_DIR, EngineFailed, EngineLaunch, engine_process
from ops.bench.engine.roofline import ELEMENT_BYTES, MEASURE_S, ideal, measure_limits
from ops.bench.engine.workload import (
    BadWorkload,
    Workload,
    as_orders,
    check_workload,
    load_workload,
    sample_workload,
    warm_up_orders,
)
from ops.simulate.machines.machines import ModelShape

OURS = "fairgate"
PEERS = ("transformers", "openvino")
DEFAULT_POLICY = "hybrid"
DEFAULT_PEERS_DIR = Path(".bench-peers")
WARM_UP = {"requests": 16, "output_tokens": 16}
KV_SLACK = 1.1
"""KV slots over those of the largest batch, for every engine alike: none has to evict."""

Answers = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class EngineBenchOptions:
    model: str
    workload: Path
    peers: tuple[str, ...] | None
    """None: those that are installed."""
    dtype: str = "float32"
    device: str = "cpu"
    arrivals: str = "burst"
    rate_per_s: float | None = None
    """Requests a second; None: `load_share` of the slowest engine's capacity, measured first."""
    load_share: float = 0.7
    poisson_requests: int = 500
    repetitions: int = 3
    threads: int | None = None
    max_sequences: int = 64
    max_batched_tokens: int = 512
    policy: str | None = None
    detokenize: bool = False
    peers_dir: Path = DEFAULT_PEERS_DIR
    timeout_s: float = 3600.0
    roofline_s: float = MEASURE_S
    """How long each of the machine's limits is measured; 0: no roofline."""


def run(options: EngineBenchOptions, progress: Progress = lambda line: None) -> dict[str, Any]:
    """`progress` gets a line for each run. Raises `CannotBench`."""
    try:
        return _run(options, progress)
    except (BadAnswers, BadWorkload, EngineFailed, NoModel) as error:
        raise CannotBench(str(error)) from None


def installed_peers(peers_dir: Path) -> list[str]:
    return [name for name in PEERS if name == "transformers" or _interpreter(name, peers_dir).is_file()]


def _run(options: EngineBenchOptions, progress: Progress) -> dict[str, Any]:
    workload = load_workload(options.workload)
    peers = _choose_peers(options)
    policy = options.policy or DEFAULT_POLICY
    try:
        EngineConfig(
            policy=policy, max_batched_tokens=options.max_batched_tokens, max_sequences=options.max_sequences
        )
    except ValueError as error:
        raise CannotBench(str(error)) from None
    threads = options.threads or os.cpu_count() or 1
    model_dir = find_model(options.model, cache_dir())
    config = read_config(model_dir)
    vocabulary = config["vocab_size"]
    check_workload(workload, vocabulary=vocabulary, context_tokens=config["max_position_embeddings"])
    launches = {
        name: _launch(name, options, workload, model_dir, policy, threads, progress)
        for name in (OURS, *peers)
    }
    report: dict[str, Any] = {
        "model": {"name": options.model, "directory": str(model_dir), "dtype": options.dtype},
        "machine": machine() | {"threads": threads, "device": options.device},
        "settings": {
            "max_sequences": options.max_sequences,
            "max_batched_tokens": options.max_batched_tokens,
            "policy": policy,
            "kv_tokens": launches[OURS].options["kv_tokens"],
            "detokenize": options.detokenize,
        },
        "arrivals": options.arrivals,
    }
    rate_per_s = None
    if options.arrivals == "poisson":
        rate_per_s, report["capacity"] = _rate(options, workload, vocabulary, launches, progress)
        workload = sample_workload(workload, max(options.poisson_requests, 1))
        report["rate_per_s"] = rate_per_s
    report["workload"] = {
        "file": str(options.workload),
        "name": workload.name,
        "requests": len(workload.requests),
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
    }
    orders = as_orders(workload, vocabulary, rate_per_s=rate_per_s)
    warm_up = warm_up_orders(workload, vocabulary, **WARM_UP)
    engines, tokens = _alternate(launches, orders, warm_up, options, progress)
    report["engines"] = engines
    ours = engines[OURS]["runs"]
    report["ratios"] = {name: ratios(ours, engines[name]["runs"]) for name in peers}
    report["mask_s"] = mask_s(model_dir, config)
    report["agreement"] = {name: agreement(tokens[OURS], tokens[name]) for name in peers}
    if options.roofline_s and options.arrivals == "burst":
        report["roofline"] = _roofline(options, config, workload, threads, engines)
    return report


def _choose_peers(options: EngineBenchOptions) -> list[str]:
    if options.peers is None:
        names = installed_peers(options.peers_dir)
        return [name for name in names if options.device == "cpu" or name != "openvino"]
    for name in options.peers:
        if name not in PEERS:
            raise CannotBench(f"no peer {name!r}; there are {', '.join(PEERS)}")
        if not (name == "transformers" or _interpreter(name, options.peers_dir).is_file()):
            raise CannotBench(
                f"peer {name!r} is not installed in {options.peers_dir}: run 'make bench-peers', or name "
                "the directory that holds it with --peers-dir"
            )
        if name == "openvino" and options.device != "cpu":
            raise CannotBench(f"peer 'openvino' runs on the CPU only, not on {options.device}")
    return list(dict.fromkeys(options.peers))


def _interpreter(name: str, peers_dir: Path) -> Path:
    return peers_dir.absolute() / name / "bin" / "python"


def _launch(
    name: str, options: EngineBenchOptions, workload: Workload, model_dir: Path, policy: str, threads: int,
    progress: Progress,
) -> EngineLaunch:  # fmt: skip
    common = {
        "model_dir": str(model_dir),
        "dtype": options.dtype,
        "device": options.device,
        "threads": threads,
        "max_sequences": options.max_sequences,
        "max_batched_tokens": options.max_batched_tokens,
        "kv_tokens": round(workload.kv_tokens(options.max_sequences) * KV_SLACK),
    }
    if name == OURS:
        ours = {
            "policy": policy,
            "max_waiting": max(len(workload.requests), options.poisson_requests, WARM_UP["requests"]),
            "detokenize": options.detokenize,
        }
        command = (sys.executable, "-m", "ops.bench.peers.run_fairgate")
        return EngineLaunch(name, command, Path.cwd(), common | ours)
    interpreter = Path(sys.executable)
    if name == "openvino":
        interpreter = _interpreter(name, options.peers_dir)
        progress("the model in OpenVINO's format")
        exported = export_for_openvino(model_dir, cache_dir(), options.peers_dir.absolute() / name)
        common["model_dir"] = str(exported)
    # From here, so that nothing of ours but the runner's own folder is found by a peer.
    return EngineLaunch(name, (str(interpreter), "-m", f"peers.run_{name}"), BENCH_DIR, common)


def _alternate(
    launches: dict[str, EngineLaunch], orders: Answers, warm_up: Answers, options: EngineBenchOptions,
    progress: Progress,
) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:  # fmt: skip
    """All runs; by engine: its description, its runs and their spread, and the tokens of its first run."""
    engines: dict[str, Any] = {name: {"runs": []} for name in launches}
    tokens: dict[str, list[list[int]]] = {}
    for repetition in range(options.repetitions):
        for name in rotated(list(launches), repetition):
            about, answers, figures = _one(launches[name], orders, warm_up, options.timeout_s)
            engines[name]["about"] = about
            engines[name]["runs"].append(figures)
            tokens.setdefault(name, [answer["token_ids"] for answer in answers])
            progress(
                f"{repetition + 1}/{options.repetitions} {name}: "
                f"{figures['output_tokens_per_s']:.0f} output tokens/s, "
                f"TTFT p99 {1000 * figures['ttft_s']['p99']:.0f} ms"
            )
    for engine in engines.values():
        engine["output_tokens_per_s"] = spread([figures["output_tokens_per_s"] for figures in engine["runs"]])
    return engines, tokens


def _one(
    launch: EngineLaunch, orders: list[dict[str, Any]], warm_up: list[dict[str, Any]], timeout_s: float
) -> tuple[dict[str, Any], Answers, dict[str, Any]]:
    with engine_process(launch, timeout_s=timeout_s) as process:
        about = process.load(launch.options)
        process.run(warm_up)
        answers, usage = process.run(orders)
    try:
        figures = measure(orders, answers)
    except BadAnswers as error:
        raise BadAnswers(f"{launch.name}: {error}") from None
    others = usage["other_cores"]
    figures |= usage | {"disturbed": others is not None and others > QUIET_CORES}
    return about, answers, figures


def _rate(
    options: EngineBenchOptions, workload: Workload, vocabulary: int, launches: dict[str, EngineLaunch],
    progress: Progress,
) -> tuple[float, dict[str, Any]]:  # fmt: skip
    if options.rate_per_s is not None:
        return options.rate_per_s, {}
    orders = as_orders(workload, vocabulary, rate_per_s=None)
    capacity = {}
    for name, launch in launches.items():
        _, _, figures = _one(
            launch, orders, warm_up_orders(workload, vocabulary, **WARM_UP), options.timeout_s
        )
        capacity[name] = len(orders) / figures["wall_s"]
        progress(f"capacity of {name}: {capacity[name]:.2f} requests/s")
    slowest = min(capacity.values())
    return options.load_share * slowest, {
        "requests_per_s": capacity,
        "load_share": options.load_share,
        "slowest": min(capacity, key=lambda name: capacity[name]),
    }


def _roofline(
    options: EngineBenchOptions, config: dict[str, Any], workload: Workload, threads: int,
    engines: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    try:
        shape = ModelShape.of(config)
    except KeyError as error:
        return {"unknown": f"config.json does not say {error.args[0]}: only Llama-like shapes are known"}
    element_bytes = ELEMENT_BYTES[options.dtype]
    try:
        limits = measure_limits(
            read_bytes=shape.step_parameters * element_bytes,
            dtype=options.dtype,
            device=options.device,
            threads=threads,
            measure_s=options.roofline_s,
        )
    except RuntimeError as error:
        raise CannotBench(f"this machine's limits cannot be measured: {error}") from None
    lengths = [(request.length, request.output_tokens) for request in workload.requests]
    best = ideal(shape, limits, lengths, element_bytes=element_bytes)
    return {
        "limits": asdict(limits),
        "ideal": asdict(best),
        "share_of_ideal": {
            name: engine["output_tokens_per_s"]["median"] / best.output_tokens_per_s
            for name, engine in engines.items()
        },
    }
