"""Files of records (JSON Lines) that are computed once: evaluations, tuning and served batches are kept in them.

The first line is a header, then every line is one record, written so that a killed run loses nothing and repeats
nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import stat
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from . import __version__

if TYPE_CHECKING:
    from typing_extensions import Self

FORMAT = 1  # of the file; it changes when a reader of this version would misread it


class Kind(NamedTuple):
    """What the records of a file are: the word for it in the header, what a person calls one, and what is none.

    problem: why an object is no such record; None if it is one.
    """

    header: str
    name: str
    problem: Callable[[Mapping[str, Any]], str | None]


class Content(NamedTuple):
    """What a file of records holds. whole_bytes: of its whole lines; is_torn: the last line has no end."""

    header: dict[str, Any] | None
    records: list[dict[str, Any]]
    whole_bytes: int
    is_torn: bool


class RecordFile:
    """A file of records, open for appending; `records` are those it holds.

    The first line is a header, which says that the file is skimkv's; a file of an earlier version begins with a record
    instead. A line is one write. Nothing is changed before the first record is added: then a new file gets its
    header, and a torn last line, of a run that was killed in it, is dropped, since its record is made again.

    backend: the one that makes the records to come. resume_anyway: add to records of another version or backend.
    Raises ValueError if the file holds something else, if another run is writing to it, or, without resume_anyway, if
    its records are of another version of skimkv or of another backend. The file is not touched then.
    """

    def __init__(self, path: Path, kind: Kind, backend: str, resume_anyway: bool = False) -> None:
        self.path, self.kind = path, kind
        try:
            check_regular(path)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed or the process dies
            content = read_records(path, kind)
            if not resume_anyway:
                _check_same_origin(path, content, backend)
        except BlockingIOError:
            os.close(self._file)
            raise ValueError(f"{path}: another run is writing to it") from None
        except BaseException:
            os.close(self._file)
            raise
        self.records = content.records
        self._whole_bytes, self._is_torn = content.whole_bytes, content.is_torn
        self._backend = backend

    def add(self, record: dict[str, Any]) -> None:
        """Append a record to the file.

        Raises OSError where the disk is full; the next run drops what was written of the line.
        """
        if self._is_torn:
            os.ftruncate(self._file, self._whole_bytes)
            self._is_torn = False
        if not self._whole_bytes:
            versions = package_versions()
            self._write({"skimkv": self.kind.header, "format": FORMAT, "backend": self._backend, "versions": versions})
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)


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


def read_records(path: Path, kind: Kind) -> Content:
    """Read a file of records without changing it.

    A line that is no JSON, such as two that were joined when a run was killed, is left out with a warning, but for the
    first line. Raises ValueError at the first line that skimkv did not write.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    header, records = None, []
    for number, line in enumerate(lines, 1):
        parsed = parse_object(line)
        if number == 1 and parsed is not None and parsed.get("skimkv") == kind.header:
            if parsed.get("format") != FORMAT:
                raise ValueError(
                    f"{path}: a results file of format {parsed.get('format')!r}, of another version of skimkv; this "
                    f"one reads format {FORMAT}"
                )
            header = parsed
        elif parsed is None and number > 1:
            warnings.warn(f"{path}, line {number}: it is damaged and left out", stacklevel=2)
        elif parsed is None or (problem := kind.problem(parsed)) is not None:
            reason = f"no {kind.name}" if parsed is None else problem
            raise ValueError(f"{path}, line {number}: {reason}; choose another file")
        else:
            records.append(parsed)
    if torn and not lines and not torn.startswith(f'{{"skimkv": "{kind.header}", "format": '.encode()):
        raise ValueError(f"{path}, line 1: no {kind.name}; choose another file")
    return Content(header, records, sum(len(line) + 1 for line in lines), bool(torn))


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """The JSON object that a text is; None if it is none."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _check_same_origin(path: Path, content: Content, backend: str) -> None:
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
