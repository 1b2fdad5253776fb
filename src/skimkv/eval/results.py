"""Result files: JSON Lines, one record per line; written so that a killed run loses and repeats nothing."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from types import TracebackType
from typing import Any, NamedTuple

START = b'{"model": '  # of every line


class Results:
    """A results file, open for appending; `records` are those it holds.

    A line is one write. A torn last line, of a run that was killed in it, is dropped and its record made again.
    Raises ValueError if the file is no results file (it is not touched then) or another run is writing to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        try:
            _lock(self._file, path)
            self.records = self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _read(self) -> list[dict[str, Any]]:
        *lines, torn = self.path.read_bytes().split(b"\n")
        found = []
        for number, line in enumerate(lines, 1):
            row = _record(line)
            if row is None:
                raise ValueError(f"{self.path}, line {number}: no record of an evaluation; choose another file")
            found.append(row)
        if torn:
            if not (torn.startswith(START) or START.startswith(torn)):
                raise ValueError(f"{self.path}, line {len(lines) + 1}: no record of an evaluation; choose another file")
            os.ftruncate(self._file, sum(len(line) + 1 for line in lines))
        return found

    def add(self, record: dict[str, Any]) -> None:
        """Raises OSError where the disk is full; the next run drops what was written of the line."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise OSError(f"{self.path}: {error.strerror}; what it holds is kept") from None
        if written < len(line):
            raise OSError(f"{self.path}: {written} of {len(line)} bytes were written: the disk is full")
        self.records.append(record)

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)


def load(path: Path) -> list[dict[str, Any]]:
    """The whole records of a file. Raises ValueError at a line that is none."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    *lines, _ = path.read_bytes().split(b"\n")
    found = [_record(line) for line in lines]
    for number, row in enumerate(found, 1):
        if row is None:
            raise ValueError(f"{path}, line {number}: no record of an evaluation")
    return [row for row in found if row is not None]


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"model", "task", "mode", "method", "id", "score"} <= set(row) else None


def _lock(file: int, path: Path) -> None:
    """Held until the file is closed or the process dies; no lock where the system has none of this kind."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path}: another run is writing to it") from None


class Row(NamedTuple):
    """One method on one task. The difference to dense is over the examples that both answered, with the 95%
    interval of a paired t test; None without dense. Bytes are per decode step of one sequence, all layers."""

    task: str
    mode: str
    method: str
    n: int
    mean: float
    stderr: float | None
    diff_to_dense: float | None
    diff_low: float | None
    diff_high: float | None
    bytes_per_token: int | None
    share: float | None  # of dense's bytes

    def json(self) -> dict[str, Any]:
        """What is not finite is null: JSON has no word for it."""
        found = {name: value for name, value in self._asdict().items() if name != "share"}
        return {n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in found.items()}


def summary(records: Iterable[dict[str, Any]]) -> list[Row]:
    """In the order in which tasks, modes and methods first appear."""
    cells: dict[tuple[str, str, str], dict[Any, dict[str, Any]]] = {}
    for record in records:
        cell = cells.setdefault((record["task"], record["mode"], record["method"]), {})
        cell[record["model"], record["dtype"], record["seed"], record["counted"], record["id"]] = record
    rows = []
    for (task, mode, method), cell in cells.items():
        scores = [record["score"] for record in cell.values()]
        dense = cells.get((task, mode, "Dense()"), {})
        pairs = [record["score"] - dense[at]["score"] for at, record in cell.items() if at in dense]
        steps, moved, whole = (sum(r[name] for r in cell.values()) for name in ("steps", "bytes", "dense_bytes"))
        middle, low, high = interval(pairs)
        rows.append(Row(
            task, mode, method, len(scores), fmean(scores), error(scores), middle, low, high,
            round(moved / steps) if steps else None, moved / whole if whole else None,
        ))  # fmt: skip
    return rows


def error(x: Sequence[float]) -> float | None:
    """Standard error of the mean; None for one value, NaN if one of them is not finite."""
    if len(x) < 2:
        return None
    return stdev(x) / math.sqrt(len(x)) if all(map(math.isfinite, x)) else math.nan


def interval(x: Sequence[float]) -> tuple[float | None, float | None, float | None]:
    """Mean and its 95% interval by Student's t; no interval for one value."""
    if not x:
        return None, None, None
    middle, spread = fmean(x), error(x)
    if spread is None:
        return middle, None, None
    t = quantile(len(x) - 1)
    return middle, middle - t * spread, middle + t * spread


def quantile(freedom: int) -> float:
    """The 97.5% quantile of Student's t: exact for 1 and 2, else Cornish and Fisher's (0.7% off at 3)."""
    if freedom == 1:
        return math.tan(0.475 * math.pi)
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, v = NormalDist().inv_cdf(0.975), freedom
    return (
        z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )  # fmt: skip
