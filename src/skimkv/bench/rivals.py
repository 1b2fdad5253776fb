"""Other programs beside `bench token`: llama.cpp's llama-bench, and that of the SparQ authors' fork, on one GGUF file.

Such a program takes one repetition after the other in a process of its own, and prints a line between two of them. It
is stopped (SIGSTOP) while somebody else is timed. After it goes on, the repetition in which it was stopped does not
count; the next one does, and when that has ended the program is stopped again. So it takes turns with our own decoding,
and its times are those that it measured itself.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .machine import RunQueueClock

# Runs a program in its own place, with its arguments after the id of its parent. If the parent ends, however that
# comes, Linux ends the program too: it is often stopped, and would keep its memory for ever.
LAUNCHER = """
import ctypes, os, sys
set_parent_death_signal, kill = ctypes.c_int(1), ctypes.c_ulong(9)
ctypes.CDLL(None).prctl(set_parent_death_signal, kill)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execv(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"it cannot be run: {error.strerror}")
"""

KINDS = ("llama.cpp", "fork")
MORE = 8  # repetitions, for a program that is stopped late
TOKENS = 4  # that llama-bench generates in a repetition
SPARQ = ["--sparq", "-k1", "32", "-k2", "128"]  # of the fork: r = 32, k = 128


class Program(NamedTuple):
    """How a program is called, and how its output is read.

    name: of its row. arguments: after its path. between: a pattern of the line between two repetitions. ended: how many
    repetitions have ended when the first such line is printed. tokens: of a repetition. seconds: finds the seconds of
    every repetition in all lines of the output. copies: of keys and values in 16 bits that it holds.
    """

    name: str
    arguments: list[str]
    between: str
    ended: int
    tokens: int
    seconds: Callable[[Sequence[str]], list[float]]
    copies: float


def programs(kind: str, model: Path, tokens: int, threads: int, turns: int, group: int = 1) -> list[Program]:
    """Return the ways to run a rival after this number of tokens, for this number of turns. kind: one of KINDS.

    group: query heads that share a KV head in the model. llama-bench runs with flash attention and without; the fork
    runs dense and with SparQ(r=32, k=128). To get there llama-bench reads a prompt, and the fork fills its cache.
    Raises ValueError if the program does not support the model.
    """
    if kind == "fork" and group > 1:
        raise ValueError(f"--against fork: its SparQ supports no grouped queries, and {model} has {group} in a group")
    repetitions = 2 * turns + 2 + MORE  # a turn takes two
    common = ["-m", str(model), "-t", str(threads), "-ngl", "0", "-r", str(repetitions)]
    if kind == "llama.cpp":
        common += ["-p", "0", "-n", str(TOKENS), "-d", str(tokens), "-o", "json", "--progress"]
        begins = r"llama-bench: benchmark .*: generation run \d+/"
        # it keeps a second copy, from which it restores its cache before every repetition
        return [Program(f"llama.cpp -fa {x}", [*common, "-fa", x], begins, 0, TOKENS, _from_json, 2) for x in "01"]
    common += ["-p", str(tokens), "-n", "0", "-b", "1", "-ub", "1", "-f", "skimkv"]
    ends = r"\s+Repeat \d+, "
    return [
        # it has and fills the second copy of its keys, which only SparQ reads, in both ways
        Program("fork dense", common, ends, 1, 1, _from_lines, 1.5),
        Program("fork SparQ(r=32, k=128)", [*common, *SPARQ], ends, 1, 1, _from_lines, 1.5),
    ]


def prompt_programs(model: Path, tokens: int, threads: int, turns: int) -> list[Program]:
    """Return the ways in which llama-bench reads a prompt of this length, for this number of turns."""
    repetitions = 2 * turns + 4  # each takes so long that it is stopped in time
    common = ["-m", str(model), "-t", str(threads), "-ngl", "0", "-r", str(repetitions)]
    common += ["-p", str(tokens), "-n", "0", "-o", "json", "--progress"]
    begins = r"llama-bench: benchmark .*: prompt run \d+/"
    return [Program(f"llama.cpp -fa {x}", [*common, "-fa", x], begins, 0, 1, _from_json, 1) for x in "01"]


def _from_json(lines: Sequence[str]) -> list[float]:
    """The seconds in llama-bench's -o json."""
    text = "\n".join(line for line in lines if not line.startswith("llama-bench: "))
    (run,) = json.JSONDecoder().raw_decode(text[text.index("[\n") :])[0]
    return [ns / 1e9 for ns in run["samples_ns"]]


