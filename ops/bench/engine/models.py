"""Models of the engine benchmarks: Llamas with random weights, kept in a cache directory."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

SEED = 20
INITIAL_STD = 0.04
CONTEXT_TOKENS = 2048
MAKER = 1
"""Raised whenever the same spec would give another model."""
EXPORT_TIMEOUT_S = 1800.0


class NoModel(Exception):
    """There is no such model, or it cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int


SPECS: dict[str, ModelSpec] = {
    "micro": ModelSpec(64, 2, 4, 2, 128, 512),
    "tiny": ModelSpec(256, 6, 8, 4, 768, 4096),
    "small": ModelSpec(768, 12, 12, 4, 2048, 32000),
}


def cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fairgate" / "bench-models"


def find_model(name: str, cache: Path) -> Path:
    """The directory of a named model (made if need be), or of one's own. Raises `NoModel`."""
    if name not in SPECS:
        if (Path(name) / "config.json").is_file():
            return Path(name).resolve()
        raise NoModel(f"{name!r} is neither a model directory nor one of {', '.join(SPECS)}")
    spec = SPECS[name]
    target = cache / f"{name}-{_fingerprint({**asdict(spec), 'seed': SEED, 'maker': MAKER})}"
    if not target.is_dir():
        with _building(target) as directory:
            _make(spec, directory)
    return target


def export_for_openvino(model_dir: Path, cache: Path, environment: Path) -> Path:
    """The model in OpenVINO's format, float32 weights. Raises `NoModel`."""
    config = (model_dir / "config.json").read_text(encoding="utf-8")
    stamps = sorted((file.name, file.stat().st_size) for file in model_dir.glob("*.safetensors"))
    target = cache / f"openvino-{model_dir.name}-{_fingerprint([str(model_dir), config, stamps])}"
    if target.is_dir():
        return target
    with _building(target) as directory:
        optimum = (str(environment / "bin" / "optimum-cli"), "export", "openvino", "--model", str(model_dir))
        wanted = ("--task", "text-generation-with-past", "--weight-format", "fp32", str(directory))
        done = subprocess.run(
            [*optimum, *wanted], capture_output=True, text=True, timeout=EXPORT_TIMEOUT_S, check=False
        )
        if done.returncode != 0 or not (directory / "openvino_model.xml").is_file():
            tail = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise NoModel(f"optimum cannot export {model_dir} for OpenVINO:\n{tail}")
    return target


def read_config(model_dir: Path) -> dict[str, Any]:
    """config.json. Raises `NoModel`."""
    try:
        config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
        for field in ("vocab_size", "max_position_embeddings"):
            if not isinstance(config[field], int):
                raise KeyError(field)
    except (OSError, ValueError) as error:
        raise NoModel(f"{model_dir}/config.json cannot be read: {error}") from None
    except KeyError as error:
        raise NoModel(f"{model_dir}/config.json does not say {error.args[0]}") from None
    assert isinstance(config, dict)
    return config


@contextlib.contextmanager
def _building(target: Path) -> Iterator[Path]:
    """A directory that becomes `target` when all went well, and vanishes otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        yield directory
        directory.rename(target)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make(spec: ModelSpec, directory: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            **asdict(spec),
            max_position_embeddings=CONTEXT_TOKENS,
            initializer_range=INITIAL_STD,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=0,
            pad_token_id=None,
        )
    )
    model.save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_tokenizer(spec.vocab_size), eos_token="<eos>")
    tokenizer.save_pretrained(directory)


def _tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    known = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    words = list(ascii_lowercase)
    while len(known) < vocabulary:
        room = vocabulary - len(known)
        pairs = list(islice(product(words, ascii_lowercase), room))
        merges += pairs
        words = ["".join(pair) for pair in pairs]
        known += words
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(known)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


def _fingerprint(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
