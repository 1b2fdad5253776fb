"""A model's folder: each file is replaced as a whole, or stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from skimkv.hf.load import BUILTIN
from training import folder
from training.network import Network
from training.tests.micro_model import SHAPE

FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def save(path: Path, **changes: object) -> None:
    shape = SimpleNamespace(**{**SHAPE, **changes})
    folder.save_model(Network(shape), shape, folder.load_tokenizer(BUILTIN, 4096), path)


@pytest.mark.parametrize("failing", FILES)
def test_a_failed_write_leaves_every_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """The disk is full in the middle of one file: it is the old one, and no part of a new one is left."""
    save(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    replace_file = folder.replace_file

    def disk_full(path: Path, write: object) -> None:
        def half(temporary: Path) -> None:
            temporary.write_bytes(b"half of it")
            raise OSError(28, "No space left on device")

        replace_file(path, half if path.name == failing else write)

    monkeypatch.setattr(folder, "replace_file", disk_full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, hidden_size=64)
    assert sorted(path.name for path in tmp_path.iterdir()) == FILES
    assert (tmp_path / failing).read_bytes() == before[failing]
    for name in FILES:
        if name.endswith(".json"):
            json.loads((tmp_path / name).read_text())


def test_no_file_is_opened_for_writing_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opened a file before it is replaced still reads the old one."""
    save(tmp_path)
    opened = {name: (tmp_path / name).open("rb") for name in FILES}
    before = {name: (tmp_path / name).read_bytes() for name in FILES}
    save(tmp_path, hidden_size=64, bos_token_id=1)
    for name, file in opened.items():
        with file:
            assert file.read() == before[name], name
    assert (tmp_path / "config.json").read_bytes() != before["config.json"]
