"""Stores for the tests of the C++ kernels, and the float64 reference they are held against."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch

from skimkv import ops
from skimkv.ops.cpu import library as native
from skimkv.stores.base import Shape, map_tensors
from skimkv.stores.full import Full
from skimkv.stores.quantise import GROUP
from skimkv.stores.slots import Slots
from support import steps

NATIVE = ops.select_backend("cpu")[0] == "cpu"
ISAS = native.isas() if NATIVE else []
ISAS_AND_REFERENCE = [*ISAS, "ref"]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EPS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@contextlib.contextmanager
def on(isa, threads=1):
    """Everything inside runs on one instruction set, or in the reference."""
    before = torch.get_num_threads()
    if isa != "ref":
        native.force(isa)
    torch.set_num_threads(threads)
    try:
        with ops.backend("ref" if isa == "ref" else "cpu"):
            yield
    finally:
        if isa != "ref":
            native.force(None)
        torch.set_num_threads(before)


def exact(store):
    """The same store with its rounded contents in float64."""
    twin = map_tensors(store, lambda t: t.double() if t.is_floating_point() else t.clone())
    twin.dtype = torch.float64
    if isinstance(twin, Full) and twin.index is not None:
        twin.index = replace(twin.index, dtype=torch.float64)
    return twin


def poison(store):
    """NaN wherever no token is held."""
    for b, n in enumerate(store.lengths):
        for c in store.chunks:
            at = max(0, n - c.start)
            c.k[b, :, at:] = c.v[b, :, at:] = 255 if store.row_format.bits else torch.nan  # as ends of a row: NaN
            if c.scale is not None:
                c.scale[b, :, at // GROUP :] = torch.nan
            elif c.index is not None:
                c.index[b, ..., at:] = torch.nan
        if store.tail is not None:
            store.tail[b, ..., n - store.index.form.coded(n) :] = torch.nan


def misaligned(t):
    """Zeros of this shape and of float32 at an address that is no multiple of their size."""
    raw = torch.zeros(t.nbytes + 1, dtype=torch.uint8).numpy()[1:]
    return torch.from_numpy(raw.view("float32").reshape(t.shape))


def filled(D, lengths, dtype, G, channels="copy", r=8, k=0, local=0, mean=True, projection=None, H=2, seed=0, kv=None):
    """q and a store: r channels of q stand out, and k - local positions of K that agree with q in them."""
    torch.manual_seed(seed)
    shape, n = Shape(len(lengths), H, G, D), max(lengths)
    sign = torch.randn(shape.B, H, D).sign()
    big = torch.zeros(shape.B, H, D).scatter(2, torch.rand(shape.B, H, D).argsort(-1)[..., :r], 1.0)
    size = torch.rand(shape.B, H, G, D)
    q = (sign[:, :, None] * torch.where(big[:, :, None] > 0, 1 + size, 0.4 * size)).to(dtype)
    K, V = torch.randn(2, shape.B, H, n, D).mul_(0.5)
    for b, length in enumerate(lengths):
        free = length - 1 - local  # candidates 0 .. free-1, moved to the end of the left-padded row
        for h in range(H):
            if k - local > 0 and free > 0:
                top = torch.randperm(free)[: k - local] + n - length
                K[b, h, top] += 5 * D**0.5 / r * sign[b, h] * big[b, h]
    store = Full(shape, dtype, "cpu", channels, mean, projection, kv)
    pads = [n - length for length in lengths]
    first = n // 2  # two blocks, two chunks
    for a, z in ((0, first), (first, n)):
        cut = [min(max(p - a, 0), z - a) for p in pads]
        if z > a:
            store.append(K[:, :, a:z].to(dtype), (V[:, :, a:z] + 0.25).to(dtype), cut)
    poison(store)
    return q, store


def close(got, want, store, q, scale, factor=16.0):
    """Error of float32 sums of D products in a logit, passed on to weights of values, and one rounding to q's type."""
    slots = isinstance(store, Slots)
    decode = lambda x: store.row_format.decode(getattr(store, x), torch.float64)  # noqa: E731
    keys, values = (decode(x) if slots else store.uncounted(x) for x in "kv")
    logit = scale * q.double().abs().sum(-1).max() * keys.double().nan_to_num(0).abs().max()
    bound = factor * 2.0**-24 * (4 + logit) * values.double().nan_to_num(0).abs().max() + 2 * EPS[q.dtype] * want.abs()
    worst = ((got.double() - want).abs() - bound).max().item()
    assert worst <= 0, f"{worst:.3g} beyond {bound.max():.3g}"


def compare(name, isas, q, store, *args, threads=1):
    """A step on an instruction set, or on each of several, against the reference; returns the last result."""
    want = getattr(steps, name)(exact(store), q.double(), *args, reference=True)
    assert not want.isnan().any()
    for isa in [isas] if isinstance(isas, str) else isas:
        with on(isa, threads):
            got = getattr(steps, name)(store, q, *args)
        assert got.dtype == q.dtype and got.shape == q.shape
        # integer weights of 8-bit codes err by 2^-16 of the largest; those of 4-bit codes by more, but these data leave
        # hardly any mass to what was not chosen (test_int4_scan.py measures their scores)
        try:
            close(got, want, store, q, args[0], 512.0 if store.bits else 16.0)
        except AssertionError as error:
            raise AssertionError(f"{name} on {isa}: {error}") from error
    return got


def held(one, two):
    """All that the tokens of both stores occupy is equal; v_mean up to the order of its sums.

    What is made of decoded rows is equal up to one rounding, which may move a code of the index.
    """
    poison(one), poison(two)
    if one.row_format.bits:
        for c, d in zip(one.chunks, two.chunks, strict=True):
            assert torch.equal(c.k, d.k) and torch.equal(c.v, d.v)
        every = torch.arange(one.R).expand(*one.shape[:2], -1)
        x, y = (store.read_channels(every) for store in (one, two))
        step = 1 / (2**one.bits - 1) if one.bits else 0
        least = torch.finfo(one.dtype).tiny * torch.finfo(one.dtype).eps  # the type's smallest number above zero
        most = float(x.abs().max())
        torch.testing.assert_close(x, y, rtol=0, atol=(2 * EPS[one.dtype] + 2 * step + 1e-5) * most + least)
        if one.v_mean is not None:
            torch.testing.assert_close(one.v_mean, two.v_mean, rtol=0, atol=2 * EPS[one.dtype] + 1e-6)
        assert one.lengths == two.lengths
        return
    for c, d in zip(one.chunks, two.chunks, strict=True):
        for x, y in ((c.k, d.k), (c.v, d.v), (c.scale, d.scale)):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        if c.index is not None:
            for b, n in enumerate(one.lengths):
                at = max(0, n - c.start) if one.bits is None else max(0, n // GROUP * GROUP - c.start) * one.bits // 8
                assert torch.equal(c.index[b, ..., :at], d.index[b, ..., :at])
    if one.v_mean is not None:
        torch.testing.assert_close(one.v_mean, two.v_mean, rtol=0, atol=1e-6, equal_nan=True)
    for b, n in enumerate(one.lengths if one.bits else ()):
        opened = n - one.index.form.coded(n)
        torch.testing.assert_close(one.tail[b, ..., :opened], two.tail[b, ..., :opened], rtol=0, atol=0, equal_nan=True)
    assert one.lengths == two.lengths
    if one.group_means:  # the open group's codes too
        every = torch.arange(one.R).expand(*one.shape[:2], -1)
        x, y = (store.read_channels(every) for store in (one, two))
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
