"""The options that commands share: names of dtypes and devices, and files that cannot be what they should be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from skimkv.cli import options


@pytest.mark.parametrize(("name", "dtype"), [
    ("float32", torch.float32), ("fp32", torch.float32),
    ("bfloat16", torch.bfloat16), ("bf16", torch.bfloat16),
    ("float16", torch.float16), ("fp16", torch.float16), ("half", torch.float16),
])  # fmt: skip
def test_torch_dtype(name: str, dtype: torch.dtype) -> None:
    assert options.torch_dtype(name) == dtype
    assert options.check_dtype(name) == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("name", ["float8", "fp17", "", "Float16"])
def test_a_dtype_that_is_unknown(name: str) -> None:
    with pytest.raises(ValueError, match="unknown dtype"):
        options.torch_dtype(name)


def test_resolve_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="unknown"):
        options.resolve_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="no CUDA device"):
        options.resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert options.resolve_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="only 2 CUDA devices"):
        options.resolve_device("cuda:2")


def test_files_and_folders(tmp_path: Path) -> None:
    file, folder, missing = tmp_path / "file", tmp_path / "folder", tmp_path / "none" / "x"
    file.touch()
    folder.mkdir()
    for path in (file, folder / "new"):
        options.check_writable("--out", path)
    for path in (folder, tmp_path / "new"):
        options.check_folder("--out", path)
    options.check_readable("--text", file)
    for check, path, words in (
        (options.check_writable, missing, "there is no folder"),
        (options.check_writable, folder, "this is a folder"),
        (options.check_folder, missing, "there is no folder"),
        (options.check_folder, file, "this is a file"),
        (options.check_readable, missing, "there is no such file"),
        (options.check_exists, missing, "there is no such file or folder"),
        (options.check_figure, file.with_suffix(".doc"), "cannot be saved as .doc"),
        (options.check_readable, folder, "this is a folder"),
    ):
        with pytest.raises(ValueError, match=words):
            check("--option", path)


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(options.os, "access", lambda path, mode: False)  # root may read and write everything
    for check in (options.check_writable, options.check_readable):
        with pytest.raises(ValueError, match="no permission"):
            check("--option", tmp_path / "file")
    with pytest.raises(ValueError, match="no permission"):
        options.check_folder("--option", tmp_path)


@pytest.mark.parametrize("model", ["builtin", "gpt2", "Qwen/Qwen3-0.6B"])
def test_a_model_that_may_exist(model: str) -> None:
    assert options.check_model(model) is None


@pytest.mark.parametrize("model", ["", "./x", "/no/such/folder", "~/no-such-folder", "a/b/c", "no-such.gguf", "a/"])
def test_a_model_that_cannot_exist(model: str) -> None:
    with pytest.raises(ValueError, match="--model"):
        options.check_model(model)


def test_a_folder_or_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match="no config"):
        options.check_model(str(tmp_path))
    with pytest.raises(ValueError, match="not a model folder; give the folder of a checkpoint"):
        options.check_model(str(tmp_path / "notes.txt"))
    (tmp_path / "config.json").touch()
    (tmp_path / "model.safetensors").touch()
    assert options.check_model(str(tmp_path)) is None


def test_numbers_of_bytes() -> None:
    sizes = [options.number_of_bytes("--memory", size) for size in ("0", "100", "1.5K", "2G")]
    assert sizes == [0, 100, 1536, 2**31]
    for text in ("", "much", "-1", "1GB", "1e9"):
        with pytest.raises(ValueError, match=r"^--memory '.*' must be a number of bytes such as 500M or 2G$"):
            options.number_of_bytes("--memory", text)
