"""Models named by their id on the Hugging Face hub: found in the local cache, else downloaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from ops.settings.settings import Settings, is_hub_id

FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template*",
]
BESIDE = ["*/*"]
"""Folders of a repository hold other formats, or the weights once more."""


class ModelMissing(Exception):
    """The model is not here and cannot be fetched; the message says why and what to do."""


def with_local_model(settings: Settings, *, download: bool = True, cache_dir: Path | None = None) -> Settings:
    """The settings with a local directory for a model named by its id, which stays its name in the API. A
    complete copy in the cache is used without asking the hub. Raises `ModelMissing`."""
    if not settings.engine.serve or not is_hub_id(settings.model):
        return settings
    directory = local_model(str(settings.model), settings.revision, download=download, cache_dir=cache_dir)
    return replace(settings, model=directory, model_name=settings.served_model_name)


def local_model(model_id: str, revision: str, *, download: bool, cache_dir: Path | None = None) -> Path:
    """The model's directory in the cache. Raises `ModelMissing`."""
    # Only here: it takes a moment to import.
    from huggingface_hub import constants, snapshot_download

    cause = "it is not to be downloaded"
    for is_local in (True, False) if download else (True,):
        try:
            directory = Path(
                snapshot_download(
                    model_id,
                    revision=revision or None,
                    cache_dir=cache_dir,
                    allow_patterns=FILES,
                    ignore_patterns=BESIDE,
                    local_files_only=is_local,
                )
            )
        except Exception as error:  # the hub's errors have no common class: files, HTTP, names
            if not is_local:
                cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            continue
        lacking = missing_file(directory)
        if lacking is None:
            return directory
        cause = f"{lacking} is not among its files"
    at = f" at revision {revision}" if revision else ""
    raise ModelMissing(
        f"model {model_id}{at} is neither a directory here nor complete in the Hugging Face cache"
        f" {cache_dir or constants.HF_HUB_CACHE}, and was not downloaded: {cause}; fetch it where there is a"
        f" network (`hf download {model_id}`) and set HF_HOME to that cache, or name a directory"
    )


def missing_file(model_dir: Path) -> str | None:
    """The first file that is missing for serving the directory; None: all are there."""
    for name in ("config.json", "tokenizer.json"):
        if not (model_dir / name).is_file():
            return name
    index = model_dir / "model.safetensors.index.json"
    if not index.is_file():
        return None if any(model_dir.glob("*.safetensors")) else "*.safetensors"
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"a readable {index.name}"
    return next((name for name in sorted(shards) if not (model_dir / str(name)).is_file()), None)
