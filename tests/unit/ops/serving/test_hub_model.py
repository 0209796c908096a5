"""Models named by their id: from a cache as huggingface_hub lays it out, without a network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ops.serving.hub_model import ModelMissing, local_model, missing_file, with_local_model
from ops.settings.settings import Settings, is_hub_id, load

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "acme/tiny-chat"


def cached(cache: Path, *files: str, revision: str = "main") -> Path:
    """A snapshot of the model in `cache`; returns its directory."""
    repository = cache / "models--acme--tiny-chat"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / revision).write_text(COMMIT)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


def test_an_id_is_what_is_no_directory_and_looks_like_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(Path(MODEL))
    for other in ("tiny-chat", "/models/tiny-chat", "a/b/c", "../tiny-chat"):
        assert not is_hub_id(Path(other))
    (tmp_path / MODEL).mkdir(parents=True)
    assert not is_hub_id(Path(MODEL))
    assert load({"model": MODEL}).model == tmp_path / MODEL


def test_a_cached_model_is_served_under_its_id(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "config.json", "tokenizer.json", "model.safetensors")
    settings = load({"model": MODEL})
    assert (str(settings.model), settings.served_model_name) == (MODEL, MODEL)
    found = with_local_model(settings, cache_dir=tmp_path)
    assert (found.model, found.served_model_name) == (snapshot, MODEL)
    named = with_local_model(replace(settings, model_name="chat"), cache_dir=tmp_path)
    assert named.served_model_name == "chat"


def test_a_directory_and_a_gateway_without_an_engine_are_left_alone(tmp_path: Path) -> None:
    assert with_local_model(Settings()) == Settings()
    elsewhere = load({"model": MODEL, "engine.serve": "no"})
    assert with_local_model(elsewhere, cache_dir=tmp_path) == elsewhere


def test_a_revision_is_looked_for_by_its_name(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "config.json", "tokenizer.json", "model.safetensors", revision="v2")
    assert local_model(MODEL, "v2", download=False, cache_dir=tmp_path) == snapshot
    assert local_model(MODEL, COMMIT, download=False, cache_dir=tmp_path) == snapshot
    with pytest.raises(ModelMissing, match="tiny-chat at revision v1 is neither"):
        local_model(MODEL, "v1", download=False, cache_dir=tmp_path)


def test_what_is_not_there_is_said_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing) as refused:
        local_model(MODEL, "", download=False, cache_dir=tmp_path)
    message = str(refused.value)
    assert "\n" not in message
    for part in (MODEL, str(tmp_path), "hf download acme/tiny-chat", "HF_HOME", "name a directory"):
        assert part in message


def test_an_incomplete_copy_is_not_served(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "config.json", "tokenizer.json")
    with pytest.raises(ModelMissing, match=r"\*\.safetensors is not among its files"):
        local_model(MODEL, "", download=False, cache_dir=tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1.safetensors").write_text("")
    assert missing_file(snapshot) == "model-2.safetensors"
    (snapshot / "model-2.safetensors").write_text("")
    assert missing_file(snapshot) is None
    (snapshot / "model.safetensors.index.json").write_text("[]")
    assert missing_file(snapshot) == "a readable model.safetensors.index.json"
    (snapshot / "tokenizer.json").unlink()
    assert missing_file(snapshot) == "tokenizer.json"
