"""The comparisons of `skimkv bench serve`: their settings, and a file of rows that are measured only once.

Neither torch nor vLLM is imported with this module, so that a mistake is reported at once.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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


class Records:
    """The rows of a file (JSON Lines), to which new ones are added; without a file there are none."""

    def __init__(self, path: Path | None) -> None:
        """Read the file, if it exists. Raises ValueError if it holds something else."""
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or "tokens_per_s" not in row:
                raise ValueError(f"{path}, line {number}: not a record of skimkv bench serve; give another --out")
            self.rows.append(row)

    def find(self, candidates: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """The latest row with the fields of each candidate; None unless all candidates have one."""
        found = []
        for fields in candidates:
            row = next((row for row in reversed(self.rows) if fields.items() <= row.items()), None)
            if row is None:
                return None
            found.append(dict(row))
        return found

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of one comparison to the file, in one write."""
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(json.dumps(row) + "\n" for row in rows))
