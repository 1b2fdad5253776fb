"""The comparisons of `skimkv bench serve`: their settings, and a file of rows that are measured only once.

Neither torch nor vLLM is imported with this module, so that a mistake is reported at once.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
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


class Comparisons(NamedTuple):
    """What is compared: a model of this shape with random weights, at each (prompt, new), with so many bytes of caches.

    methods: none stands for `serve.default_methods`. records: a file of rows (JSON Lines), to which new rows are added
    after each comparison; those that it holds are not measured again.
    """

    shape: str
    layers: int | None
    weights: str
    lengths: Sequence[tuple[int, int]]
    memory: int
    methods: Sequence[str] = ()
    records: Path | None = None


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


SERVED = Kind(
    "served", "record of skimkv bench serve",
    lambda row: None if {"method", "equal", "tokens_per_s"} <= row.keys() else "no record of skimkv bench serve",
)  # fmt: skip


class Records(ExitStack):
    """The rows of a file, to which new ones are added; without a file there are none. Use it in a `with` statement.

    A row is of the backend, and of the versions of skimkv, torch and transformers, that it was measured with: another
    one's is measured again. Raises ValueError if the file holds something else, or if another run is writing to it.
    """

    def __init__(self, path: Path | None, backend: str) -> None:
        super().__init__()
        self._origin = {"versions": package_versions(), "backend": backend}
        self._file = None
        if path is not None:
            self._file = self.enter_context(RecordFile(path, SERVED, backend, resume_anyway=True))

    def rows(
        self, candidates: Sequence[Mapping[str, Any]], measure: Callable[[], Iterable[dict[str, Any]]]
    ) -> list[dict[str, Any]]:
        """The latest rows with the fields of the candidates of a comparison; if one has none, all are measured."""
        kept = [] if self._file is None else self._file.records[::-1]
        keys = [{**fields, **self._origin}.items() for fields in candidates]
        found = [next((row for row in kept if key <= row.items()), {}) for key in keys]
        if all(found):
            return [{name: value for name, value in row.items() if name not in self._origin} for row in found]
        measured = list(measure())
        if self._file is not None:
            for row in measured:
                self._file.add({**row, **self._origin})
        return measured
