"""A method that somebody else defines: registered, it works in specs, caches, evaluation and the laws."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass

import pytest
import torch

import skimkv
from skimkv.methods import METHODS, Dense
from skimkv.methods.base import Method
from skimkv.testing import SHAPE, Sequences, check_method

SCRIPT = '''
from dataclasses import dataclass

import torch
import skimkv
from skimkv.methods.base import Method, Traffic
from skimkv.ops.blocks import attend_rows
from skimkv.stores.base import compute_dtype
from skimkv.stores.full import Full


@skimkv.register
@dataclass(frozen=True, repr=False)
class EveryOther(Method[Full]):
    """Reads every other position and the current one, with weights as they are among these."""

    skip: int = 2

    def store(self, shape, dtype, device="cpu"):
        return Full(shape, dtype, device, kv=self.kv)

    def step(self, store, q, token, *, scale, softcap):
        if token is not None:
            store.append_token(*token)
        x = q.to(compute_dtype(store.dtype))
        B, H, _, _ = store.shape
        last = torch.tensor(store.lengths)[:, None, None] - 1
        position = torch.arange(max(store.lengths))
        valid = (((last - position) % self.skip == 0) & (position <= last)).expand(B, H, -1)
        index = position.expand(B, H, -1)
        y, _ = attend_rows(x, store.read_keys(index, valid), store.read_values(index, valid), valid, scale, softcap)
        return y.to(q.dtype)

    def traffic(self, n, shape, dtype):
        rows = 2 * (n // self.skip) + 2
        return Traffic.of(shape.B * shape.H, rows * shape.D, *self.row_format(shape.D).traffic(rows, dtype))

    def bound(self, n, shape, dtype):
        return self.row_format(shape.D).nbytes(shape.B * shape.H * 2 * n, dtype)
'''


@pytest.fixture
def known():
    """What tests register is forgotten afterwards."""
    before = dict(METHODS)
    yield METHODS
    METHODS.clear()
    METHODS.update(before)


@pytest.fixture
def every_other(known):
    """The class of the script, registered."""
    names: dict = {}
    exec(SCRIPT, names)
    return names["EveryOther"]


def test_a_method_of_ones_own_keeps_the_laws_and_serves_a_model(every_other):
    method = skimkv.parse("EveryOther(skip=3)")
    assert method == every_other(3) and repr(method) == "EveryOther(skip=3)" and skimkv.EveryOther
    assert not method.has_kernel("cpu")
    assert "counted_is_predicted" in check_method(method, full=every_other(1))
    model, _ = skimkv.load("builtin")
    ids = torch.arange(40)[None]
    every = model.generate(ids, past_key_values=skimkv.Cache(model, "EveryOther(skip=1)"), max_new_tokens=8)
    assert torch.equal(every, model.generate(ids, past_key_values=skimkv.Cache(model, Dense()), max_new_tokens=8))


@pytest.mark.parametrize("missing", ["store", "step", "traffic", "bound"])
def test_an_incomplete_method_is_refused_when_it_is_made(every_other, missing):
    incomplete = type("Incomplete", (every_other,), {missing: getattr(Method, missing)})
    with pytest.raises(TypeError, match=f"abstract class Incomplete.*{missing}"):
        incomplete()
    with pytest.raises(ValueError, match=f"Incomplete cannot be registered: it has no {missing}$"):
        skimkv.register(dataclass(frozen=True, repr=False)(incomplete))


def test_a_method_written_without_sinks_refuses_them_in_one_line(every_other):
    method, x = every_other(3), Sequences.random(SHAPE, 5)
    store, sinks = method.store(SHAPE, torch.float32), torch.zeros(SHAPE.H, SHAPE.G)
    message = r"^EveryOther does not support attention sinks: step takes no `sinks`$"
    with pytest.raises(ValueError, match=message):
        method.prefill(store, *x, scale=1.0, sinks=sinks)
    with pytest.raises(ValueError, match=message):
        method.decode(store, x.q[..., 0, :], x.k[:, :, 0], x.v[:, :, 0], scale=1.0, sinks=sinks)
    assert store.lengths == [0, 0]


@pytest.mark.slow
def test_it_is_evaluated_from_a_script(tmp_path):
    path = tmp_path / "own.py"
    main = """
    import sys
    from skimkv.cli import main
    sys.exit(main(["eval", "--task", "record(lines=12, asked=2)", "--limit", "2", "--method", "EveryOther(skip=1)",
                   "--method", "Dense()", "--out", sys.argv[1], "--json"]))
    """
    path.write_text(SCRIPT + textwrap.dedent(main))
    command = [sys.executable, str(path), str(tmp_path / "results.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "EveryOther(skip=1)" in done.stdout


def test_entry_points_announce_methods(known, tmp_path, monkeypatch):
    """A package on the path whose metadata names the group skimkv.methods."""
    (tmp_path / "announced_methods.py").write_text(
        SCRIPT.replace("@skimkv.register\n", "").replace("EveryOther", "Thin")
    )
    folder = tmp_path / "announced_methods-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: announced-methods\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[skimkv.methods]\nThin = announced_methods:Thin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert repr(skimkv.parse("Thin(skip=4)")) == "Thin(skip=4)" and "Thin" in known
    with pytest.raises(ValueError, match="unknown method 'Thinn'; did you mean Thin"):
        skimkv.parse("Thinn()")
    del known["Thin"]
    (folder / "entry_points.txt").write_text("[skimkv.methods]\nThin = announced_methods:Nothing\n")
    with pytest.raises(ValueError, match="entry point Thin = announced_methods:Nothing: "):
        skimkv.parse("Thin()")


class _NoDataclass(Dense):
    pass


@dataclass
class _NotAMethod:
    k: int = 1


_Other = type("SparQ", (Dense,), {})


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (_NotAMethod, "derived from skimkv.Method"),
        (Method, "derived from skimkv.Method"),
        ("Dense()", "derived from skimkv.Method"),
        (_NoDataclass, "_NoDataclass cannot be registered: decorate it with @dataclass"),
        (dataclass(frozen=True, repr=False)(_Other), "SparQ cannot be registered: skimkv.methods.sparq has a method"),
    ],
)
def test_what_cannot_be_registered(known, what, says):
    with pytest.raises(ValueError, match=says):
        skimkv.register(what)
    assert skimkv.register(Dense) is Dense
