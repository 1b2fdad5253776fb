"""How a command ends: one line for what a user can mend, a traceback for what is a defect of the program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import warnings
from typing import Annotated

import pytest
import torch
import typer

from skimkv.cli import output
from skimkv.cli.errors import carry_out
from skimkv.cli.help import App
from support.command_line import SKIMKV


def ended(error: BaseException) -> int:
    """The exit status of a command that raises this."""
    app = App()

    @app.command()
    def command() -> None:
        raise error

    return carry_out(lambda: app, "test", [])


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("two\nlines"), 2, "two lines"),
        (FileNotFoundError(2, "No such file", "x"), 2, "[Errno 2] No such file: 'x'"),
        (MemoryError(), 2, "the memory of this machine is not enough"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2, "CUDA out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes. Error code 12"), 2,
         "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
        (ValueError("x.gguf: blk.0\x1b]0;title\x07.weight\x9b2J\u202e is a\xa0\udcff"), 2,
         r"x.gguf: blk.0\x1b]0;title\x07.weight\x9b2J\u202e is a \udcff"),
        (ValueError("KL(dense ‖ method) of 你好 is 5 µs …"), 2, "KL(dense ‖ method) of 你好 is 5 µs …"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)  # fmt: skip
def test_what_a_user_can_mend_is_one_line(
    capsys: pytest.CaptureFixture[str], error: BaseException, status: int, line: str
) -> None:
    assert ended(error) == status
    assert capsys.readouterr().err == f"skimkv: {line}\n"


@pytest.mark.parametrize("error", [RuntimeError("a defect"), KeyError("x"), AttributeError("x")])
def test_a_defect_is_not_hidden(error: Exception) -> None:
    with pytest.raises(type(error)):
        ended(error)


def test_a_reader_that_leaves_early_ends_the_command_in_silence() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*SKIMKV, "--help"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(("redirection", "status"), [("<&-", 2), (">&-", 0)])
def test_closed_streams(redirection: str, status: int) -> None:
    command = "generate" if status else "--version"
    shell = f"{sys.executable} -m skimkv.cli {command} {redirection}"
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        status, "skimkv: stdin is closed; give --prompt or --prompt-file\n" if status else "",
    )  # fmt: skip


def test_an_interrupt_that_a_library_turns_into_another_error(capsys):
    """As the imports of transformers do."""
    app, before = App(), signal.getsignal(signal.SIGINT)

    @app.command()
    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        except BaseException as error:
            raise ValueError("cannot import a module") from error

    assert carry_out(lambda: app, "test", []) == 130
    assert capsys.readouterr().err == "skimkv: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before
    assert ended(ValueError("bad")) == 2


def interrupt():
    """What Ctrl-C does, at once."""
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def test_an_interrupt_while_the_commands_are_imported_or_arguments_are_read(capsys):
    app = App()

    @app.command()
    def command(word: Annotated[str, typer.Option(callback=interrupt)] = "") -> None:
        pass

    @app.command()
    def other() -> None:
        pass

    for find_commands, argv in ((interrupt, []), (lambda: app, ["command"])):
        assert carry_out(find_commands, "test", argv) == 130
        assert capsys.readouterr().err == "skimkv: interrupted\n"
    assert carry_out(lambda: app, "test", ["other"]) == 0


def test_a_warning_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    app = App()

    @app.command()
    def command() -> None:
        warnings.warn("two\nlines of \x1b[31mred", stacklevel=1)

    assert carry_out(lambda: app, "test", []) == 0
    assert capsys.readouterr().err == "skimkv: warning: two lines of \\x1b[31mred\n"


def test_a_progress_bar_is_shown_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> str:
        """What is on stderr when a command with a progress bar ends with a mistake."""
        with contextlib.suppress(ValueError), output.progress_bar() as bar:
            bar.add_task("reads", total=None)
            raise ValueError("a mistake")
        return capsys.readouterr().err

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert interrupted() == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # how rich is told that it writes to a terminal
    assert "reads" in interrupted()