def _from_lines(lines: Sequence[str]) -> list[float]:
    """The seconds in the lines of the fork."""
    return [float(found[1]) for line in lines if (found := re.match(r"\s+Repeat \d+, .*: +([\d.]+) seconds", line))]


class Rival:
    """A program in a process of its own, which runs only while it is its turn. Use it in a `with` statement.

    On Linux it is ended when the thread that made it ends, even if that is killed.
    Raises ValueError, with the program's last line, if it cannot be started or ends before its time.
    """

    def __init__(self, path: Path, program: Program) -> None:
        self.path, self.program, self.name = path, program, program.name
        self._lines, self._rest = list[str](), b""
        self._between, self._counted = 0, list[int]()
        self._output, terminal = os.openpty()  # to a terminal, a program writes every line at once
        launcher = [sys.executable, "-SE", "-c", LAUNCHER, str(os.getpid())] if sys.platform == "linux" else []
        try:
            self._process = subprocess.Popen(
                [*launcher, path, *program.arguments], stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal
            )
        except OSError as error:
            os.close(self._output)
            raise ValueError(f"{path}: it cannot be run: {error.strerror}") from None
        finally:
            os.close(terminal)
        self._waited = RunQueueClock(self._process.pid) if Path("/proc/self/schedstat").exists() else None

    def __enter__(self) -> Rival:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        with suppress(OSError):
            os.close(self._output)

    def start(self) -> None:
        """Let the program run until it begins its repetitions; then it is stopped."""
        self._next_repetition()
        self._stop()

    def take_turn(self) -> float:
        """Let the program run until a repetition has ended that nothing interrupted; then it is stopped.

        Returns the seconds that its threads waited for a processor in that repetition, for one of its tokens.
        """
        os.kill(self._process.pid, signal.SIGCONT)
        self._next_repetition()
        before = self._waited() if self._waited else 0.0
        self._next_repetition()
        waited = self._waited() - before if self._waited else 0.0
        self._counted.append(self._between - 2 + self.program.ended)
        self._stop()
        return waited / self.program.tokens

    def finish(self) -> list[float]:
        """Let the program run to its end. Returns the seconds of a token in every turn that it took."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)
        while self._next_line() is not None:
            pass
        if self._process.wait():
            raise self._ended()
        try:
            seconds = self.program.seconds(self._lines)
            return [seconds[i] / self.program.tokens for i in self._counted]
        except (ValueError, KeyError, IndexError, TypeError):  # a result that is cut off, or none
            raise self._ended() from None

    def _next_repetition(self) -> None:
        number = self._between
        while self._between == number:
            if self._next_line() is None:
                raise self._ended()

    def _next_line(self) -> str | None:
        """Read the next line that the program prints; None if it has ended."""
        while b"\n" not in self._rest:
            new = self._read()
            if not new:
                return None
            self._rest += new
        line, _, self._rest = self._rest.partition(b"\n")
        self._lines.append(line.decode("utf-8", "replace").rstrip("\r"))
        self._between += re.match(self.program.between, self._lines[-1]) is not None
        return self._lines[-1]

    def _read(self) -> bytes:
        """Read what the program printed since; nothing if it has ended."""
        for _ in range(2):
            # Linux raises OSError when nobody has the terminal open any more. The first time, the last bytes may still
            # be on their way: the program wrote them and ended between two looks of the kernel.
            with suppress(OSError):
                return os.read(self._output, 1 << 16)
        return b""

    def _stop(self) -> None:
        """Stop the program, and read what it printed until then: it may have begun another repetition."""
        os.kill(self._process.pid, signal.SIGSTOP)
        _, status = os.waitpid(self._process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):  # it ended before it could be stopped
            self._process.returncode = os.waitstatus_to_exitcode(status)
            raise self._ended()
        while b"\n" in self._rest or select.select([self._output], [], [], 0)[0]:
            if self._next_line() is None:
                raise self._ended()

    def _ended(self) -> ValueError:
        status = self._process.wait()
        last = next((line for line in reversed(self._lines) if line.strip()), "it printed nothing")
        how = f"ended by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"status {status}"
        return ValueError(f"{self.path}: {self.name} ended without a result, {how}: {last}")
