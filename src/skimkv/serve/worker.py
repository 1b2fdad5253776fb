"""One thread that makes all answers, some of them together, and hands pieces of text to the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent import futures
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from .conversations import Conversation
from .generation import Answer, Generator, Open, Prompt
from .pace import SHORTEST_PIECE, Meter, PieceLength
from .pieces import Piece, Writer

# At the end: how long answers that were given up may take to end by themselves, and how long the thread may take then.
LEAVING_SECONDS, ENDING_SECONDS = 1.0, 5.0
LOADING_SECONDS = 0.05  # how often the worker looks for new requests while nothing but files is being loaded
# How long a piece of a prompt and the step after it shall take where others wait for their next tokens, so that they
# come within 0.2 seconds although some take a third longer than expected; and how long a piece may take where nobody
# waits. In that time a request that comes, or a client that leaves, is not noticed.
TOKEN_SECONDS, LONE_PIECE_SECONDS = 0.15, 1.0


class Task(NamedTuple):
    """A prompt, the strings at which its answer stops, and the parser of the answer, or None."""

    prompt: Prompt
    stops: Sequence[str] = ()
    parser: Any = None


class Ended(NamedTuple):
    """How an answer ended: by `length`, or by the model or a stop string; and how many tokens there were."""

    by_length: bool
    prompt_tokens: int
    reused_tokens: int
    new_tokens: int


class _Request(NamedTuple):
    """A task that waits, whether its client has gone, and where its pieces go."""

    task: Task
    cancelled: threading.Event
    put: Callable[[Any], None]


class _Running(NamedTuple):
    """A request whose answer is open."""

    request: _Request
    writer: Writer
    answer: Open


class _Loading(NamedTuple):
    """A request whose conversation is being loaded from a file."""

    request: _Request
    loaded: futures.Future[Conversation | None]


class Worker:
    """Answers tasks in the order in which they come, up to `parallel` of them together.

    A task whose conversation is in a file begins when that has been loaded, and the others go on meanwhile. In every
    round one piece of one prompt is read, and every answer whose prompt has been read gets its next token, all in one
    call of the model. An answer that shares no steps is made on its own, and the others wait for its end.
    meter: how many tokens were generated lately.
    """

    def __init__(self, generator: Generator, tokenizer: Any, parallel: int = 1) -> None:
        self.generator, self.tokenizer, self.parallel = generator, tokenizer, 1 if generator.alone else parallel
        self.meter = Meter()
        self._piece, self._is_even_round = PieceLength(), False
        self._step_seconds = 0.0  # that the last step took
        self._running: list[_Running] = []
        self._loading: list[_Loading] = []
        self._waiting: queue.Queue[_Request | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="skimkv-worker", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """How many tasks wait until an answer before them has ended, without those whose clients have gone."""
        with self._waiting.mutex:
            return sum(one is not None and not one.cancelled.is_set() for one in self._waiting.queue)

    @property
    def running(self) -> int:
        """How many answers are open, or wait for a file."""
        return len(self._running) + len(self._loading)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the caches of open answers have allocated."""
        return sum(running.answer.cache.allocated for running in list(self._running))

    async def answers(
        self, tasks: Sequence[Task], cancelled: threading.Event
    ) -> AsyncIterator[tuple[int, Piece | Ended]]:
        """Yield the pieces of the answers to some tasks as they come, and how each answer ended, with the task's index.

        As many of the tasks as are answered together wait at a time, and the next one comes when one has ended, so that
        a request with many prompts lets others in between. Where the prompts begin alike, the first one is answered
        before the others, which start from its cache. All are given up when `cancelled` is set; nothing more comes
        then. Raises what the generation of one raises; the caller then sets `cancelled`, which ends the others.
        """
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[int, Piece | Ended | Exception]] = asyncio.Queue()
        if begin_alike := self.generator.begin_alike([task.prompt for task in tasks]):
            tasks = [task._replace(prompt=replace(task.prompt, is_alike=True)) for task in tasks]
        waiting = iter(enumerate(tasks))

        def put(index: int, piece: Piece | Ended | Exception) -> None:
            """Hand a piece to the event loop, unless nobody waits for it."""
            if not cancelled.is_set():
                loop.call_soon_threadsafe(pieces.put_nowait, (index, piece))

        def send(count: int) -> None:
            """Let the next tasks wait for the worker."""
            for index, task in itertools.islice(waiting, count):
                self._waiting.put(_Request(task, cancelled, partial(put, index)))

        send(1 if begin_alike else self.parallel)
        ended = 0
        while ended < len(tasks):
            index, piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            if isinstance(piece, Ended):
                ended += 1
                send(self.parallel if begin_alike and ended == 1 else 1)
            yield index, piece

    def end(self) -> None:
        """End the thread, whatever it does: native code in it must not outlive the interpreter.

        Answers that were given up end first, so that their conversations are kept. It leaves a prompt at the next
        operation; one that takes longer than ENDING_SECONDS is left alone.
        """
        self._waiting.put(None)
        self._thread.join(LEAVING_SECONDS)
        if self._thread.is_alive():  # its number may belong to another thread otherwise
            raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
            raise_in_thread(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit))
            self._thread.join(ENDING_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):
            while self._begin_those_that_wait():
                if self._running:
                    self._read()
                    self._step()
                else:
                    futures.wait([loading.loaded for loading in self._loading], LOADING_SECONDS, "FIRST_COMPLETED")
            self._end_those_that_left()

    def _begin_those_that_wait(self) -> bool:
        """Begin tasks while there is room, and wait for one if there is none; False when the thread shall end."""
        for loading in [loading for loading in self._loading if loading.loaded.done()]:
            self._loading.remove(loading)
            self._begin(loading.request, loading.loaded)
        while self.running < self.parallel:
            try:
                request = self._waiting.get(block=not self.running)
            except queue.Empty:
                break
            if request is None:
                return False
            if not request.cancelled.is_set():
                loaded = self.generator.fetch(request.task.prompt)
                if loaded is None:
                    self._begin(request)
                else:
                    self._loading.append(_Loading(request, loaded))
        return True

    def _begin(self, request: _Request, loaded: futures.Future[Conversation | None] | None = None) -> None:
        task, cancelled, put = request
        prompt = task.prompt
        try:
            writer = Writer(self.tokenizer, task.stops, task.parser, put)

            def take(tokens: Sequence[int]) -> bool:
                """Count the tokens, and write them."""
                self.meter.add(len(tokens))
                return writer.add(tokens)

            if loaded is not None:
                prompt = replace(prompt, loaded=loaded.result())
            answer = self.generator.begin(prompt, cancelled, take)
            if answer is None:
                _end(request, writer, self.generator.generate(prompt, cancelled, take))
            else:
                self._running.append(_Running(request, writer, answer))
        except Exception as error:
            put(error)

    def _read(self) -> None:
        """Read a piece of a prompt: of the one that came first, and in every other round of the shortest one."""
        reading = [running for running in self._running if running.answer.is_reading]
        if not reading:
            return
        self._is_even_round = not self._is_even_round
        running = min(reading, key=lambda one: one.answer.unread) if self._is_even_round else reading[0]
        answer, start = running.answer, time.perf_counter()
        most = None
        if self.parallel > 1:
            others_wait = len(self._running) > len(reading)
            rest = max(TOKEN_SECONDS - self._step_seconds, TOKEN_SECONDS / 2)  # slow steps must not starve prompts
            most = self._piece.within(rest if others_wait else LONE_PIECE_SECONDS)
            if answer.unread - most < SHORTEST_PIECE:  # so few tokens would be multiplied by other kernels
                most = None
        before = answer.unread
        self._go_on(running, lambda: answer.read(most))
        self._piece.note(before - answer.unread, time.perf_counter() - start)

    def _step(self) -> None:
        """Give every answer whose prompt has been read its next token, and end those whose clients have gone."""
        self._end_those_that_left()
        ready, start = [running for running in self._running if not running.answer.is_reading], time.perf_counter()
        if not ready:
            return
        try:
            found = self.generator.step([running.answer for running in ready])
        except Exception as error:  # which leaves their caches half updated
            for running in ready:
                self._running.remove(running)
                running.request.put(error)
            return
        for running, next_token in zip(ready, found, strict=True):
            self._go_on(running, partial(running.answer.choose, next_token))
        self._step_seconds = time.perf_counter() - start

    def _end_those_that_left(self) -> None:
        for running in [running for running in self._running if not running.answer.is_open]:
            self._go_on(running, lambda: None)

    def _go_on(self, running: _Running, work: Callable[[], None]) -> None:
        """Do some work on an open answer; when that ends it, or fails, the answer is not running any more.

        It leaves the running ones before its end is handed on: a client that has it finds nothing of it in /metrics.
        """
        try:
            work()
            if running.answer.is_open:
                return
            end = partial(_end, running.request, running.writer, running.answer.end())
        except Exception as error:
            end = partial(running.request.put, error)
        self._running.remove(running)
        try:
            end()
        except Exception as error:
            running.request.put(error)


def _end(request: _Request, writer: Writer, answer: Answer) -> None:
    """Hand on the end of an answer."""
    writer.end()
    by_length = not (writer.stopped or answer.at_end)
    request.put(Ended(by_length, len(request.task.prompt.ids), answer.reused, len(answer.tokens)))
