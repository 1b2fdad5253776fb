"""Caches of conversations in the files of a folder: a server that is started again goes on with them.

A thread of its own writes the cache of a conversation when its answer has ended, and another one loads files, so that
no other request waits for either. A file is written beside its place and moved there, and that of the turn before is
removed after that: a kill at any moment leaves every file whole, and loses what had not been written.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hf import saved_cache
from ..hf.cache import Cache
from ..methods.base import Method
from .conversations import FEW, Conversation, can_crop, continues, shared, usable

OURS = "skimkv-*.safetensors"  # no other file of the folder is read or removed
# A file is loaded where that spares the reading of more than this share of the tokens that it holds.
LOADING = 1 / 16


class Stored(NamedTuple):
    """A file, the tokens ids (n,) int32 of its cache, and whether that can forget its last tokens."""

    path: Path
    ids: Tensor
    can_crop: bool


@contextlib.contextmanager
def claim(path: str | Path) -> Iterator[Path]:
    """Make a folder where there is none, and lock it for this process until the `with` is left.

    Raises ValueError, in one line, if that is not possible, or if another process has locked it.
    """
    path = Path(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ValueError(f"--cache-dir {path}: {error.strerror}; give a folder that can be written to") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    except BlockingIOError:
        raise ValueError(f"--cache-dir {path}: another server uses it; give each server a folder of its own") from None
    finally:
        os.close(descriptor)


class Folder:
    """The files of one model and method in a folder that this process has claimed.

    limit: bytes of all files together; those that were used longest ago are removed first. queue_limit: bytes of caches
    that wait to be written; where the disk is too slow for that, the oldest of them are not written. max_tokens: of the
    caches. log is called with one line for each file that cannot be used, and for each that cannot be written.
    """

    def __init__(
        self, path: str | Path, limit: int, queue_limit: int, model: Any, method: Method, max_tokens: int | None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:  # fmt: skip
        self.path, self.limit, self.queue_limit = Path(path), limit, queue_limit
        self.model, self.method, self.log = model, method, log
        cache = Cache.without_layers(method)
        self._use = saved_cache.belongs_to(cache, model) | {"max_tokens": json.dumps(max_tokens)}
        self._changed = threading.Condition()  # of everything below
        self._files: dict[Path, Stored] = {}
        self._sizes: dict[Path, int] = {}  # bytes of these and of files of other uses; the one used last comes last
        self._queue: list[Conversation] = []
        self._is_ending = False
        self._index()
        self._loader = ThreadPoolExecutor(1, "skimkv-loader")
        self._writer = threading.Thread(target=self._write_all, name="skimkv-writer", daemon=True)
        self._writer.start()

    @property
    def count(self) -> int:
        """How many conversations are in files of this use."""
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of the files, those of other models and methods included."""
        with self._changed:
            return sum(self._sizes.values())

    @property
    def waiting(self) -> int:
        """How many caches wait to be written, or are being written."""
        return len(self._queue)

    def find(self, ids: Tensor, held: int) -> Stored | None:
        """Find the file that spares the most of a prompt, ids (n,), of which `held` tokens are in memory already.

        None if no file spares more than it costs to load it.
        """
        with self._changed:
            files = list(self._files.values())
        gains = [usable(file.ids, ids, file.can_crop) - LOADING * len(file.ids) for file in files]
        best = max(range(len(files)), key=gains.__getitem__, default=None)
        return None if best is None or gains[best] < held + FEW else files[best]

    def load(self, file: Stored) -> Future[Conversation | None]:
        """Begin to load a file. The result is None if that fails: then the file is not used again."""
        return self._loader.submit(self._load, file)

    def _load(self, file: Stored) -> Conversation | None:
        cache = Cache.without_layers(self.method)
        try:
            saved_cache.load(cache, file.path, self.model, file.ids.tolist())
        except ValueError as error:
            with self._changed:
                self._remove(file.path)
            self.log(f"{error}; the file is removed")
            return None
        self._note_use(file)
        return Conversation(file.ids.long(), cache)

    def add(self, conversation: Conversation) -> None:
        """Let a conversation be written soon. Its cache must not change while the conversation is in use."""
        if len(conversation.ids) < FEW:
            return
        crops = can_crop(conversation.cache)
        with self._changed:
            conversation.in_use = True
            for older in self._queue[1:]:  # the first one is being written, perhaps
                if continues(conversation.ids, crops, older.ids):
                    self._drop(older)
            self._queue.append(conversation)
            while len(self._queue) > 2 and sum(one.cache.allocated for one in self._queue) > self.queue_limit:
                self._drop(dropped := self._queue[1])
                self.log(f"a conversation of {len(dropped.ids)} tokens is not written: {self.path} is too slow")
            self._changed.notify_all()

    def _drop(self, conversation: Conversation) -> None:
        self._queue.remove(conversation)
        conversation.in_use = False

    def end(self) -> None:
        """Write what waits, and end. Nothing may be added any more."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            if self._queue:
                self.log(f"{len(self._queue)} conversations are being written to {self.path}")
        self._writer.join()
        self._loader.shutdown()

    def _index(self) -> None:
        """Read the headers of the files."""
        for unfinished in self.path.glob(f"{OURS}.*.new"):
            shutil.rmtree(unfinished)
        ignored = defaultdict[str, list[str]](list)
        for path in sorted(self.path.glob(OURS), key=lambda path: path.stat().st_mtime_ns):
            try:
                header = saved_cache.read_header(path)
            except ValueError as error:
                path.unlink()
                self.log(f"{error}; the file is removed")
                continue
            self._sizes[path] = path.stat().st_size
            differs = saved_cache.difference(header, self._use)
            ids = None if differs else _tokens(header)
            if ids is None:
                ignored[differs or "it does not name its tokens"].append(path.name)
            else:
                self._files[path] = Stored(path, ids, header.get("can_crop") == "True")
        for reason, names in ignored.items():
            more = f" and {len(names) - 1} others" if len(names) > 1 else ""
            self.log(f"{self.path}: {names[0]}{more} is ignored: {reason}")
        self._make_room()
        self.log(f"{self.path} holds {self.count} conversations of this use, and {self.nbytes:,} bytes in all")

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_ending)
                if not self._queue:
                    return
                conversation = self._queue[0]
            try:
                self._write(conversation)
            except (OSError, TypeError, ValueError) as error:
                self.log(f"a conversation of {len(conversation.ids)} tokens is not written to {self.path}: {error}")
            finally:
                with self._changed:
                    self._drop(conversation)

    def _write(self, conversation: Conversation) -> None:
        ids, crops = conversation.ids.int(), can_crop(conversation.cache)
        with self._changed:
            files = list(self._files.values())
        for file in files:
            if shared(file.ids, ids) == len(ids) and (file.can_crop or len(file.ids) == len(ids)):
                self._note_use(file)  # it stands for this one, too
                return
        if (nbytes := conversation.cache.allocated) > self.limit:
            raise ValueError(f"its {nbytes:,} bytes exceed the limit of {self.limit:,}: give more --cache-dir-size")
        tokens = ids.tolist()
        use = json.dumps([self._use, saved_cache.digest_of_tokens(tokens)])
        path = self.path / OURS.replace("*", hashlib.sha256(use.encode()).hexdigest()[:24])
        more = {"ids": json.dumps(tokens), "can_crop": str(crops)}
        saved_cache.save(conversation.cache, path, self.model, tokens, more)
        path.chmod(0o600)
        with self._changed:
            self._files[path] = Stored(path, ids, crops)
            self._sizes[path] = path.stat().st_size
            for older in files:
                if older.path != path and continues(ids, crops, older.ids):
                    self._remove(older.path)
            self._make_room()

    def _note_use(self, file: Stored) -> None:
        with self._changed, contextlib.suppress(KeyError, OSError):
            self._sizes[file.path] = self._sizes.pop(file.path)
            os.utime(file.path)

    def _remove(self, path: Path) -> None:
        self._files.pop(path, None)
        self._sizes.pop(path, None)
        path.unlink(missing_ok=True)

    def _make_room(self) -> None:
        """Remove the files that were used longest ago until the others are within the limit."""
        while sum(self._sizes.values()) > self.limit:
            self._remove(next(iter(self._sizes)))


def _tokens(header: dict[str, str]) -> Tensor | None:
    """The tokens ids (n,) int32 that a header names; None if they are not those of its digest."""
    try:
        ids: list[int] = json.loads(header["ids"])
        return torch.tensor(ids, dtype=torch.int32) if saved_cache.digest_of_tokens(ids) == header["tokens"] else None
    except (KeyError, ValueError, TypeError, RuntimeError):
        return None
