"""Random settings of methods and random sequences, with what makes comparisons hard: ties, outliers, tiny numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from skimkv.methods import parse
from skimkv.methods.base import Method
from skimkv.stores.base import Shape
from skimkv.testing import Sequences
from support.kernels import ISAS, TYPES

KINDS = ("normal", "normal", "whole numbers", "duplicates", "outliers", "large", "tiny", "no queries")
LAYOUTS = ("contiguous", "heads of a token together", "gaps")
SKIM_RANGE = 127  # the largest whole number of queries whose products with an index of 4 bits are exact


class Case(NamedTuple):
    """A run of a method: blocks of a prompt, then decoded tokens, all of them random by `seed`.

    blocks: the tokens of each block, and how many of them are padding in every row. kind: of KINDS. layout: of LAYOUTS.
    """

    seed: int
    spec: str
    shape: Shape
    dtype: str
    blocks: list[tuple[int, list[int]]]
    steps: int
    scale: float
    softcap: float | None
    sinks: bool
    isa: str
    threads: int
    kind: str
    layout: str

    @property
    def method(self) -> Method:
        """The method of this case."""
        return parse(self.spec)

    def softmax(self) -> dict[str, object]:
        """The options of every attention."""
        H, G = self.shape[1:3]
        draw = torch.Generator().manual_seed(self.seed)
        sinks = {"sinks": torch.randn(H, G, generator=draw) * 2} if self.sinks else {}
        return {"scale": self.scale, "softcap": self.softcap, **sinks}


def _read_specs(draw: random.Random, D: int, kv: str | None) -> str:
    """A method that chooses among all tokens, or reads them all."""
    r, k = draw.randint(1, min(D, 24)), draw.choice([1, 2, 7, 16, 40, 130, 1000])
    kept = "" if kv is None else f", kv={kv!r}"
    mean, local = draw.choice([True, False, None]), draw.randint(0, min(k, 30))
    channels = draw.choice(["none", "copy", "int8", "int4"])
    temperature = draw.choice(["coverage", "coverage", "sqrt_d", "sqrt_r"])
    return draw.choice([
        f"Dense(kv={kv!r})",
        *[f"SparQ({r}, {k}, {local}, {mean}, {temperature!r}, {channels!r}{kept})"] * 4,
        *[f"TopK({k}, oracle={draw.random() < 0.5}{kept})"] * 2,
        *[f"LowRank({r}, {k}, seed={draw.randint(0, 9)}{kept})"] * 2,
    ])  # fmt: skip


def _slot_specs(draw: random.Random, D: int, kv: str | None) -> str:
    """A method that keeps some of the tokens in slots."""
    k, kept = draw.choice([3, 8, 21, 60, 130, 0.2, 0.6]), "" if kv is None else f", kv={kv!r}"
    first = draw.randint(0, 2)
    score, pattern = draw.choice([("sum", "recent")] * 3 + [("mean", "recent"), ("sum", "strided"), ("sum", "fixed")])
    turned = [f"LMInfinite({k}, {first}, positions='cache'{kept})", f"StreamingLLM({k}, {first}{kept})"]
    local = draw.choice([None, 0, 2]) if pattern == "recent" and not isinstance(k, float) else None
    return draw.choice([
        *[f"H2O({k}, {local}, score={score!r}, pattern={pattern!r}{kept})"] * 5,
        *[f"SnapKV({k}, pool={draw.choice([1, 3, 5])}{kept})"] * 2, f"TOVA({k}{kept})",
        f"LMInfinite({k}, {first}{kept})", *(turned if D % 2 == 0 else []), f"Strided({k}{kept})", f"Fixed({k}{kept})",
        f"SubGen({draw.randint(1, 12)}, {draw.randint(1, 20)}{kept})",
    ])  # fmt: skip


def case_of(seed: int) -> Case:
    """The case of this number, the same everywhere."""
    draw = random.Random(seed)
    while True:
        D = draw.choice([*range(1, 40), 48, 64, 64, 80, 96, 128, 128, 200, 256])
        shape = Shape(draw.randint(1, 3), draw.randint(1, 3), draw.choice([1, 1, 2, 3, 4, 5, 8]), D)
        kv = draw.choice([None, None, None, "int8", "int4"]) if D % 2 == 0 else draw.choice([None, None, "int8"])
        family = draw.choice(["read", "read", "slots", "Skim"])
        kind, softcap = draw.choice(KINDS), draw.choice([None, None, None, 3.0, 20.0])
        longest = draw.choice([1, 3, 12, 40, 150, 255, 256, 257, 300, 520, 700])
        if family == "Skim":
            kept = "" if kv is None else f", kv={kv!r}"
            spec = f"Skim({draw.choice([1, 4, 12, 40, 600])}, {draw.randint(1, D)}{kept})"
            # groups that are full are compared by data whose scores are exact in 8 bits; quantised rows are not such
            kind = draw.choice(["normal", "normal", "outliers"]) if longest < 240 else "exact in 8 bits"
            softcap = softcap and 20.0  # a cap that many logits reach makes many scores equal
            kv = kv if longest < 240 else None
            spec = spec if longest < 240 else spec.replace(kept, "")
        else:
            spec = (_read_specs if family == "read" else _slot_specs)(draw, D, kv)
        try:
            parse(spec).store(shape, torch.float32)
        except ValueError:
            continue  # a budget below what the method needs
        break
    is_even = family == "Skim" and longest >= 240  # a row's groups of tokens begin where its padding ends
    lengths = [longest, *(longest if is_even else draw.randint(1, longest) for _ in range(shape.B - 1))]
    blocks = list(_blocks(draw, lengths, 1 if family == "Skim" else 3))
    scale = draw.choice([1.0, 1.0, 0.5, 2.0, -1.0]) * D**-0.5
    return Case(
        seed, spec, shape, draw.choice(list(TYPES)) if kind != "exact in 8 bits" else "float32", blocks,
        0 if spec.startswith("TOVA") else draw.choice([1, 2, 4]), scale,  # for TOVA's steps: test_tova_kernels.py
         softcap, draw.random() < 0.3, draw.choice(ISAS), draw.randint(1, 3), kind,
        draw.choice(LAYOUTS),
    )  # fmt: skip


def _blocks(draw: random.Random, lengths: list[int], most: int) -> Iterator[tuple[int, list[int]]]:
    """A prompt of rows of these lengths in at most so many blocks; shorter rows begin with padding."""
    longest = max(lengths)
    parts = draw.randint(1, min(most, longest))
    cuts = sorted(draw.sample(range(1, longest), parts - 1)) if longest > 1 else []
    for a, z in zip([0, *cuts], [*cuts, longest], strict=True):
        yield z - a, [min(max(longest - n - a, 0), z - a) for n in lengths]


def _laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides: x (B,H[,G],n,D). What lies between them is NaN."""
    if layout == "heads of a token together":
        return x.movedim(-2, 1).contiguous().movedim(1, -2)
    if layout == "gaps":
        room = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype)
        room[..., 1:-2] = x
        return room[..., 1:-2]
    return x


