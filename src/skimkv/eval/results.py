"""Records of an evaluation, the file that holds them, and their summary."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..records import Kind, RecordFile, check_regular, read_records
from .statistics import TAIL, cluster_bootstrap, quantile, quantile_bootstrap, score_interval, standard_error
from .tasks import parse as parse_task

REQUIRED = {"model", "task", "mode", "method", "id", "score"}  # keys without which a line is no record
FOR_SUMMARY = {"dtype", "seed", "counted", "prompt_tokens", "steps", "bytes", "dense_bytes"}  # `load` needs these too


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
    most likely token is the same, else a 0. loss: the mean of -log p of the forced tokens but the first, in nats.
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
    loss: float | None = None

    def json(self) -> dict[str, Any]:
        """The record as one flat object, the key's fields first, without the fields that are None."""
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        return {**fields.pop("key")._asdict(), **fields}


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or _is_whole(value, 1 - 2**63)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


# Whether a value can be that of the field; fields of later versions may be anything.
TYPES: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("model", "dtype", "task", "mode", "method", "id", "source", "context", "output", "backend"),
        lambda value: isinstance(value, str),
    ),
    **dict.fromkeys(
        ("prompt_tokens", "fed_tokens", "new_tokens", "steps", "elements", "bytes", "paper_elements", "dense_elements",
         "dense_bytes", "batch"), lambda value: _is_whole(value, 0),
    ),
    "seed": lambda value: _is_whole(value, -(2**63)),
    "counted": lambda value: isinstance(value, bool),
    "score": _is_number,
    "loss": _is_number,
    "kl": lambda value: isinstance(value, list) and bool(value) and all(map(_is_number, value)),
    "agrees": lambda value: isinstance(value, str) and bool(value) and set(value) <= {"0", "1"},
    "at": lambda value: isinstance(value, list) and all(_is_number(x) and math.isfinite(x) for x in value),
    "versions": lambda value: isinstance(value, dict),
}  # fmt: skip


def _problem(record: Mapping[str, Any]) -> str | None:
    """Why an object is no record of an evaluation; None if it is one."""
    if missing := REQUIRED - set(record):
        return f"no record of an evaluation, it has no {min(missing)!r}"
    wrong = next((name for name, value in record.items() if name in TYPES and not TYPES[name](value)), None)
    return wrong and f"no record of an evaluation, its {wrong} is {reprlib.repr(record[wrong])}"


EVALUATION = Kind("results", "record of an evaluation", _problem)


class Results(RecordFile):
    """The file of an evaluation's records, as `RecordFile`."""

    def __init__(self, path: Path, backend: str, resume_anyway: bool = False) -> None:
        super().__init__(path, EVALUATION, backend, resume_anyway)

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


def load(path: Path) -> list[dict[str, Any]]:
    """Read the records of an evaluation, without the header and without a torn last line.

    Raises ValueError if the file is no results file, or if a record lacks what a summary needs.
    """
    check_regular(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    records = read_records(path, EVALUATION).records
    for record in records:
        missing = sorted(FOR_SUMMARY - set(record))
        if missing:
            raise ValueError(f"{path}: the record {record['id']!r} has no {missing[0]!r}; no record of an evaluation")
    return records


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
        by_context: dict[Any, list[float]] = {}
        for record in records:
            by_context.setdefault(_context(record), []).extend(record["kl"])
        low, high = quantile_bootstrap(list(by_context.values()), TAIL)
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


def count_once(records: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out what would count twice: of one method's records of one example, the one that was counted stays.

    So a file may hold a run with --count beside one without. Of two that were counted, or two that were not, the
    later one stays.
    """
    kept: dict[RecordKey, Mapping[str, Any]] = {}
    for record in records:
        key = RecordKey.of(record)._replace(counted=False)
        if record["counted"] or key not in kept or not kept[key]["counted"]:
            kept[key] = record
    return list(kept.values())


def summary(
    records: Iterable[Mapping[str, Any]], ms_per_token: Mapping[tuple[str, str, str], float] | None = None
) -> list[Row]:
    """Summarise what `count_once` keeps, by task, mode and method, in the order in which these first appear.

    ms_per_token: the times that a run took, by task, mode and method; records hold none. Raises ValueError if a
    record's task is unknown.
    """
    cells: dict[tuple[str, str, str], dict[Any, Mapping[str, Any]]] = {}
    for record in count_once(records):
        cell = cells.setdefault((record["task"], record["mode"], record["method"]), {})
        cell[record["model"], record["dtype"], record["seed"], record["id"]] = record
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
