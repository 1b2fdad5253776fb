"""Records of an evaluation, the file that holds them, and their summary.

A file is JSON Lines, a header and then one record per line, written so that a killed run loses nothing and repeats
nothing.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import reprlib
import stat
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, NamedTuple

from .. import __version__
from .statistics import TAIL, cluster_bootstrap, quantile, quantile_bootstrap, score_interval, standard_error
from .tasks import parse as parse_task

FORMAT = 1  # of the file; it changes when a reader of this version would misread it
HEADER_START = b'{"skimkv": "results", "format": '  # of the first line of every file
REQUIRED = {"model", "task", "mode", "method", "id", "score"}  # keys without which a line is no record
FOR_SUMMARY = {"dtype", "seed", "counted", "prompt_tokens", "steps", "bytes", "dense_bytes"}  # `load` needs these too
TEXTS = {"model", "dtype", "task", "mode", "method", "id", "source", "context", "output", "backend"}
COUNTS = {
    "prompt_tokens", "fed_tokens", "new_tokens", "steps", "elements", "bytes", "paper_elements", "dense_elements",
    "dense_bytes", "batch",
}  # fmt: skip


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

    source: a digest of what the answer comes from. context: a digest of the context, which the questions on one context
    share. at: where the example stands in a figure. elements to dense_bytes:
    sums over the decoded steps (traffic.Cost). kl and agrees are there where distributions were compared: the KL
    divergence from dense attention after each forced token, to 5 significant digits, and a 1 for each after which the
    most likely token is the same, else a 0.
    """

    key: RecordKey
    source: str
    context: str
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
    kl: list[float] | None = None
    agrees: str | None = None

    def json(self) -> dict[str, Any]:
        """The record as one flat object, the key's fields first, without the fields that are None."""
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        return {**fields.pop("key")._asdict(), **fields}


class Results:
    """A results file, open for appending; `records` are those it holds.

    The first line is a header, which says that the file is skimkv's; a file of an earlier version begins with a record
    instead. A line is one write. Nothing is changed before the first record is added: then a new file gets its
    header, and a torn last line, of a run that was killed in it, is dropped, since its record is made again.

    backend: the one that makes the records to come. resume_anyway: add to records of another version or backend.
    Raises ValueError if the file is no results file, if another run is writing to it, or, without resume_anyway, if
    its records are of another version of skimkv or of another backend. The file is not touched then.
    """

    def __init__(self, path: Path, backend: str, resume_anyway: bool = False) -> None:
        self.path = path
        try:
            check_regular(path)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        try:
            _lock(self._file, path)
            content = _read(path)
            if not resume_anyway:
                _check_same_origin(path, content, backend)
        except BaseException:
            os.close(self._file)
            raise
        self.records = content.records
        self._whole_bytes, self._is_torn = content.whole_bytes, content.is_torn
        self._backend = backend

    def find(self, sources: Mapping[RecordKey, str]) -> dict[RecordKey, dict[str, Any]]:
        """The records with these keys that the file holds.

        Raises ValueError if one of them does not have the source that `sources` says, and so is of another model or
        of other data.
        """
        records_by_key = {}
        for record in self.records:
            key = RecordKey.of(record)
            if key not in sources:
                continue
            if record.get("source") != sources[key]:
                what = ", ".join(map(str, key[4:]))
                raise ValueError(f"{self.path} has {what} of another model or other data; choose another --out")
            records_by_key[key] = record
        return records_by_key

    def add(self, record: dict[str, Any]) -> None:
        """Append a record to the file.

        Raises OSError where the disk is full; the next run drops what was written of the line.
        """
        if self._is_torn:
            os.ftruncate(self._file, self._whole_bytes)
            self._is_torn = False
        if not self._whole_bytes:
            header = {"skimkv": "results", "format": FORMAT, "backend": self._backend, "versions": package_versions()}
            self._write(header)
        self._write(record)
        self.records.append(record)

    def _write(self, content: Mapping[str, Any]) -> None:
        """Append one line. Raises OSError if not all of it could be written."""
        line = json.dumps(content, ensure_ascii=False).encode() + b"\n"
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise OSError(f"{self.path}: {error.strerror}; what it holds is kept") from None
        if written < len(line):
            self._is_torn = True
            raise OSError(f"{self.path}: {written} of {len(line)} bytes were written: the disk is full")
        self._whole_bytes += written

    def __enter__(self) -> Results:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)


