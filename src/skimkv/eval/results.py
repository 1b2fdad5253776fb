"""Records of an evaluation, the file that holds them, and their summary.

A file is JSON Lines, one record per line, written so that a killed run loses nothing and repeats nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, NamedTuple

from .statistics import mean_and_interval, standard_error

FIRST_BYTES = b'{"model": '  # of every line
REQUIRED = {"model", "task", "mode", "method", "id", "score"}  # keys without which a line is no record


class RecordKey(NamedTuple):
    """What tells one record from every other: a run that was interrupted does not compute the same key again."""

    model: str
    dtype: str
    seed: int
    counted: bool
    task: str
    mode: str
    method: str
    id: str

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RecordKey:
        """The key of a record as a file holds it; None stands for what it lacks."""
        return cls(*(record.get(name) for name in cls._fields))  # type: ignore[arg-type]


class Record(NamedTuple):
    """One method's answer to one example. Nothing in it depends on time: the same run makes the same record again.

    source: a digest of what the answer comes from. at: where the example stands in a figure. elements to dense_bytes:
    sums over the decoded steps (traffic.Cost).
    """

    key: RecordKey
    source: str
    score: float
    output: str
    at: list[float]
    prompt_tokens: int
    fed_tokens: int
    new_tokens: int
    steps: int
    elements: int
    bytes: int
    paper_elements: int
    dense_elements: int
    dense_bytes: int
    batch: int
    backend: str
    versions: dict[str, str]

    def json(self) -> dict[str, Any]:
        """The record as one flat object, the key's fields first."""
        fields = self._asdict()
        return {**fields.pop("key")._asdict(), **fields}


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
        records = []
        for number, line in enumerate(lines, 1):
            record = _parse(line)
            if record is None:
                raise ValueError(f"{self.path}, line {number}: no record of an evaluation; choose another file")
            records.append(record)
        if torn:
            if not (torn.startswith(FIRST_BYTES) or FIRST_BYTES.startswith(torn)):
                raise ValueError(f"{self.path}, line {len(lines) + 1}: no record of an evaluation; choose another file")
            os.ftruncate(self._file, sum(len(line) + 1 for line in lines))
        return records

    def find(self, sources: Mapping[RecordKey, str]) -> dict[RecordKey, dict[str, Any]]:
        """The records with these keys that the file holds.

        Raises ValueError if one of them does not have the source that `sources` says, and so is of another model or
        of other data.
        """
        found = {}
        for record in self.records:
            key = RecordKey.of(record)
            if key not in sources:
                continue
            if record.get("source") != sources[key]:
                what = ", ".join(map(str, key[4:]))
                raise ValueError(f"{self.path} has {what} of another model or other data; choose another --out")
            found[key] = record
        return found

    def add(self, record: dict[str, Any]) -> None:
        """Append a record to the file.

        Raises OSError where the disk is full; the next run drops what was written of the line.
        """
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
    """Read the records of a file, except a torn last line. Raises ValueError at a line that is no record."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    *lines, _ = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = _parse(line)
        if record is None:
            raise ValueError(f"{path}, line {number}: no record of an evaluation")
        records.append(record)
    return records


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and set(record) >= REQUIRED else None


def _lock(file: int, path: Path) -> None:
    """Lock the file until it is closed or the process dies, where the system has locks of this kind."""
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{path}: another run is writing to it") from None


class Row(NamedTuple):
    """One method on one task and in one mode, over n examples.

    The difference to dense is over the examples that both answered, with the 95% interval of a paired t test; it is
    None without dense. bytes_per_token is what a decode step of one sequence moves in all layers, and share is its
    part of what dense attention moves.
    """

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
    share: float | None

    def json(self) -> dict[str, Any]:
        """The row for --json; a number that is not finite is null there, since JSON has no word for it."""
        fields = {name: value for name, value in self._asdict().items() if name != "share"}
        return {n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in fields.items()}


def summary(records: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Summarise records by task, mode and method, in the order in which these first appear."""
    cells: dict[tuple[str, str, str], dict[Any, Mapping[str, Any]]] = {}
    for record in records:
        cell = cells.setdefault((record["task"], record["mode"], record["method"]), {})
        cell[record["model"], record["dtype"], record["seed"], record["counted"], record["id"]] = record
    rows = []
    for (task, mode, method), cell in cells.items():
        scores = [record["score"] for record in cell.values()]
        dense = cells.get((task, mode, "Dense()"), {})
        differences = [record["score"] - dense[at]["score"] for at, record in cell.items() if at in dense]
        steps, moved, dense_moved = (sum(r[name] for r in cell.values()) for name in ("steps", "bytes", "dense_bytes"))
        rows.append(Row(
            task, mode, method, len(scores), fmean(scores), standard_error(scores), *mean_and_interval(differences),
            round(moved / steps) if steps else None, moved / dense_moved if dense_moved else None,
        ))  # fmt: skip
    return rows
