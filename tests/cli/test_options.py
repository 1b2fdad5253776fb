"""The options that commands share: names of dtypes and devices, and what permissions forbid."""

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


def test_numbers_of_bytes() -> None:
    sizes = [options.number_of_bytes("--memory", size) for size in ("0", "100", "1.5K", "2G")]
    assert sizes == [0, 100, 1536, 2**31]
    for text in ("", "much", "-1", "1GB", "1e9"):
        with pytest.raises(ValueError, match=r"^--memory '.*' must be a number of bytes such as 500M or 2G$"):
            options.number_of_bytes("--memory", text)
