"""Run skimkv's command line in this process, as tests of its commands do."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from skimkv.cli import main

SKIMKV = [sys.executable, "-m", "skimkv.cli"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Run a command, and return its exit status, stdout and stderr."""
    status = main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """Run a command with --json, and return the object in the last line of stdout."""
    status, out, err = run(capsys, *argv, "--json")
    assert status == 0, err
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def assert_mistake(result: tuple[int, str, str], words: str) -> None:
    """Assert that a command ended with exit status 2 and one line on stderr that contains the words."""
    status, out, err = result
    assert (status, out) == (2, ""), err
    assert err.startswith("skimkv: ")
    assert err.count("\n") == 1
    assert words in err
