"""The comparisons of `skimkv bench serve`: their settings, and a file of rows that are measured only once.

Neither torch nor vLLM is imported with this module, so that a mistake is reported at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..records import Kind, RecordFile, package_versions

MEMORY, BATCH = "memory", "batch"  # what the candidates of a comparison have in common
TRANSFORMERS, VLLM = "transformers", "vllm"


def check_engine(engine: str, weights: str) -> None:
    """Raise ValueError, in one line, unless this engine is known and installed, and reads weights of this format."""
    if engine not in (TRANSFORMERS, VLLM):
        raise ValueError(f"--engine {engine!r} is unknown; known are {TRANSFORMERS} and {VLLM}")
    if engine == VLLM:
        if weights == "int8":
            raise ValueError("--weights int8: vLLM does not read such weights; use bfloat16 or float32")
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:  # a folder of that name has no origin
            raise ValueError("--engine vllm: vLLM is not installed: pip install 'skimkv[vllm]'")


class Setting(NamedTuple):
    """One comparison: a model, prompts and answers of one length, and the bytes that caches may take.

    equal: MEMORY or BATCH. engine: TRANSFORMERS or VLLM.
    """

    shape: str
    layers: int
    weights: str
    prompt: int
    new: int
    memory: int
    equal: str
    engine: str


def _problem(row: Mapping[str, Any]) -> str | None:
    return None if {"method", "equal", "tokens_per_s"} <= row.keys() else f"no {SERVED.name}"


SERVED = Kind("served", "record of skimkv bench serve", _problem)


class Records:
    """The rows of a file, to which new ones are added; without a file there are none. Use it in a `with` statement.

    A row is of the backend, and of the versions of skimkv, torch and transformers, that it was measured with: another
    one's is measured again. Raises ValueError if the file holds something else, or if another run is writing to it.
    """

    def __init__(self, path: Path | None, backend: str) -> None:
        self._origin = {"versions": package_versions(), "backend": backend}
        self._file = None if path is None else RecordFile(path, SERVED, backend, resume_anyway=True)

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._file is not None:
            self._file.__exit__(*exc)

    def find(self, candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """The latest row with the fields of each candidate; None unless all candidates have one."""
        rows = [] if self._file is None else self._file.records[::-1]
        keys = [{**fields, **self._origin}.items() for fields in candidates]
        found = [next((row for row in rows if key <= row.items()), {}) for key in keys]
        return [self._without_origin(row) for row in found] if all(found) else None

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of one comparison to the file."""
        for row in rows:
            if self._file is not None:
                self._file.add({**row, **self._origin})

    def _without_origin(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in row.items() if name not in self._origin}
