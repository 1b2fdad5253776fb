"""skimkv info: every method, and what this installation is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import ModuleType

import pytest
import torch

from skimkv import METHODS, Dense, Method, Shape, spec
from skimkv.cli.options import check_method
from skimkv.stores.full import Full
from support.command_line import answer, run


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = answer(capsys, "info")
    assert list(facts) == ["versions", "devices", "backends", "gpu_kernels", "methods"]
    assert [method["name"] for method in facts["methods"]] == list(METHODS)
    assert {method["store"] for method in facts["methods"]} == {"Full", "Slots", "Clusters"}
    assert {tuple(method["kernels"]) for method in facts["methods"]} == {("cpu", "gpu")}
    assert facts["backends"]["cpu"]["backend"] in ("ref", "cpu")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert all(name in out for name in METHODS)


@dataclass(frozen=True, repr=False)
class Plain(Method[Full]):
    """Reads everything, without a kernel."""

    size: int = 3

    def store(self, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Full:
        """An empty store, as dense attention has it."""
        return Dense().store(shape, dtype, device)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `plain_method` that announces the method Plain by an entry point."""
    package = ModuleType("plain_method", "A paper about plain methods.")
    package.Plain = Plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(
        spec, "announced_methods", lambda: [EntryPoint("Plain", "plain_method:Plain", "skimkv.methods")]
    )
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.usefixtures("announced")
def test_a_method_of_another_package(capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, "info")["methods"][-1]
    assert (plain["spec"], plain["store"], plain["kernels"]) == ("Plain(size=3, kv=None)", "Full", [])
    assert plain["reads"] == "Reads everything, without a kernel."
    _, out, _ = run(capsys, "info")
    assert "reference on every device; store Full" in out
    check_method("Plain(size=4)")
    with pytest.raises(ValueError, match="no argument 'sizes'"):
        check_method("Plain(sizes=4)")