class _Content(NamedTuple):
    """What a results file holds. whole_bytes: of its whole lines; is_torn: the last line has no end."""

    header: dict[str, Any] | None
    records: list[dict[str, Any]]
    whole_bytes: int
    is_torn: bool


def check_regular(path: Path) -> None:
    """Raise ValueError if there is something at `path` that is no regular file: a folder, a pipe or a device."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise ValueError(f"{path}: this is {kind}; records are kept in a regular file")


@functools.cache
def package_versions() -> dict[str, str]:
    """The versions of skimkv and of the packages that its answers depend on."""
    return {"skimkv": __version__, **{name: version(name) for name in ("torch", "transformers")}}


def load(path: Path) -> list[dict[str, Any]]:
    """Read the records of an evaluation, without the header and without a torn last line.

    Raises ValueError if the file is no results file, or if a record lacks what a summary needs.
    """
    check_regular(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    records = _read(path).records
    for record in records:
        missing = sorted(FOR_SUMMARY - set(record))
        if missing:
            raise ValueError(f"{path}: the record {record['id']!r} has no {missing[0]!r}; no record of an evaluation")
    return records


def _read(path: Path) -> _Content:
    """Read a results file without changing it. Raises ValueError at the first line that skimkv did not write."""
    *lines, torn = path.read_bytes().split(b"\n")
    header, records = None, []
    for number, line in enumerate(lines, 1):
        parsed = _parse(line)
        if number == 1 and parsed is not None and parsed.get("skimkv") == "results":
            if parsed.get("format") != FORMAT:
                raise ValueError(
                    f"{path}: a results file of format {parsed.get('format')!r}, of another version of skimkv; this "
                    f"one reads format {FORMAT}"
                )
            header = parsed
        elif parsed is None or (problem := _problem(parsed)) is not None:
            reason = "no record of an evaluation" if parsed is None else problem
            raise ValueError(f"{path}, line {number}: {reason}; choose another file")
        else:
            records.append(parsed)
    if torn and not lines and not torn.startswith(HEADER_START):
        raise ValueError(f"{path}, line 1: no record of an evaluation; choose another file")
    return _Content(header, records, sum(len(line) + 1 for line in lines), bool(torn))


def _parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is none."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _problem(record: Mapping[str, Any]) -> str | None:
    """Why an object is no record of an evaluation; None if it is one."""
    if missing := REQUIRED - set(record):
        return f"no record of an evaluation, it has no {min(missing)!r}"
    for name, value in record.items():
        if not _has_type(name, value):
            return f"no record of an evaluation, its {name} is {reprlib.repr(value)}"
    return None


def _has_type(name: str, value: Any) -> bool:
    """Whether this can be the value of the field of that name; fields of later versions may be anything."""
    if name in TEXTS:
        return isinstance(value, str)
    if name in COUNTS or name == "seed":
        least = -(2**63) if name == "seed" else 0
        return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63
    if name == "counted":
        return isinstance(value, bool)
    if name == "score":
        return _is_number(value)
    if name == "kl":
        return isinstance(value, list) and bool(value) and all(map(_is_number, value))
    if name == "agrees":
        return isinstance(value, str) and bool(value) and set(value) <= {"0", "1"}
    if name == "at":
        return isinstance(value, list) and all(_is_number(x) and math.isfinite(x) for x in value)
    if name == "versions":
        return isinstance(value, dict)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63)


def _check_same_origin(path: Path, content: _Content, backend: str) -> None:
    """Raises ValueError if something in the file is of another version of skimkv, or of another backend."""
    for part in (*([] if content.header is None else [content.header]), *content.records):
        versions = part.get("versions")
        written_by = versions.get("skimkv", __version__) if isinstance(versions, dict) else __version__
        made_with = part.get("backend", backend)
        if (written_by, made_with) != (__version__, backend):
            raise ValueError(
                f"{path} was written by skimkv {written_by} with the backend {made_with}; this is skimkv {__version__} "
                f"with the backend {backend}: give --resume-anyway to add to it, or choose another --out"
            )


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


class Tail(NamedTuple):
    """What the mean of KL(dense ‖ method) does not show, over all forced tokens of all documents.

    kl_p99 and kl_max: the 99th percentile and the maximum in nats. agreement: the share of tokens after which both
    distributions have the same most likely token. The 95% intervals are bootstraps over documents.
    """

    kl_p99: float
    kl_p99_low: float | None
    kl_p99_high: float | None
    kl_max: float
    agreement: float
    agreement_low: float | None
    agreement_high: float | None

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Tail | None:
        """The tail of records that hold divergences; None if one of them holds none."""
        if not all(record.get("kl") and record.get("agrees") for record in records):
            return None
        kl = [record["kl"] for record in records]
        agreement = [record["agrees"].count("1") / len(record["agrees"]) for record in records]
        interval = cluster_bootstrap(agreement, [_context(record) for record in records], 0, 1)
        tokens = [x for document in kl for x in document]
        low, high = quantile_bootstrap(kl, TAIL)
        return cls(quantile(tokens, TAIL), low, high, max(tokens), fmean(agreement), *interval)


class Row(NamedTuple):
    """One method on one task and in one mode, over n examples.

    low and high are the 95% interval of the mean (statistics.score_interval). The difference to dense is over the
    examples that both answered; diff_low and diff_high are its 95% interval by a bootstrap over contexts
    (statistics.cluster_bootstrap). All three are None without dense. Dense does not differ from itself: its difference
    is 0 and has no interval. bytes_per_token is what a decode step of one sequence moves in all layers, and share is
    its part of what dense attention moves. ms_per_token is the median time of a decode step, for each sequence of its
    batch; None where no time was taken in this run. tail: more of the KL divergences, where the score is their mean.
    """

    task: str
    mode: str
    method: str
    n: int
    mean: float
    low: float | None
    high: float | None
    stderr: float | None
    diff_to_dense: float | None
    diff_low: float | None
    diff_high: float | None
    bytes_per_token: int | None
    ms_per_token: float | None
    share: float | None
    tail: Tail | None = None

    def json(self) -> dict[str, Any]:
        """The row for --json; a number that is not finite is null there, since JSON has no word for it."""
        fields = {name: value for name, value in self._asdict().items() if name not in ("share", "tail")}
        if self.tail is not None:
            fields |= {"kl_mean": self.mean, **self.tail._asdict()}
        return {n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in fields.items()}


def summary(
    records: Iterable[Mapping[str, Any]], ms_per_token: Mapping[tuple[str, str, str], float] | None = None
) -> list[Row]:
    """Summarise records by task, mode and method, in the order in which these first appear.

    ms_per_token: the times that a run took, by task, mode and method; records hold none. Raises ValueError if a
    record's task is unknown.
    """
    cells: dict[tuple[str, str, str], dict[Any, Mapping[str, Any]]] = {}
    for record in records:
        cell = cells.setdefault((record["task"], record["mode"], record["method"]), {})
        cell[record["model"], record["dtype"], record["seed"], record["counted"], record["id"]] = record
    rows = []
    for (task, mode, method), cell in cells.items():
        greatest = parse_task(task).greatest
        scores = [record["score"] for record in cell.values()]
        low, high = score_interval(scores, [_context(record) for record in cell.values()], greatest)
        steps, moved, dense_moved = (sum(r[name] for r in cell.values()) for name in ("steps", "bytes", "dense_bytes"))
        rows.append(Row(
            task, mode, method, len(scores), fmean(scores), low, high, standard_error(scores),
            *_difference(cell, cells.get((task, mode, "Dense()"), {}), greatest),
            round(moved / steps) if steps else None, (ms_per_token or {}).get((task, mode, method)),
            moved / dense_moved if dense_moved else None, Tail.of(list(cell.values())),
        ))  # fmt: skip
    return rows


def _difference(
    cell: Mapping[Any, Mapping[str, Any]], dense: Mapping[Any, Mapping[str, Any]], greatest: float
) -> tuple[float | None, float | None, float | None]:
    """The mean difference of a method's scores to dense's, over the examples that both answered, and its interval."""
    if cell is dense:
        return 0.0, None, None
    both = [at for at in cell if at in dense]
    if not both:
        return None, None, None
    differences = [cell[at]["score"] - dense[at]["score"] for at in both]
    low, high = cluster_bootstrap(differences, [_context(cell[at]) for at in both], -greatest, greatest)
    return fmean(differences), low, high


def _context(record: Mapping[str, Any]) -> Any:
    """What the records of questions on one context share.

    Records of earlier versions name no context. There it is the part of the id before its last hyphen, as in "3-7",
    the seventh question on record 3.
    """
    return record.get("context") or (record["seed"], record["id"].rpartition("-")[0] or record["id"])
