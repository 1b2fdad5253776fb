"""How a command ends: one line for what a user can mend, a traceback for what is a defect of the program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from skimkv.cli.errors import carry_out
from skimkv.cli.help import App
from support.command_line import SKIMKV


def ended(error: BaseException) -> int:
    """The exit status of a command that raises this."""
    app = App()

    @app.command()
    def command() -> None:
        raise error

    return carry_out(app, "test", [])


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (ValueError("two\nlines"), 2, "two lines"),
        (FileNotFoundError(2, "No such file", "x"), 2, "[Errno 2] No such file: 'x'"),
        (MemoryError(), 2, "the memory of this machine is not enough"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2, "CUDA out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes. Error code 12"), 2,
         "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"),
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


@pytest.mark.skipif(os.name != "posix", reason="needs pipes that a reader can close")
def test_a_reader_that_leaves_early_ends_the_command_in_silence() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*SKIMKV, "--help"], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
@pytest.mark.parametrize(("redirection", "status"), [("<&-", 2), (">&-", 0)])
def test_closed_streams(redirection: str, status: int) -> None:
    command = "generate" if status else "--version"
    shell = f"{sys.executable} -m skimkv.cli {command} {redirection}"
    done = subprocess.run(["sh", "-c", shell], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        status, "skimkv: stdin is closed; give --prompt or --prompt-file\n" if status else "",
    )  # fmt: skip
