"""Where a task's text comes from: a folder or file that the user names, or the Hub."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...records import parse_object


def find_file(data: Path | None, *names: str) -> Path | None:
    """Find the first of these names in the folder `data`; return `data` itself if it is a file, None without data.

    Raises ValueError if none of them is there.
    """
    if data is None:
        return None
    if data.is_file():
        return data
    if not data.is_dir():
        raise ValueError(f"--data {data}: no such folder or file")
    for name in names:
        if (data / name).exists():
            return data / name
    raise ValueError(f"--data {data}: it holds no {' or '.join(names)}")


def find_texts(data: Path) -> list[Path]:
    """The file `data` itself, or the *.txt files that lie in the folder `data`, sorted by name.

    Raises ValueError if there is none.
    """
    if data.is_file():
        return [data]
    if not data.is_dir():
        raise ValueError(f"--data {data}: no such folder or file")
    texts = sorted(data.glob("*.txt"))
    if not texts:
        raise ValueError(f"--data {data}: it holds no *.txt")
    return texts


def read_text(path: Path) -> str:
    """Read a file of UTF-8 text. Raises ValueError if it is not one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the objects of a JSON Lines file. Raises ValueError at a line that is no JSON object."""
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            if (row := parse_object(line)) is None:
                raise ValueError(f"{path}, line {number}: not a JSON object")
            yield row


def check_text(path: Path | None, row: dict[str, Any], *names: str) -> None:
    """Raise ValueError unless these fields of a row are texts."""
    for name in names:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{path}: a line has no text {name!r}")


def load_from_hub(task: str, files: str, *name: str, split: str) -> Any:
    """Load a data set of the Hub. Raises ValueError, which says what --data would need, if it cannot be had."""
    instead = f"or give --data a folder that holds {files}"
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ValueError(f"{task} reads {name[0]} from the Hub: pip install 'skimkv[eval]', {instead}") from None
    try:
        return datasets.load_dataset(*name, split=split)
    except Exception as error:  # offline, gone or gated: the libraries below raise all kinds
        reason = (" ".join(str(error).split()) or type(error).__name__)[:200]
        raise ValueError(f"{task}: {name[0]} cannot be had from the Hub ({reason}); {instead}") from None
