"""The laws that every method keeps, to be run on a method of one's own: `skimkv.testing.check_method(MyMethod(k=64))`.

Each law is a function of a method that raises AssertionError. They run on random data, on the CPU, by the kernel of the
method if it has one, and otherwise by its own `step`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import ops, spec
from .methods import Dense, bind_spec, parse
from .methods.base import Method
from .stores.base import Shape, Store
from .stores.full import Full
from .stores.rotation import KeyRotation
from .stores.slots import Slots

SHAPE = Shape(B=2, H=2, G=3, D=16)
# Of rows of 8 and 4 bits, in float32: a kernel without products of bytes adds codes, which are counted from the end of
# a row's range. The terms are as large as the range, some four times the values, and the rest has their error.
OF_CODES = 8e-6
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
LENGTHS = (1, 5, 24, 254, 255, 256, 300)  # cached tokens: few, and around the end of a group of 256


class Sequences(NamedTuple):
    """Random sequences: q (B,H,G,n,D), k and v (B,H,n,D)."""

    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def random(cls, shape: Shape, n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Sequences:
        """Draw n tokens of standard normal numbers, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        B, H, G, D = shape
        sizes = ((G, n, D), (n, D), (n, D))
        return cls(*(torch.randn(B, H, *size, generator=generator).to(dtype) for size in sizes))

    @property
    def shape(self) -> Shape:
        """The sizes of the layer that these sequences belong to."""
        B, H, G, _, D = self.q.shape
        return Shape(B, H, G, D)

    def rows(self, index: list[int]) -> Sequences:
        """These rows of the batch."""
        return Sequences(self.q[index], self.k[index], self.v[index])

    def tokens(self, start: int, stop: int) -> Sequences:
        """Tokens start .. stop-1."""
        return Sequences(self.q[..., start:stop, :], self.k[:, :, start:stop], self.v[:, :, start:stop])


def empty_store(method: Method, shape: Shape, dtype: torch.dtype, device: torch.device | str = "cpu") -> Store:
    """An empty store of this method; one that turns keys to other positions turns them as Llama does."""
    store: Store = method.store(shape, dtype, device)
    if isinstance(store, Slots) and store.fixed_k is not None:
        store.rotation = KeyRotation.llama(shape.D)
    return store


