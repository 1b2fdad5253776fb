"""One thread that answers prompts, one after the other, and hands pieces of text to the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from .generation import Generator, Prompt
from .pieces import Piece, Writer

ENDING_SECONDS = 5.0


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


class Worker:
    """Answers tasks in the order in which they come."""

    def __init__(self, generator: Generator, tokenizer: Any) -> None:
        self.generator, self.tokenizer = generator, tokenizer
        self._waiting: queue.SimpleQueue[tuple[Task, threading.Event, Callable[[Any], None]] | None]
        self._waiting = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="skimkv-worker", daemon=True)
        self._thread.start()

    async def answer(self, task: Task, cancelled: threading.Event) -> AsyncIterator[Piece | Ended]:
        """Yield the pieces of the answer to a task, and at last how it ended.

        The task is given up when `cancelled` is set; nothing more comes then. Raises what the generation raises.
        """
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[Piece | Ended | Exception] = asyncio.Queue()

        def put(piece: Piece | Ended | Exception) -> None:
            """Hand a piece to the event loop, unless nobody waits for it."""
            if not cancelled.is_set():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        self._waiting.put((task, cancelled, put))
        piece: Any = None
        while not isinstance(piece, Ended):
            piece = await pieces.get()
            if isinstance(piece, Exception):
                raise piece
            yield piece

    def end(self) -> None:
        """End the thread, whatever it does: native code in it must not outlive the interpreter.

        It leaves a prompt at the next operation; one that takes longer than ENDING_SECONDS is left alone.
        """
        self._waiting.put(None)
        raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in_thread(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(SystemExit))
        self._thread.join(ENDING_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(SystemExit):
            while (waiting := self._waiting.get()) is not None:
                task, cancelled, put = waiting
                try:
                    put(self._answer(task, cancelled, put))
                except Exception as error:
                    put(error)

    def _answer(self, task: Task, cancelled: threading.Event, put: Callable[[Piece], None]) -> Ended:
        writer = Writer(self.tokenizer, task.stops, task.parser, put)
        answer = self.generator.generate(task.prompt, cancelled, writer.add)
        writer.end()
        by_length = not (writer.stopped or answer.at_end)
        return Ended(by_length, len(task.prompt.ids), answer.reused, len(answer.tokens))
