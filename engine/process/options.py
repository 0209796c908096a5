"""Settings and options of an engine process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, field

from engine.bounds import Bounded
from engine.scheduling.policy import DEFAULT_POLICY

MAX_SOCKET_PATH_BYTES = 107
"""What a Unix socket address can hold (sockaddr_un)."""
AUTO = 0
"""Of a size: it is derived from device, model and memory (`engine/process/capacity.py`)."""
AUTO_HOST_BLOCKS = -1
"""As `AUTO`; 0 host blocks are none."""
AUTO_STEPS_AHEAD = -1
"""As `AUTO`: what suits the device."""


class EngineSettings(Bounded, frozen=True, kw_only=True):
    """The engine that `serve` starts and supervises, or the one that it shares with other gateways."""

    serve: Annotated[
        bool, "Whether a model is served by an engine of our own; no: only by the upstreams."
    ] = True
    address: Annotated[
        str,
        Meta(title="an address like ipc:///run/fairgate/engine.sock", pattern=r"((ipc|tcp)://\S{1,200})?"),
        "Address of an engine that runs already (`fairgate engine --address`), to share it with other"
        " gateways; the default starts one. A tcp address needs the engine's `engine-gateway.keys` in this"
        " data directory (`fairgate engine keys`). Several engines: `engines`, or `engine.discover`.",
    ] = ""
    discover: Annotated[
        str,
        Meta(
            title="sql, dns:NAME or dns://ADDRESS[:PORT]/NAME",
            pattern=r"(sql|dns:(//\d{1,3}(\.\d{1,3}){3}(:\d{1,5})?/)?[A-Za-z0-9_-][A-Za-z0-9._-]{0,252})?",
        ),
        "Where else the names and addresses of engines are looked up, while it serves: `sql`, what a placer"
        " has written in the database, or SRV records of a DNS name (extra `dns`), at the system's nameserver"
        " or at the one that is named. The default looks nowhere.",
    ] = ""
    keys_dir: Annotated[
        str,
        Meta(title="a directory", pattern=r".{0,4096}"),
        "Directory of an engine's or gateway's keys for tcp addresses, such as a mounted secret; the default"
        " is the data directory.",
    ] = ""
    count: Annotated[
        int,
        Meta(ge=1, le=256),
        "Engines that `serve` starts (`--engines`): one for each GPU, or for an equal share of the cores. A"
        " stream whose engine dies goes on at another one.",
    ] = 1
    device: Annotated[
        str,
        Meta(title="auto, cpu, cuda or cuda:N", pattern=r"auto|cpu|cuda(:\d+)?"),
        "Device that computes; auto takes a CUDA device where there is one.",
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        "Number format; auto is float32 on a CPU, and on a GPU the model's own where that is bfloat16 or"
        " float16, else bfloat16.",
    ] = "auto"
    attention: Annotated[
        Literal["auto", "triton", "flash-attn", "numba", "torch-sdpa", "reference"],
        "Attention kernel; auto takes the best one that works here, and the log says why others were passed"
        " over. One that is named and cannot run stops the start. flash-attn wants engine.block_tokens=256.",
    ] = "auto"
    threads: Annotated[int, Meta(ge=0, le=1024), "CPU threads of the engine; 0 takes half of the cores."] = 0
    context_tokens: Annotated[
        int,
        Meta(ge=0, le=100_000_000, extra={"auto": AUTO, "least": 2}),
        "Longest context in tokens, prompt and answer together; auto is the model's own. A KV cache that"
        " cannot hold one stops the start.",
    ] = field(default=AUTO, name="context")
    num_blocks: Annotated[
        int,
        Meta(ge=0, le=10_000_000, extra={"auto": AUTO, "least": 0}),
        "Blocks of the KV cache; auto (or 0) derives them from kv_memory.",
    ] = field(default=AUTO, name="kv_blocks")
    kv_memory_bytes: Annotated[
        int,
        Meta(ge=0, le=2**41, extra={"unit": "bytes", "auto": AUTO, "least": 2**20}),
        "Memory of the KV cache, where kv_blocks does not say; auto takes a share of what is free (see"
        " docs/operating.md).",
    ] = field(default=AUTO, name="kv_memory")
    num_host_blocks: Annotated[
        int,
        Meta(ge=-1, le=10_000_000, extra={"auto": AUTO_HOST_BLOCKS, "least": 0}),
        "Blocks of host memory for the keys and values of sequences that give way; auto takes a share of what"
        " is free, 0 none: they are computed again.",
    ] = field(default=AUTO_HOST_BLOCKS, name="host_kv_blocks")
    block_tokens: Annotated[
        int,
        Meta(ge=0, le=256, extra={"auto": AUTO, "least": 1}),
        "Tokens in one block of the KV cache; auto goes by the device.",
    ] = AUTO
    max_sequences: Annotated[
        int,
        Meta(ge=0, le=4096, extra={"auto": AUTO, "least": 1}),
        "Most sequences that run together; auto goes by the device.",
    ] = AUTO
    max_batched_tokens: Annotated[
        int,
        Meta(ge=0, le=131_072, extra={"auto": AUTO, "least": 16}),
        "Most tokens that one step computes: the token budget; auto goes by the device.",
    ] = AUTO
    steps_ahead: Annotated[
        int,
        Meta(ge=-1, le=1, extra={"auto": AUTO_STEPS_AHEAD, "least": 0}),
        "Steps that the device has before the tokens of the one before are read; auto is 1 on a GPU, which"
        " computes meanwhile, and 0 on a CPU. With 1 the end of an answer is seen one step late: its sequence"
        " has one row too many, which is not charged.",
    ] = AUTO_STEPS_AHEAD
    prefix_caching: Annotated[
        bool,
        "Whether prompts of a tenant that begin alike share keys and values, and find them in the cache.",
    ] = True
    max_tokens_per_s: Annotated[
        int,
        Meta(ge=0, le=1_000_000_000),
        "Ceiling of the prompt and output tokens that the engine computes per second, where it shares its"
        " machine with other work; 0: none.",
    ] = 0
    niceness: Annotated[
        int,
        Meta(ge=0, le=19),
        "How far the engine stands back for gateway and clients on the same cores; 0: it does not.",
    ] = 0
    collect_lengths: Annotated[
        bool,
        "Whether the engine keeps readings of the model's state and the lengths that followed, for `fairgate"
        " forecast train`. No text, but derived from prompts; readable by the owner only.",
    ] = False
    orphan_s: Annotated[
        float, Meta(ge=1, le=3600), "An engine that hears no gateway for so long saves and exits."
    ] = 60.0

    def named(self) -> dict[str, Any]:
        """Number format, device and attention kernel, None for auto, as `load_model` takes them."""
        named = {name: getattr(self, name) for name in ("dtype", "device", "attention")}
        return {name: None if value == "auto" else value for name, value in named.items()}


class EngineOptions(EngineSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an engine process is started with; 0 for `threads` and `AUTO` for a size mean: choose. `address`:
    `ipc://PATH` (at most 107 bytes) or, with keys (`engine/client/keys.py`), `tcp://HOST:PORT`."""

    model_dir: Path
    data_dir: Path
    engine_id: str = "engine-0"
    cores: Annotated[str, Meta(pattern=r"(\d+(,\d+)*)?")] = ""
    """Numbers of the CPU cores that it runs on; empty: all."""
    gpu: str = ""
    """The GPU that it sees, as in `CUDA_VISIBLE_DEVICES`; empty: all."""
    policy: str = DEFAULT_POLICY
    policy_options: str = "{}"
    max_waiting: Annotated[int, Meta(ge=1)] = 4096
    kv_watermark_permille: Annotated[int, Meta(ge=0, le=500)] = 10
    """Of the KV cache, what stays free when a sequence is admitted beside others: those that run grow."""
    otlp: str = ""
    """Where spans go: the whole URL of a collector's traces; empty: none are made."""
    spans_per_s: Annotated[int, Meta(ge=1, le=100_000)] = 300

    def __post_init__(self) -> None:
        """Raises ValueError naming the field, its bound and its value."""
        Bounded.__post_init__(self)
        if not self.engine_id or not all(c.isalnum() or c in "-_" for c in self.engine_id):
            raise ValueError(f"engine_id must consist of letters, digits, - and _, not {self.engine_id!r}")

    def arguments(self) -> list[str]:
        """The options as command line arguments; equal options give equal lists."""
        paths = {"model_dir": str(self.model_dir.resolve()), "data_dir": str(self.data_dir.resolve())}
        values = msgspec.to_builtins(self, enc_hook=str) | paths
        return [
            text for name, value in values.items() for text in (f"--{name}".replace("_", "-"), str(value))
        ]

    @staticmethod
    def of_arguments(arguments: Sequence[str]) -> EngineOptions:
        """The options that `arguments` gave. Raises ValueError."""
        if len(arguments) % 2:
            raise ValueError(f"argument {arguments[-1]} has no value")
        flags = (flag.removeprefix("--").replace("-", "_") for flag in arguments[::2])
        values = dict(zip(flags, arguments[1::2], strict=True))
        return msgspec.convert(values, EngineOptions, strict=False, dec_hook=lambda kind, value: kind(value))
