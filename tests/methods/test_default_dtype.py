"""PyTorch's default type of numbers, which somebody may set for the whole process, changes nothing."""

from __future__ import annotations

import pytest
import torch

import skimkv
from skimkv.methods import parse
from skimkv.stores.base import Shape
from skimkv.testing import Sequences
from support.laws import SMALL, run
from support.tiny_models import new_family


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other_default(request):
    """A function that sets another type; afterwards it is float32 again."""
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("spec", SMALL)
def test_every_method_computes_the_same(spec, other_default, backend):
    method, x = parse(spec), Sequences.random(Shape(2, 2, 2, 16), 40)
    _, expected = run(method, x, 30)
    other_default()
    _, found = run(method, x, 30)
    assert torch.equal(found, expected)


def test_models_are_prepared_the_same(other_default):
    model, ids = new_family("gemma3"), torch.arange(40)[None]
    with skimkv.attach(model, "Dense()"):
        expected = model.generate(ids, max_new_tokens=8)
    model = new_family("gemma3")
    other_default()
    with skimkv.attach(model, "Dense()"):
        assert torch.equal(model.generate(ids, max_new_tokens=8), expected)
