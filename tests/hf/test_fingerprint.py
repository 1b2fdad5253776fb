"""The digest of a model: whatever changes an answer changes it, and a file is read once."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import skimkv
from skimkv.hf import fingerprint
from skimkv.hf.load import BUILTIN


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "skimkv" / "digests.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUILTIN, tmp_path / "model"))


def of_folder(folder: Path) -> str:
    """The fingerprint of a folder's model, as a command takes it."""
    return fingerprint.of_model(*skimkv.load(folder), folder)


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_one_weight(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    name = max(tensors, key=lambda name: tensors[name].numel())
    tensors[name].view(-1)[12_345] += 1  # not one of a few that a sample would take
    save_file(tensors, path, {"format": "pt"})


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    first, second, *_ = content["model"]["vocab"]
    vocabulary = content["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("change", [
    change_one_weight, change_tokenizer,
    lambda folder: change_config(folder, rms_norm_eps=1e-2),
    lambda folder: change_config(folder, hidden_act="relu"),
    lambda folder: change_config(folder, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
], ids=["one weight", "tokenizer", "eps", "activation", "positions"])  # fmt: skip
def test_what_changes_an_answer_changes_it(folder: Path, change: Callable[[Path], None]) -> None:
    before = of_folder(folder)
    assert of_folder(folder) == before
    change(folder)
    assert of_folder(folder) != before


def test_what_changes_no_number_does_not(folder: Path) -> None:
    before = of_folder(folder)
    change_config(folder, transformers_version="1.0", use_cache=False)
    assert of_folder(folder) == before
    assert of_folder(Path(shutil.move(folder, folder.with_name("elsewhere")))) == before


def test_a_file_is_read_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = folder.glob("*.safetensors")
    first, reads = fingerprint.file_digest(file), list[int]()
    monkeypatch.setattr(fingerprint.hashlib, "sha256", lambda: reads.append(1) or pytest.fail("it is read again"))
    assert fingerprint.file_digest(file) == first
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    change_one_weight(folder)
    assert fingerprint.file_digest(file) != first
    cache.write_text("no JSON")
    assert fingerprint.file_digest(file) != first, "a damaged memory is made anew"
    assert json.loads(cache.read_text())


def test_a_model_that_is_of_no_file_is_hashed_whole() -> None:
    model, tokenizer = skimkv.load("builtin")
    before = fingerprint.of_model(model, tokenizer)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.lm_head.weight.view(-1)[12_345] += 1
    assert fingerprint.of_model(copy.deepcopy(model), tokenizer) == before
    assert fingerprint.of_model(changed, tokenizer) != before


def test_a_model_of_another_class_is_another() -> None:
    """With the same weights and the same configuration it may compute something else."""
    model, tokenizer = skimkv.load("builtin")
    before = fingerprint.of_model(model, tokenizer)
    model.__class__ = type("Other", (type(model),), {})
    assert fingerprint.of_model(model, tokenizer) != before
