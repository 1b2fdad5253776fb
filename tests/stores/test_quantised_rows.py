"""RowFormat of K and V in 8 and 4 bits: the code by hand, its error, and what stores make of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from skimkv.methods import H2O, METHODS, Dense, parse
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from skimkv.stores.quantise import SPAN, RowFormat, pack_int4, put_codes, rotate_span
from skimkv.stores.slots import Slots
from skimkv.testing import Sequences, decode, prompt
from support.laws import DTYPES, QUANTISED, close, run

KINDS = ["int8", "int4"]


def test_four_bits_by_hand():
    """What is rotated to 0, 15, 7.4 and 7.6 has a step of 1, and codes 0, 15, 7 and 8.

    The first two numbers are the low nibbles, the last two the high ones.
    """
    x, form = torch.tensor([15.0, -7.6, 0.0, -7.4]), RowFormat(4, "int4")
    torch.testing.assert_close(rotate_span(x), torch.tensor([0.0, 15.0, 7.4, 7.6]))
    held = form.encode(x)
    assert held.tolist() == [0x00, 0x00, 0x80, 0x4B, 0x70, 0x8F]  # 15 is 0x4B80 in float16
    assert form.decode(held, torch.float32).tolist() == [15, -8, 0, -7]


@pytest.mark.parametrize(("n", "size"), [(2, 2), (6, 2), (16, 16), (36, 4), (48, 16), (64, 64)])
def test_the_rotation_is_orthonormal_and_its_own_inverse(n, size):
    """It shares every channel out evenly among `size` of them, and keeps products."""
    matrix = rotate_span(torch.eye(n, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T) and torch.equal((matrix != 0).sum(0), torch.full((n,), size))
    torch.testing.assert_close(matrix.abs().amax(0), torch.full((n,), size**-0.5, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-15)
    q, k = torch.randn(2, 5, n, dtype=torch.float64)
    torch.testing.assert_close((rotate_span(q) * rotate_span(k)).sum(-1), (q * k).sum(-1))


@pytest.mark.parametrize("D", [64, 80, 128])
def test_a_large_channel_does_not_take_the_codes_of_the_others(D):
    """One channel is 50 times as large: without the rotation a step of the others is their whole range."""
    x = torch.randn(200, D, generator=torch.Generator().manual_seed(D))
    x[:, 5] *= 50
    form = RowFormat(D, "int4")
    plain = torch.cat([_without_rotation(part) for part in x.split(SPAN, -1)], -1)
    errors = [(y - x).square().mean(0).sqrt() for y in (form.decode(form.encode(x), torch.float32), plain)]
    span = torch.arange(SPAN) != 5  # the other channels of its span
    assert errors[0][:SPAN][span].mean() < 0.7 * errors[1][:SPAN][span].mean() < 1
    assert (errors[0].square().sum() < errors[1].square().sum()).all()


def as_coded(x: torch.Tensor, kv: str) -> torch.Tensor:
    """The numbers that become codes."""
    return torch.cat([rotate_span(part) for part in x.split(SPAN, -1)], -1) if kv == "int4" else x


def _without_rotation(x: torch.Tensor) -> torch.Tensor:
    """What codes of 4 bits between its ends make of a span."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    return low + ((x - low) / step).round() * step


def test_eight_bits_by_hand():
    """Ends -1 and 50: a step of 1/5."""
    x, form = torch.tensor([-1.0, 50.0, 0.05]), RowFormat(3, "int8")
    held = form.encode(x)
    assert held.tolist() == [0x00, 0xBC, 0x40, 0x52, 0, 255, 5]
    torch.testing.assert_close(form.decode(held, torch.float32), torch.tensor([-1.0, 50.0, 0.0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("D", [2, 16, 64, 80, 128, 200])
@pytest.mark.parametrize("kv", KINDS)
def test_the_error_is_half_a_step(kv, D, dtype):
    torch.manual_seed(D)
    form = RowFormat(D, kv)
    for scale in (1.0, 1e-5, 1e3):
        x = ((torch.randn(3, 5, D) + 2 * torch.randn(3, 5, 1)) * scale).to(dtype)
        y, x = as_coded(form.decode(form.encode(x), torch.float64), kv), as_coded(x.double(), kv)
        for e, part in zip((y - x).abs().split(SPAN, -1), x.split(SPAN, -1), strict=True):
            low, high = part.aminmax(dim=-1, keepdim=True)
            ends = torch.maximum(low.abs(), high.abs()) * 2**-11 + 2**-25  # float16
            step = (high - low + 2 * ends) / (2**form.bits - 1)
            assert (e <= step / 2 + ends + 1e-6 * part.abs().max()).all()


def test_equal_numbers_have_no_step():
    for kv in KINDS:
        form = RowFormat(64, kv)
        assert (form.decode(form.encode(torch.full((64,), -0.75)), torch.float32) == -0.75).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e6])
@pytest.mark.parametrize("kv", KINDS)
def test_what_float16_cannot_hold_is_nan(kv, bad):
    """Only in the channels that share its ends."""
    x, form = torch.randn(2, 128), RowFormat(128, kv)
    x[0, 70] = bad
    y = form.decode(form.encode(x), torch.float32)
    assert y[0, 64:].isnan().all() and y[0, :64].isfinite().all() and y[1].isfinite().all()


@pytest.mark.parametrize(
    ("kv", "D", "width"), [("int4", 64, 36), ("int4", 128, 72), ("int8", 128, 136), ("int4", 80, 48)]
)
def test_bytes_of_a_row(kv, D, width):
    """Of 4 bits 4.5, of 8 bits 8.5: 64 channels share 4 bytes."""
    form = RowFormat(D, kv)
    assert form.encode(torch.zeros(1, D)).nbytes == form.nbytes(1, torch.bfloat16) == width
    assert sum(n * size for n, size in form.traffic(1, torch.float32)) == width
    store = Dense(kv=kv).store(Shape(1, 2, 1, D), torch.bfloat16)
    store.append(*torch.zeros(2, 1, 2, 100, D, dtype=torch.bfloat16))
    assert store.nbytes == 2 * 2 * 100 * width <= store.allocated == 2 * 2 * 256 * width


# methods that choose by what is rounded to the cache's type choose the same in float32 only
ROUNDED = [(spec, torch.float32) for spec in QUANTISED]
CHOOSING = ("LowRank", "Quest", "Skim", "SparQ", "TopP", "RaBitQ", "VAttention", "H2O", "SubGen")
ROUNDED += [(s, torch.bfloat16) for s in QUANTISED if not s.startswith(CHOOSING)]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "dtype"), ROUNDED)
def test_a_coded_cache_is_the_cache_of_what_it_decodes_to(spec, dtype, backend):
    """The same method in float32 over the decoded stream: same choices, same outputs."""
    method, shape = parse(spec), Shape(2, 2, 3, 16)
    s, form = Sequences.random(shape, 290, dtype), method.row_format(16)
    decoded = Sequences(s.q.float(), *(form.decode(form.encode(x), torch.float32) for x in (s.k, s.v)))
    _, y = run(method, s, 280, pad=[0, 33])
    plain = parse(spec.replace(f"kv='{method.kv}'", ""))
    store = prompt(plain, decoded.tokens(0, 280), [0, 33])
    if isinstance(store, Slots) and store.rotation is not None:  # keys that were turned are coded again
        turn: Any = store.rotation
        store.rotation = lambda keys, by: form.decode(form.encode(turn(keys, by).to(dtype)), torch.float32)
    close(y, decode(plain, store, decoded.tokens(280, 290)), dtype, method.kv)


