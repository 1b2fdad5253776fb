"""Specs, and bad input: everything a caller passes is checked where it enters, with a ValueError of one line."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from functools import partial

import pytest
import torch

from skimkv import attach
from skimkv.methods import (
    H2O,
    METHODS,
    Dense,
    LMInfinite,
    LowRank,
    RocketKV,
    Skim,
    SparQ,
    SubGen,
    SubGenStream,
    TopK,
    VAttention,
    parse,
)
from skimkv.spec import ELSEWHERE, check_method
from skimkv.spec import _builtin_signatures as signatures
from skimkv.stores.base import Shape
from support.refusals import refuses
from support.specs import EACH
from support.tiny_models import family


@pytest.mark.parametrize(
    ("spec", "method"),
    [
        ("Dense()", Dense()),
        ("Dense", Dense()),
        (" SparQ( r=32,k = 128 ) ", SparQ(r=32, k=128)),
        ("SparQ(32, 128)", SparQ(r=32, k=128)),
        ("SparQ(32, k=128, channels='int4', mean_value=None)", SparQ(32, 128, channels="int4")),
        ("H2O(k=0.2)", H2O(k=0.2)),
        ("SubGen(10, 8)", SubGen(k=10, recent=8)),
        ("LMInfinite(10, 8)", LMInfinite(k=10, initial=8)),
        ("H2O(k=100, local=0)", H2O(k=100, local=0)),
        ("SubGenStream(delta=1, t=2, s=3)", SubGenStream(1.0, 2, 3)),
        ("TopK(k=8, oracle=True)", TopK(8, oracle=True)),
        (TopK(8), TopK(8)),
    ],
)
def test_parse(spec, method):
    assert parse(spec) == method


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "None is not a method spec; write for example Skim"),
        (SparQ, "SparQ is a class, not a method; write for example Skim(k=128)"),
        (7, "7 is not a method spec"),
        (b"Dense()", "is not a method spec"),
        (["x" * 9000], "is not a method spec"),
        ("-" * 499 + "1", "is not a method spec"),
        ("(" * 250 + ")" * 250, "is not a method spec"),
    ],
)
@pytest.mark.parametrize("call", [parse, lambda value: attach(family("llama"), value), check_method])
def test_what_is_no_method_is_refused_in_one_line(value, words, call):
    refuses(lambda: call(value), re.escape(words))


@pytest.mark.parametrize(
    ("method", "text"),
    [
        (SparQ(32, 128), "SparQ(r=32, k=128)"),
        (SparQ(r=32, k=128, local=0, mean_value=False), "SparQ(r=32, k=128, local=0, mean_value=False)"),
        (H2O(0.2), "H2O(k=0.2)"),
        (LMInfinite(64, initial=0), "LMInfinite(k=64, initial=0)"),
        (TopK(2, oracle=True), "TopK(k=2, oracle=True)"),
        (SubGenStream(0.25, 4, 8), "SubGenStream(delta=0.25, t=4, s=8)"),
        (Dense(), "Dense()"),
    ],
)
def test_repr_is_short_and_says_what_is_not_default(method, text):
    assert repr(method) == text == str(method) and parse(text) == method


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("SparK(r=32, k=128)", "SparQ"),
        ("sparq(r=1, k=1)", "SparQ"),
        ("H20(k=5)", "H2O"),
        ("LmInfinit(k=5)", "LMInfinite"),
        ("SubGenSteam(delta=1, t=1, s=1)", "SubGenStream"),
        ("Quux(k=1)", "Dense"),
        ("SparQ(r=32, k=128, chanels='copy')", "channels"),
        ("SparQ(rank=32, k=128)", "'rank'"),
        ("TopK(k=3, oracl=True)", "oracle"),
        ("SparQ(r=32, r=32, k=1)", "'r' is given twice"),
        ("SparQ(32, 128, r=32)", "'r' is given twice"),
        ("SparQ(r=32)", "k"),
        ("SparQ", "r, k"),
        ("Dense(1)", "at most 0"),
        ("SparQ(1, 2, 3, None, 'sqrt_d', 'copy', 7)", "at most 6"),
        ("TopK(k)", "k = k is not a literal"),
        ("", "not a method spec"),
        ("SparQ(r=32, k=128", "not a method spec"),
        ("SparQ(r=32, k=128); Dense()", "not a method spec"),
        ("Dense() + Dense()", "not a method spec"),
        ("x.Dense()", "not a method spec"),
        ("Dense()()", "not a method spec"),
        ("7", "not a method spec"),
        ("\0", "not a method spec"),
        ("TopK(*[1])", "not a literal"),
        ("SparQ(**{'r': 1, 'k': 2})", "no argument"),
        ("SparQ(r={[]: 1}, k=1)", "not a literal"),
        ("SparQ(r={[1]}, k=1)", "not a literal"),
        ("SparQ(r=-'a', k=1)", "not a literal"),
        ("SparQ(r=" + "9" * 5000 + ", k=1)", "500 characters"),
        ("SparQ(r=" + "(" * 240 + "1" + ")" * 240 + ", k=1)", "not a method spec"),
        ("SparQ(r=" + "-" * 480 + "1, k=1)", "not a literal"),
        ("Dense" + "()" * 247, "not a method spec"),
        ("SparQ(r=32, k=128, channels=int8)", "put quotes around it: channels='int8'"),
        ("Dense(kv=int4)", "put quotes around it: kv='int4'"),
        ("TopK(k=4, oracle=true)", "write oracle=True"),
        ("SparQ(r=1, k=1, local=null)", "write local=None"),
        ("TopK(k=n)", "write a number"),
        ("SparQ(r=32, k=128", "a closing parenthesis is missing"),
        ("PyramidKV(k=512)", "unknown method 'PyramidKV': skimkv does not have it; SnapKV"),
        ("pyramid_kv(k=512)", "unknown method 'PyramidKV'"),
        ("SinkCache(k=512)", "it is StreamingLLM\\(k=512\\) here"),
    ],
    ids=lambda x: x[:40],
)
def test_what_is_no_spec(spec, says):
    for check in (parse, check_method):
        refuses(partial(check, spec), says)


@pytest.mark.parametrize("text", [v.split(" here")[0] for v in ELSEWHERE.values()])
def test_what_is_recommended_instead_exists(text):
    specs = re.findall(r"\b[A-Z]\w+\([^)]*\)", text)
    assert specs or "SparQ" in text
    assert all(parse(spec) for spec in specs)


def test_signatures_read_from_the_source_are_the_real_ones():
    for name, parameters in signatures().items():
        real = {f.name: f for f in dataclasses.fields(METHODS[name])}
        assert {p.name for p in parameters} == set(real)
        for p in parameters:
            assert p.required == (real[p.name].default is dataclasses.MISSING), p
            assert p.keyword_only == bool(real[p.name].kw_only), p
            assert p.takes_text == ("str" in str(real[p.name].type)), p
    assert set(signatures()) == set(METHODS)


def test_least_values_read_from_the_source_are_the_real_ones():
    """The least value is taken, one less is refused with the same words by both parsers."""
    least = {(name, p.name): p.least for name, ps in signatures().items() for p in ps if p.least is not None}
    assert {("SparQ", "r"), ("SparQ", "k"), ("TopK", "k"), ("LowRank", "seed"), ("SubGenStream", "t")} <= set(least)
    for (name, field), value in least.items():
        others = {p.name: 1 for p in signatures()[name] if p.required and p.name != field}
        right, wrong = (
            f"{name}({', '.join(f'{n}={v!r}' for n, v in {**others, field: x}.items())})" for x in (value, value - 1)
        )
        assert check_method(right) is None
        for check in (parse, check_method):
            with pytest.raises(ValueError, match=f"^{field} = {value - 1} must be an integer of at least {value}$"):
                check(wrong)


def test_a_spec_is_checked_without_torch():
    code = "import sys; from skimkv import spec; spec.check_method('SparQ(r=1, k=2)'); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@pytest.mark.parametrize(
    "spec",
    [
        "__import__('os').system('touch ran')",
        "__import__('os')",
        "SparQ(r=open('ran', 'w'), k=1)",
        "SparQ(r=__import__('os').system('touch ran'), k=1)",
        "TopK(k=[open('ran', 'w')])",
        "TopK(k=(lambda: 3)())",
        "TopK(k=3 if open('ran', 'w') else 4)",
        'TopK(k=f\'{open("ran", "w")}\')',
        "(lambda: Dense())()",
        "[Dense() for _ in [open('ran', 'w')]]",
        "TopK(k:=3)",
        "TopK(k=2**10)",
    ],
)
def test_a_spec_is_never_run(spec, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"spec|literal|unknown"):
        parse(spec)
    assert not list(tmp_path.iterdir())


def test_every_name_is_known():
    assert set(METHODS) == {type(m).__name__ for m in EACH}


BUDGETS = [(name, p.name) for name, ps in signatures().items() for p in ps if p.name == "k" or p.least]


@pytest.mark.parametrize("bad", [0, -1, 2**31, True, False, "8", None, float("nan"), float("inf"), -0.5, 2.0, [1], 1j])
@pytest.mark.parametrize(("name", "field"), BUDGETS)
def test_budgets_are_positive_whole_numbers(name, field, bad):
    others = {p.name: 1 for p in signatures()[name] if p.required and p.name != field}
    refuses(lambda: METHODS[name](**others, **{field: bad}), field)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("SparQ(r=1, k=4, local=5)", "local.*4"),
        ("SparQ(r=1, k=4, local=-1)", "local"),
        ("SparQ(r=1, k=4, local=1.0)", "local"),
        ("SparQ(r=1, k=4, mean_value='yes')", "mean_value"),
        ("SparQ(r=1, k=4, mean_value=1)", "mean_value"),
        ("SparQ(r=1, k=4, temperature='hot')", "coverage"),
        ("SparQ(r=1, k=4, channels='int2')", "int4"),
        ("TopK(k=1, oracle=1)", "oracle"),
        ("TopK(k=1, mean_value=1)", "mean_value"),
        ("TopK(k=1, oracle=True, mean_value=True)", "mean_value = True belongs to exact scores"),
        ("Quest(page=16, k=8)", "k = 8 must be an integer of at least 16"),
        ("StreamingLLM(k=4)", "sinks.*3"),
        ("SnapKV(k=8, window=9)", "window = 9 must be at most 8"),
        ("SnapKV(k=8, window=0)", "window"),
        ("SnapKV(k=8, pool=2)", "pool = 2 must be odd"),
        ("SnapKV(k=0.0)", "k"),
        ("TOVA(k=1.5)", "k"),
        ("LMInfinite(k=16)", "initial.*15"),
        ("LMInfinite(k=3, initial=-1)", "initial"),
        ("LMInfinite(k=20, positions='page')", "positions = 'page' must be 'text' or 'cache'"),
        ("H2O(k=4, local=5)", "local.*4"),
        ("H2O(k=4, local=0.5)", "local"),
        ("H2O(k=0.2, local=0.3)", "local"),
        ("H2O(k=0.2, local=1)", "local"),
        ("H2O(k=1.5)", "k"),
        ("H2O(k=4, score='max')", "score = 'max' must be one of sum, mean"),
        ("H2O(k=0.0)", "k"),
        ("LowRank(r=1, k=1, seed=True)", "seed"),
        ("SubGenStream(delta=-1, t=1, s=1)", "delta"),
        ("SubGenStream(delta='x', t=1, s=1)", "delta"),
        ("SubGenStream(delta=True, t=1, s=1)", "delta"),
        ("SubGenStream(delta=1e999, t=1, s=1)", "delta"),
        ("SubGenStream(delta=1, t=1, s=1, seed=0.5)", "seed"),
        ("Skim(r=0)", "r = 0"),
        *((f"Skim(error={x})", f"error = {x} must be a number above 0 and below 1") for x in (0, 1, -0.1, True, "'a'")),
        ("SANTA(s=4, draws='random')", "draws = 'random' must be one of stratified, systematic, independent"),
        ("VAttention(epsilon=0)", "epsilon = 0 must be a number above 0$"),
        ("VAttention(delta=1.0)", "delta = 1.0 must be a number above 0 and below 1$"),
        ("VAttention(verified='all')", "verified = 'all' must be one of denominator, output"),
        ("RocketKV(k=8, top=3)", "top = 3 must be an integer of at least 4"),
        ("RocketKV(k=8, r=0)", "r = 0"),
        ("TopP(p=0)", "p = 0 must be a share of the weights, above 0 and at most 1"),
        ("TopP(p=1.5)", "p = 1.5"),
        ("TopP(p=True)", "p = True"),
        ("TopP(p='all')", "p = 'all'"),
        ("TopP(p=None)", "p = None"),
        ("Strided(k=4, local=5)", "local = 5 must be at most 4"),
        ("Fixed(k=4, l=0)", "l = 0"),
        ("Fixed(k=4, l=5)", "l = 5 must be at most 4"),
        ("Fixed(k=8, c=5)", "c = 5 must be at most 4"),
        ("Fixed(k=8, l=2, c=True)", "c = True"),
    ],
)
def test_bounds_are_named(spec, says):
    refuses(lambda: parse(spec), says)


@pytest.mark.parametrize(
    "method", [SparQ(9, 4), LowRank(9, 4), Skim(r=9), VAttention(r=9), RocketKV(8, r=9), SparQ(2**31 - 1, 4)]
)
def test_r_is_at_most_the_head_size(method):
    with pytest.raises(ValueError, match=r"r = \d+ must be at most 8"):
        method.store(Shape(1, 1, 1, 8), torch.float32)
