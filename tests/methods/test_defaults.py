"""PyTorch's defaults of types and devices, which somebody may set for the whole process, change nothing."""

from __future__ import annotations

import pytest
import torch

import skimkv
from skimkv import ops
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


@pytest.mark.parametrize("spec", SMALL)
def test_another_default_device_changes_no_kernel(spec):
    """As torch.set_default_device("cuda") would: a kernel's buffers are where its tensors are."""
    method, x = parse(spec), Sequences.random(Shape(2, 2, 2, 16), 40)
    _, expected = run(method, x, 30)
    with torch.device("meta"):
        _, found = run(method, x, 30)
    assert torch.equal(found, expected)


def test_models_decode_the_same_with_another_default_device():
    model, ids = new_family("llama"), torch.arange(40)[None]
    with skimkv.attach(model, "Skim(k=8, r=4)"):
        cache = skimkv.Cache(model, "Skim(k=8, r=4)")
        expected = model.generate(ids, max_new_tokens=8)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            with torch.device("meta"):
                found = [ids[:, -1:]]
                for _ in range(3):
                    logits = model(found[-1], past_key_values=cache).logits[:, -1]
                    found.append(ops.argmax(logits)[:, None])
    assert all(token.is_cpu for token in found) and expected.shape == (1, 48)
