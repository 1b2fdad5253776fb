"""Other programs that take turns with ours: which repetitions count, and what happens when a program fails."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from skimkv.bench.rivals import KINDS, Program, Rival, programs
from support.rival_programs import write_program

TURNS = 3


def first_of(kind: str) -> Program:
    return programs(kind, Path("m.gguf"), 500, 2, TURNS)[0]


@pytest.mark.parametrize(("kind", "ahead", "repetitions"), [
    # llama-bench prints a line before a repetition: it is stopped in repetition 0, 2 and 4
    ("llama.cpp", 1, [1, 3, 5]),
    # the fork prints one after it: it is stopped in repetition 1, 3 and 5
    ("fork", 1, [2, 4, 6]),
    # a program that was stopped late, in repetition 3: that one counts no more
    ("llama.cpp", 4, [4, 6, 8]),
])  # fmt: skip
def test_the_repetition_in_which_a_program_was_stopped_does_not_count(kind, ahead, repetitions, tmp_path: Path):
    path = write_program(tmp_path / "program", Path("m.gguf"), kind, ahead)
    with Rival(path, first_of(kind)) as rival:
        rival.start()
        while rival._between < ahead:  # until all lines of the start are there
            rival._next_line()
        waited = [rival.take_turn() for _ in range(TURNS)]
        assert rival.finish() == pytest.approx([(100 + i) / 1000 for i in repetitions])
    assert min(waited) >= 0


def test_every_way_to_run_a_program(tmp_path: Path):
    names = {}
    for kind in KINDS:
        path = write_program(tmp_path / kind, Path("m.gguf"), kind)
        for program in programs(kind, Path("m.gguf"), 500, 2, turns=1):
            with Rival(path, program) as rival:
                rival.start()
                rival.take_turn()
                names[rival.name] = rival.finish()
    ms = {"llama.cpp -fa 0": 101, "llama.cpp -fa 1": 151, "fork dense": 102, "fork SparQ(r=32, k=128)": 52}
    assert names == {name: [pytest.approx(value / 1000)] for name, value in ms.items()}


def test_the_last_lines_of_a_program_that_ends_while_it_is_read(tmp_path: Path, monkeypatch):
    """Linux may say that a terminal is closed before it hands out the last bytes; they are there at the next look."""
    looks = []

    def look(file: int, size: int) -> bytes:
        looks.append(file)
        if len(looks) % 2:
            raise OSError(errno.EIO, "Input/output error")
        return read(file, size)

    read, (program, _) = os.read, programs("llama.cpp", Path("m.gguf"), 500, 2, turns=1)
    with Rival(write_program(tmp_path / "program", Path("m.gguf"), "llama.cpp"), program) as rival:
        monkeypatch.setattr(os, "read", look)
        rival.start()
        rival.take_turn()
        assert rival.finish() == [pytest.approx(0.101)]


def test_a_program_that_is_not_done_is_ended(tmp_path: Path):
    with Rival(write_program(tmp_path / "program", Path("m.gguf"), "fork"), first_of("fork")) as rival:
        rival.start()
    assert rival._process.returncode == -9


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_stopped_program_ends_with_the_thread_that_made_it(tmp_path: Path):
    """As with a process that is killed, whose threads all end."""
    made = []

    def make() -> None:
        made.append(Rival(write_program(tmp_path / "program", Path("m.gguf"), "fork"), first_of("fork")))
        made[0].start()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    with made[0] as rival:
        assert rival._process.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(("text", "words"), [
    ("#!/bin/sh\necho 'error: failed to load model'\nexit 3\n", "status 3: error: failed to load model"),
    ("#!/bin/sh\nexit 0\n", "status 0: it printed nothing"),
    ("#!/bin/sh\necho 'build: 1234'\nkill -SEGV $$\n", r"ended by signal 11 \(Segmentation fault\): build: 1234"),
    ("no program\n", "it cannot be run: Exec format error"),
])  # fmt: skip
def test_a_program_that_fails_is_one_line(text, words, tmp_path: Path):
    path = tmp_path / "program"
    path.write_text(text)
    path.chmod(0o755)
    with pytest.raises(ValueError, match=words), Rival(path, first_of("llama.cpp")) as rival:
        rival.start()


@pytest.mark.parametrize(("end", "words"), [
    ("kill -SEGV $$", r"ended by signal 11 \(Segmentation fault\)"), ("echo '['", "status 0"),
])  # fmt: skip
def test_a_program_that_ends_while_it_is_timed(end, words, tmp_path: Path):
    """It is found out when the program is to be stopped, or when its result is read."""
    path, begins = tmp_path / "program", "llama-bench: benchmark 1/1: generation run"
    path.write_text(f"#!/bin/sh\nfor i in 1 2 3; do echo '{begins} '$i/9; done\n{end}\n")
    path.chmod(0o755)

    def time_it() -> None:
        with Rival(path, first_of("llama.cpp")) as rival:
            rival.start()
            rival.take_turn()
            rival.finish()

    with pytest.raises(ValueError, match=words):
        time_it()


def test_a_wrong_argument_is_what_the_program_says(tmp_path: Path):
    path = write_program(tmp_path / "program", Path("other.gguf"), "llama.cpp")
    message = "error: invalid parameter for argument: m"
    with pytest.raises(ValueError, match=message), Rival(path, first_of("llama.cpp")) as rival:
        rival.start()
