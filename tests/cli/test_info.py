"""skimkv info: every method, and what this installation is."""

from __future__ import annotations

import pytest

from skimkv import METHODS
from support.command_line import answer, run


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = answer(capsys, "info")
    assert list(facts) == ["versions", "devices", "backends", "gpu_kernels", "methods"]
    assert [method["name"] for method in facts["methods"]] == list(METHODS)
    assert {method["store"] for method in facts["methods"]} == {"Full", "Slots", "Clusters"}
    assert facts["backends"]["cpu"]["backend"] in ("ref", "cpu")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert all(name in out for name in METHODS)