def sequences(case: Case) -> Sequences:
    """All tokens of a case, those of its blocks and those that are decoded."""
    B, H, G, D = case.shape
    n = sum(tokens for tokens, _ in case.blocks) + case.steps
    draw = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    q, k, v = normal(B, H, G, n, D) * 2, normal(B, H, n, D), normal(B, H, n, D) + 0.25
    if case.kind == "whole numbers":
        q, k = q.round(), k.round()
    elif case.kind == "duplicates":
        k = k[:, :, torch.randint(0, min(n, 5), (n,), generator=draw)]
    elif case.kind == "outliers":
        k[..., :: max(1, D // 2)] = 4 * k[..., :: max(1, D // 2)] + 15
    elif case.kind == "large":
        q = 12 * q
    elif case.kind == "tiny":
        size = 1e-7 if case.dtype == "float16" else 1e-38
        q, k, v = (x if draw.initial_seed() >> i & 1 else x * size for i, x in enumerate((q, k, v)))
    elif case.kind == "no queries":
        q[:, :, :, ::2] = 0
    elif case.kind == "exact in 8 bits":
        k = torch.rand(B, H, n, D, generator=draw) * 2 - 1
        starts = torch.arange(0, n, 256)
        k[:, :, starts], k[:, :, (starts + 1).clamp(max=n - 1)] = -1.0, 1.0
        q = (torch.randint(1, SKIM_RANGE, (B, H, G, n, D), generator=draw) * normal(B, H, G, n, D).sign()).float()
        q[..., 0] = SKIM_RANGE
        q = q / 60
    return Sequences(*(_laid_out(x.to(TYPES[case.dtype]), case.layout) for x in (q, k, v)))