@pytest.mark.parametrize(
    ("kv", "D"), [("int4", D) for D in (2, 6, 10, 14, 66, 90)] + [("int8", D) for D in (1, 3, 15, 65)]
)
def test_rows_of_an_odd_number_of_bytes(kv, D):
    """A slice that is one of them has an odd stride, and may begin at an odd address."""
    form, x = RowFormat(D, kv), torch.randn(5, D)
    held = form.encode(x)
    assert held.shape[-1] % 2 == 1
    together = form.decode(held, torch.float32)
    numbers, error = as_coded(x, kv), as_coded(together - x, kv)
    bound = (numbers.amax(-1) - numbers.amin(-1)) / (2**form.bits - 1) / 2 + 2**-8
    assert (error.abs().amax(-1) <= bound).all()
    assert all(torch.equal(form.decode(held[i : i + 1], torch.float32), together[i : i + 1]) for i in range(5))


@pytest.mark.parametrize("kv", KINDS)
def test_history_is_decoded_in_the_type_of_the_cache(kv):
    s = Sequences.random(Shape(1, 2, 1, 16), 30, torch.bfloat16)
    for method in (Dense(kv=kv), H2O(30, kv=kv)):
        store = method.store(Shape(1, 2, 1, 16), torch.bfloat16)
        method.prefill(store, s.q, s.k, s.v, scale=0.25)
        k, v = store.history(slice(0, 1))
        assert k.dtype == v.dtype == torch.bfloat16 and k.shape == v.shape == s.k.shape
        assert (k - s.k).abs().max() < (0.05 if kv == "int8" else 0.4)


@pytest.mark.parametrize("name", METHODS)
def test_a_spec_says_it_last(name):
    special = {"SubGenStream": "delta=1, t=1, s=1", "SparQ": "r=2, k=4", "LowRank": "r=2, k=4", "Dense": ""}
    required = {**special, "Quest": "page=4, k=32", "TopP": "p=0.5", "SANTA": "s=32"}.get(name, "k=32")
    if name == "SubGenStream":
        with pytest.raises(ValueError, match=r"samples.*'int4' must be None"):
            parse(f"{name}({required}, kv='int4')")
        return
    method = parse(f"{name}(kv='int4', {required})")
    assert method.kv == "int4" and repr(method).endswith("kv='int4')") and parse(repr(method)) == method
    assert parse(f"{name}({required})").kv is None and "kv" not in repr(parse(f"{name}({required})"))


@pytest.mark.parametrize("bad", ["int2", "INT4", "", 4, True, ["int4"], "copy"])
def test_what_is_no_width(bad):
    for make in (lambda: Dense(kv=bad), lambda: H2O(8, kv=bad), lambda: Full(Shape(1, 1, 1, 4), torch.float32, kv=bad)):
        with pytest.raises(ValueError, match=r"^kv = .* must be None, 'int8' or 'int4'$"):
            make()


def test_four_bits_come_in_pairs():
    with pytest.raises(ValueError, match="even head size; D = 13"):
        Dense(kv="int4").store(Shape(1, 1, 1, 13), torch.float32)
    assert Dense(kv="int8").store(Shape(1, 1, 1, 13), torch.float32).row_format.width == 17


def test_kv_is_named():
    with pytest.raises(ValueError, match="at most 0 positional"):
        parse("Dense('int4')")
    with pytest.raises(TypeError):
        Dense("int4")


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_are_put_where_packing_puts_them(bits):
    codes = torch.randint(0, 2**bits, (2, 3, 512), dtype=torch.uint8)
    packed = pack_int4(codes) if bits == 4 else codes.clone()
    new = torch.randint(0, 2**bits, (2, 3, 190), dtype=torch.uint8)
    put_codes(packed, 131, new, bits)
    codes[..., 131:321] = new
    assert torch.equal(packed, pack_int4(codes) if bits == 4 else codes)