def prompt(
    method: Method,
    x: Sequences,
    pad: list[int] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Store:
    """A store that has read these sequences as a prompt; the first pad[b] tokens of row b are padding.

    scale: of the logits; None: one over the root of the head size.
    """
    store = empty_store(method, x.shape, x.k.dtype)
    method.prefill(store, x.q, x.k, x.v, pad=pad, **_softmax_options(x, softcap, sinks, scale))
    return store


def decode(
    method: Method,
    store: Store,
    x: Sequences,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Decode these sequences token by token: (n,B,H,G,D). Raises AssertionError if a result has another shape or type.

    scale: as of `prompt`.
    """
    options, outputs = _softmax_options(x, softcap, sinks, scale), list[Tensor]()
    for i in range(x.k.shape[2]):
        q = x.q[..., i, :]
        outputs.append(method.decode(store, q, x.k[:, :, i], x.v[:, :, i], **options))
        returned = f"{outputs[-1].dtype} {tuple(outputs[-1].shape)}, and q is {q.dtype} {tuple(q.shape)}"
        require((outputs[-1].shape, outputs[-1].dtype) == (q.shape, q.dtype), f"a step returns {returned}")
    return torch.stack(outputs)


def _softmax_options(
    x: Sequences, softcap: float | None, sinks: Tensor | None, scale: float | None
) -> ops.SoftmaxOptions:
    options: ops.SoftmaxOptions = {"scale": x.shape.D**-0.5 if scale is None else scale, "softcap": softcap}
    return options if sinks is None else {**options, "sinks": sinks}


def require(holds: bool, problem: str) -> None:
    """Raise AssertionError with a description of the problem unless `holds`, in optimised Python too."""
    if not holds:
        raise AssertionError(problem)


def assert_close(a: Tensor, b: Tensor, dtype: torch.dtype, what: str, tolerance: float = 0.0) -> None:
    """Raise AssertionError unless a equals b up to the rounding of dtype, or a larger tolerance.

    Both are relative to the largest number of b, where that exceeds 1.
    """
    error = (a.double() - b.double()).abs().max().item()
    bound = max(TOLERANCE[dtype], tolerance) * max(1.0, b.double().abs().max().item())
    require(error <= bound, f"{what}: they differ by {error:.3g}, the bound is {bound:.3g}")


def repr_is_the_spec(method: Method) -> None:
    """Parsing the repr of a method gives the method again."""
    text = repr(method)
    again = bind_spec(type(method), spec.parse_call(text, "method", spec.METHOD_EXAMPLE))
    require(again == method and repr(again) == text, f"{text} is parsed as {again!r}")


def prompt_is_exact(method: Method) -> None:
    """The prompt's own attention is dense and causal, whatever the method keeps afterwards."""
    x = Sequences.random(SHAPE, 70)

    def attention(of: Method) -> Tensor:
        """Return the attention of the whole prompt."""
        store: Store = of.store(x.shape, x.k.dtype)
        return of.prefill(store, x.q, x.k, x.v, scale=0.4, pad=[0, 9])

    assert_close(attention(method), attention(Dense()), torch.float32, "the prompt's attention and dense attention")


def rows_are_independent(method: Method) -> None:
    """A row's output does not depend on the other rows of the batch, nor on their order."""
    x = Sequences.random(SHAPE._replace(B=3), 280)
    whole = decode(method, prompt(method, x.tokens(0, 270)), x.tokens(270, 280))
    part = x.rows([2, 1])
    swapped = decode(method, prompt(method, part.tokens(0, 270)), part.tokens(270, 280))
    assert_close(whole[:, [2, 1]], swapped, torch.float32, "rows in another batch")


def padding_is_invisible(method: Method) -> None:
    """Padding on the left changes nothing: ordinary numbers, and keys of 1e9 with infinite values."""
    x, pad = Sequences.random(SHAPE, 310), 41
    alone = x.rows([1]).tokens(pad, 310)
    single = decode(method, prompt(method, alone.tokens(0, 300 - pad)), alone.tokens(300 - pad, 310 - pad))
    for is_large in (False, True):
        if is_large:
            x.k[1, :, :pad], x.v[1, :, :pad] = 1e9, torch.inf
        store = prompt(method, x.tokens(0, 300), [0, pad])
        require(store.lengths == [300, 300 - pad], f"{pad} of 300 tokens are padding, and lengths are {store.lengths}")
        both = decode(method, store, x.tokens(300, 310))
        assert_close(both[:, 1:], single, torch.float32, "a padded row and the same row alone")


def appends_add_up(method: Method) -> None:
    """A store does not see how its tokens were cut into blocks (methods that keep all of a prompt block).

    A budget that is a share of the prompt depends on where the prompt ends.
    """
    if type(method).take is not Method.take or isinstance(getattr(method, "k", None), float):
        return
    for blocks in ((1,) * 30, (256, 44), (7, 250, 43), (255, 1, 1, 43)):
        n = sum(blocks)
        x = Sequences.random(SHAPE, n + 1)
        whole, parts = (empty_store(method, SHAPE, torch.float32) for _ in range(2))
        whole.append(x.k[:, :, :n], x.v[:, :, :n])
        start = 0
        for block in blocks:
            parts.append(x.k[:, :, start : start + block], x.v[:, :, start : start + block])
            start += block
        require(whole.lengths == parts.lengths == [n] * SHAPE.B, f"lengths are {whole.lengths} and {parts.lengths}")
        require(whole.nbytes == parts.nbytes, f"one append holds {whole.nbytes} bytes, several {parts.nbytes}")
        from_one, from_several = (decode(method, store, x.tokens(n, n + 1)) for store in (whole, parts))
        assert_close(from_one, from_several, torch.float32, f"one append and appends of {blocks} tokens")


def counted_is_predicted(method: Method) -> None:
    """What a step reads and writes through the counted accessors is `traffic`, element by element and byte by byte."""
    for dtype in (torch.float32, torch.bfloat16):
        for n in LENGTHS:
            x = Sequences.random(SHAPE, n + 1, dtype)
            with ops.backend("ref"):
                store = prompt(method, x.tokens(0, n))
                before = store.elements, store.bytes
                decode(method, store, x.tokens(n, n + 1))
            predicted = method.traffic(n, SHAPE, dtype, **store.observed())
            counted = store.elements - before[0], store.bytes - before[1]
            closed_form = predicted.elements, predicted.bytes
            moved = f"after {n} tokens in {dtype} a step moves {counted} (elements, bytes), traffic says {closed_form}"
            require(counted == closed_form, moved)


def bytes_are_bounded(method: Method) -> None:
    """The live bytes of a store stay within `bound` and within what is allocated."""
    for n in (1, 30, 300):
        x = Sequences.random(SHAPE, n)
        store = prompt(method, x)
        bound = method.bound(n, SHAPE, torch.float32)
        require(0 < store.nbytes <= bound, f"{n} tokens occupy {store.nbytes} bytes, the bound is {bound}")
        require(store.nbytes <= store.allocated, f"{store.nbytes} live bytes, {store.allocated} allocated")


def copies_are_independent(method: Method) -> None:
    """A forked store decodes as the original does, and a selected batch decodes as its rows do."""
    x = Sequences.random(SHAPE, 282)
    store = prompt(method, x.tokens(0, 270))
    decode(method, store, x.tokens(270, 281))
    last = x.tokens(281, 282)
    fork, beams = store.fork(), store.fork()
    beams.select(torch.tensor([1, 0, 1]))
    y = decode(method, store, last)
    assert_close(decode(method, fork, last), y, torch.float32, "a fork and the original")
    selected = decode(method, beams, last.rows([1, 0, 1]))
    assert_close(selected, y[:, [1, 0, 1]], torch.float32, "selected rows and the original's")
    require(beams.lengths == [282] * 3, f"three selected rows have lengths {beams.lengths}")


def kernel_is_the_algorithm(method: Method) -> None:
    """Where the backend in use has a kernel for this method, it computes what `step` computes.

    Kernels take the products with a quantised index in integers. With codes of 8 bits, that rounds to 2^-16 of the
    largest. With codes of 4 bits it rounds to 2^-8, so that of rows whose scores are nearly equal others may be chosen
    or drawn: there, the errors against dense attention are the same up to a tenth. In 16 bits scores may be equal, and
    there nine of ten results are the same.
    """
    if ops.select_backend("cpu")[0] == "ref" or not method.has_kernel("cpu"):
        return
    cap = 2.0 if _knows_softcap(method) else None
    cases: list[tuple[Shape, torch.dtype, float | None, float | None, Tensor | None]] = [
        (SHAPE, torch.float32, None, None, None),
        *((SHAPE, torch.float32, None, None, sinks) for sinks in _some_sinks(method)),
        (SHAPE, torch.float32, 0.4, cap, None),
        (Shape(5, 1, 5, 20), torch.float32, 0.4, None, None),
        (SHAPE, torch.bfloat16, 0.4, None, None),
        (SHAPE, torch.float16, 0.4, None, None),
    ]
    for shape, dtype, scale, softcap, sinks in cases:
        x = Sequences.random(shape, 290, dtype)

        def outputs(of: Method) -> tuple[Tensor, Store]:
            """What ten steps after a prompt give, and the store."""
            store = prompt(of, x.tokens(0, 280), None, softcap, sinks, scale)  # noqa: B023
            return decode(of, store, x.tokens(280, 290), softcap, sinks, scale), store  # noqa: B023

        fast, store = outputs(method)
        with ops.backend("ref"):
            exact, _ = outputs(method)
        what = f"the kernel and the algorithm in PyTorch, {shape}, {dtype}, scale={scale}, softcap={softcap}"
        bits = store.bits if isinstance(store, Full) else None
        if dtype != torch.float32 and bits != 4:
            far = (fast.float() - exact.float()).abs().amax(-1) > TOLERANCE[dtype] * exact.float().abs().amax(-1)
            require(far.float().mean().item() <= 0.1, f"{what}: {far.sum()} of {far.numel()} results differ")
        elif bits == 4:
            dense, _ = outputs(Dense())
            error, expected = ((y.float() - dense.float()).abs().mean().item() for y in (fast, exact))
            problem = f"{what}: the kernel's error is {error:.3g}, that of the algorithm {expected:.3g}"
            require(abs(error - expected) <= 0.1 * expected + 1e-4 + TOLERANCE[dtype] / 4, problem)
        else:
            of_index = 2.0**-16 * max(1.0, (scale or 0.0) * shape.D**0.5)  # of logits that are larger by the scale
            assert_close(fast, exact, torch.float32, what, of_index if bits else OF_CODES if method.kv else 0.0)


def _knows_softcap(method: Method) -> bool:
    """Whether a method takes a soft cap; one that does not refuses it."""
    try:
        prompt(method, Sequences.random(SHAPE, 4), softcap=1.0)
    except ValueError:
        return False
    return True


def _some_sinks(method: Method) -> list[Tensor]:
    """Sinks (H,G) that take about half of the weight of a few hundred tokens; none if the method does not know them."""
    sinks = 5 + torch.randn(SHAPE.H, SHAPE.G, generator=torch.Generator().manual_seed(0))
    return [] if method.functions_without_sinks() else [sinks]


def a_sink_of_no_weight_changes_nothing(method: Method) -> None:
    """Sinks of -inf change nothing, and finite ones take weight from the values."""
    x = Sequences.random(SHAPE, 290)
    for sinks in _some_sinks(method):
        without, none, some = (
            decode(method, prompt(method, x.tokens(0, 280), sinks=given), x.tokens(280, 290), sinks=given)
            for given in (None, torch.full_like(sinks, -torch.inf), sinks)
        )
        assert_close(none, without, torch.float32, "sinks of -inf and no sinks")
        require(not torch.allclose(some, without, rtol=0.01), "finite sinks change nothing")


LAWS: tuple[Callable[[Method], None], ...] = (
    repr_is_the_spec, prompt_is_exact, rows_are_independent, padding_is_invisible, appends_add_up,
    counted_is_predicted, bytes_are_bounded, copies_are_independent, kernel_is_the_algorithm,
    a_sink_of_no_weight_changes_nothing,
)  # fmt: skip


def full_budget_is_dense(method: Method) -> None:
    """A method whose budget holds everything computes dense attention (of rows in the method's form)."""
    x = Sequences.random(SHAPE, 301)
    dense = Dense(kv=method.kv)
    cases: list[tuple[float | None, Tensor | None]] = [(None, sinks) for sinks in (None, *_some_sinks(method))]
    for softcap, sinks in cases + ([(2.0, None)] if _knows_softcap(method) else []):
        scale = None if softcap is None else 0.4
        y, exact = (
            decode(
                subject,
                prompt(subject, x.tokens(0, 290), [0, 37], softcap, sinks, scale),
                x.tokens(290, 301),
                softcap,
                sinks,
                scale,
            )
            for subject in (method, dense)
        )
        assert_close(y, exact, torch.float32, f"{method} and dense attention, softcap={softcap}, scale={scale}")


def check_method(method: Method | str, full: Method | str | None = None) -> list[str]:
    """Run all laws on a method, or on that of a spec, and return their names.

    full: the same method with a budget of at least 301 tokens, which must equal dense attention; None if it never does.
    Raises AssertionError, which names the law and the method, for the first law that does not hold or that ends in
    another error, and ValueError for a spec of no method.
    """
    laws = [(law, parse(method)) for law in LAWS] + ([] if full is None else [(full_budget_is_dense, parse(full))])
    for law, subject in laws:
        try:
            law(subject)
        except AssertionError as error:
            raise AssertionError(f"{subject} breaks the law {law.__name__}: {error}") from error
        except Exception as error:
            name, problem = type(error).__name__, f"{subject} breaks the law {law.__name__}"
            raise AssertionError(f"{problem}, which ends in {name}: {error}") from error
    return [law.__name__ for law, _ in laws]
