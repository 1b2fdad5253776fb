"""How a command ends: exit status 0; 2 and one line on stderr after a mistake; 130 after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

MISTAKE = 2
INTERRUPTED = 130
CLOSED = 1  # as typer ends where it meets a closed pipe itself


class Interrupted(Exception):
    """Ctrl-C in a command, or while its arguments are read. typer would end silently at a KeyboardInterrupt."""


def carry_out(find_commands: Callable[[], typer.Typer], name: str, argv: list[str] | None = None) -> int:
    """Run the command that `argv` names (by default the process's arguments) and return its exit status.

    find_commands: imports the commands and returns them; Ctrl-C may come meanwhile, too.

    ValueError, OSError, a wrong command line and a lack of memory become one line on stderr. Whoever reads stdout may
    close it early, as `head` does: that ends the command without a line. Any other exception is a defect of the
    program and is raised with its traceback; those of the libraries that read models are ValueErrors by hf/errors.py.
    After Ctrl-C any of them only says that it came at a bad moment, as in the middle of an import.
    """
    interrupts: list[int] = []
    try:
        with warnings.catch_warnings(), _noted_interrupts(interrupts):
            warnings.showwarning = _print_warning
            status = find_commands()(argv, prog_name=name, standalone_mode=False)
            if sys.stdout is not None:  # it is None where the shell closed it
                sys.stdout.flush()
    except (KeyboardInterrupt, Interrupted):
        return fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python still flushes at its end
        return CLOSED
    except Exception as error:
        if interrupts:
            return fail("interrupted", INTERRUPTED)
        if isinstance(error, (ValueError, OSError)):
            return fail(str(error))
        # newer versions of typer have their own copy of click: its errors are known by their names and methods
        kind = type(error).__name__
        if kind == "Abort":
            return fail("interrupted", INTERRUPTED)
        if kind == "OutOfMemoryError" or "can't allocate memory" in str(error):  # torch's; torch is not imported here
            return fail(str(error).split(". ")[0])
        if isinstance(error, MemoryError):
            return fail(str(error) or "the memory of this machine is not enough")
        if not hasattr(error, "format_message"):
            raise
        if kind == "NoArgsIsHelpError":
            print(error.format_message(), end="")  # typer prints the help itself
            return MISTAKE
        return fail(_wrong_value(error) or error.format_message())
    return status if isinstance(status, int) else 0


@contextlib.contextmanager
def _noted_interrupts(interrupts: list[int]) -> Iterator[None]:
    """Note every Ctrl-C, besides the KeyboardInterrupt that it raises, which a library may turn into another error."""
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        """Note the signal, and do what Python does with it."""
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    is_usual = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if is_usual:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        if is_usual:
            signal.signal(signal.SIGINT, before)


def _wrong_value(error: Any) -> str | None:
    """The line for an option's value that cannot be, which newer versions of typer do not name; None for others."""
    find_mistakes = getattr(error.__cause__, "errors", None)
    if find_mistakes is None or getattr(error, "param", None) is None:
        return None
    mistake = find_mistakes()[0]
    option, reason = max(error.param.opts, key=len), mistake["msg"].split(", unable")[0].rstrip(".")
    if (named := reason.removeprefix("Value error, ")) != reason:
        return f"{option} {named}"
    value = mistake["input"]
    shown = value if re.fullmatch(r"-?[\d.]+", value) else repr(value)
    for theirs, ours in (("Input should be", "must be"), ("greater than or equal to", "at least")):
        reason = reason.replace(theirs, ours)
    return f"{option} {shown} {reason}"


def fail(message: str, status: int = MISTAKE) -> int:
    """Print the message as one line on stderr, and return the exit status."""
    print("skimkv:", _one_line(message), file=sys.stderr)
    return status


def _one_line(message: str) -> str:
    """The message on one line. What a file's names have of a terminal's control characters is written out, as \\x1b."""
    line = " ".join(message.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


def fail_interrupted(records: int, out: object) -> int:
    """Say that Ctrl-C ended a run whose records are in a file and how to go on, and return the exit status."""
    kept = f"{records} records are in {out}"
    return fail(f"interrupted: {kept}; the same command goes on where it stopped", INTERRUPTED)


def _print_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    """Print a warning as one line on stderr, without the place in the source."""
    print("skimkv: warning:", _one_line(str(message)), file=sys.stderr)
