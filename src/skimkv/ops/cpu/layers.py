"""The layers of a model as one operation in C++, alone or from tokens to logits, for a decode step (layers.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from . import library
from .linear import Matrix, dtype_number
from .structs import CAttend, CDecoder, CLayer, CLayers, CMatrix, CNorm

# Attention of a layer, by its number: q (B,H*G,1,D) · k, v (B,H,1,D) -> (B,1,H*G,D), of the type of the tokens.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}  # SKIMKV_SILU and SKIMKV_GELU_TANH of skimkv.h


class Norm(NamedTuple):
    """A root-mean-square normalisation: weight (size,), eps. adds_one: its factor is 1 + weight."""

    weight: Tensor
    eps: float
    adds_one: bool = False

    def held(self) -> Norm:
        """It with a tensor of its own, which shares the memory: see Matrix."""
        return self._replace(weight=self.weight.detach())

    def part(self, size: int, dtype: int) -> CNorm:
        """It as a part of an operation. Raises ValueError if it is not one of `size` numbers of the type `dtype`."""
        weight = self.weight
        if weight.shape != (size,) or dtype_number(weight) != dtype or not weight.is_contiguous():
            raise ValueError(
                f"weights of a normalisation are {weight.dtype} {tuple(weight.shape)}; must be contiguous ({size},) of "
                "the tokens' type"
            )
        return CNorm(weight.data_ptr(), self.eps, self.adds_one)


class Layer(NamedTuple):
    """A layer of a model: t = x + o(attention(q, k, v)), then t + down(silu(gate(u)) * up(u)) with u = after(t).

    q, k and v are products of before(x). D: the head size. head_norms: of the heads of q and of k, or None. sum_norms:
    of what o and down return, before it is added; or None. activation: of ACTIVATIONS, in the place of silu. angles:
    the number of the layer's cos and sin among those of the model.
    """

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix
    before: Norm
    after: Norm
    D: int
    head_norms: tuple[Norm, Norm] | None = None
    sum_norms: tuple[Norm, Norm] | None = None
    activation: str = "silu"
    angles: int = 0

    def held(self) -> Layer:
        """It with normalisations that are `held`."""
        of_heads, of_sums = (pair and (pair[0].held(), pair[1].held()) for pair in (self.head_norms, self.sum_norms))
        before, after = self.before.held(), self.after.held()
        return self._replace(before=before, after=after, head_norms=of_heads, sum_norms=of_sums)

    def part(self) -> CLayer:
        """It as a part of an operation. Raises ValueError if the weights of a normalisation do not fit."""
        size, dtype, D = self.q.inputs, self.q.op.dtype, self.D
        norms = [self.before.part(size, dtype), self.after.part(size, dtype)]
        for of, numbers in ((self.sum_norms, size), (self.head_norms, D)):
            norms += [norm.part(numbers, dtype) for norm in of] if of else [CNorm(), CNorm()]
        return CLayer(*(matrix.op for matrix in self[:7]), *norms, D, ACTIVATIONS[self.activation], self.angles)


class Layers:
    """All layers of a model, with attention inside, prepared for one token of one type in every row of a batch.

    norm: of the last layer's tokens. It holds addresses of memory that it keeps, as Matrix does. Several threads may
    use it. Raises ValueError if the weights of a normalisation do not fit.
    """

    def __init__(self, layers: Sequence[Layer], norm: Norm) -> None:
        layers, norm = [layer.held() for layer in layers], norm.held()
        first = layers[0].q
        self.layers, self.norm, self.count, self.D = layers, norm, len(layers), layers[0].D
        self.list = (CLayer * self.count)(*(layer.part() for layer in layers))
        self.kinds = {matrix.kind for layer in layers for matrix in layer[:7]}  # of the matrices
        self.angles = 1 + max(layer.angles for layer in layers)
        self.dtype = layers[0].before.weight.dtype
        final = norm.part(first.inputs, first.op.dtype)
        self.op = CLayers(ctypes.addressof(self.list), self.count, self.angles, final)
        self.address, self.pool = ctypes.addressof(self.op), library.thread_pool()
        self.run = library.library().skimkv_layers_run_parts

    def fits(self, B: int, cos: Tensor, sin: Tensor) -> bool:
        """Whether cos and sin are (angles,B,1,D) or (angles,1,1,D), of the layers' type, and on the CPU."""
        shape = cos.shape
        if shape != sin.shape or not cos.dtype == sin.dtype == self.dtype or not (cos.is_cpu and sin.is_cpu):
            return False
        return shape in ((self.angles, B, 1, self.D), (self.angles, 1, 1, self.D))

    def __call__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        steps: Sequence[int | None] | None,
        attend: Attend | None = None,
    ) -> Tensor:
        """Compute all layers of x (B,1,in), whose B `fits` cos and sin, -> (B,1,in).

        steps: the address of each layer's step of attention; None for a layer whose attention is `attend`. Where the
        rows are those of several caches, each layer has a step of each, one after the other. Without steps attention
        gives zeros, so that the rest can be timed. Raises what `attend` raises, or ValueError with the library's
        reason: before the first layer runs, unless memory ran out.
        """
        x = self.checked(x)
        y = torch.empty_like(x)
        self.compute(self.run, self.address, x.shape[0], (x.data_ptr(),), cos, sin, (y.data_ptr(),), steps, attend)
        return y

    def checked(self, x: Tensor) -> Tensor:
        """Tokens x (B,1,in), contiguous. Raises ValueError if they are not of this size and type, or on the CPU."""
        size = self.layers[0].q.inputs
        if x.shape[1:] != (1, size) or x.dtype != self.dtype or not x.is_cpu:
            raise ValueError(
                f"tokens are {x.dtype} {tuple(x.shape)} on {x.device}; must be {self.dtype} (B, 1, {size}) on cpu"
            )
        return x.contiguous()

    def compute(
        self,
        run: Callable[..., bytes | None],
        op: int,
        B: int,
        tokens: tuple[int | None, ...],
        cos: Tensor,
        sin: Tensor,
        results: tuple[int, ...],
        steps: Sequence[int | None] | None,
        attend: Attend | None,
    ) -> None:
        """Let a function of the library compute an operation of these layers. tokens, results: addresses for it.

        Raises ValueError if cos and sin do not fit, and otherwise as a call does.
        """
        if not self.fits(B, cos, sin):
            raise ValueError(
                f"cos is {cos.dtype} {tuple(cos.shape)} on {cos.device}, sin likewise or not; must be {self.dtype} "
                f"({self.angles}, {B} or 1, 1, {self.D}) on cpu"
            )
        if cos.shape[1] != B:
            cos, sin = cos.expand(-1, B, 1, self.D), sin.expand(-1, B, 1, self.D)
        cos, sin = cos.contiguous(), sin.contiguous()
        parts, more = (1, 0) if steps is None else divmod(len(steps), self.count)
        if more or not parts:
            assert steps is not None
            raise ValueError(f"there are {len(steps)} steps of attention for {self.count} layers")
        addresses = None if steps is None else (c_void_p * len(steps))(*steps)
        raised: list[BaseException] = []
        function = CAttend() if attend is None else self._callback(attend, B, raised)
        threads = torch.get_num_threads() if self.pool else 1
        places = *tokens, cos.data_ptr(), sin.data_ptr(), *results
        error = run(op, addresses, parts, function, None, *places, B, threads, self.pool)
        if raised:
            raise raised[0]
        library.raise_error(error)

    def _callback(self, attend: Attend, B: int, raised: list[BaseException]) -> object:
        """`attend` as the library calls it. What it raises becomes the first of `raised`."""
        D, dtype = self.D, self.dtype

        def copied(address: int, heads: int) -> Tensor:
            """The numbers at an address (B,heads,1,D); attention may keep them, and the library takes others there."""
            x = torch.empty(B, heads, 1, D, dtype=dtype, device="cpu")
            ctypes.memmove(x.data_ptr(), address, x.nbytes)
            return x

        def called(_: object, i: int, queries: int, keys: int, values: int, y: int) -> int:
            """Let layer i attend with what stands at these addresses, and write its answer at y; 0 unless it failed."""
            try:
                layer = self.layers[i]
                H, heads = layer.k.out // D, layer.q.out // D
                found = attend(i, copied(queries, heads), copied(keys, H), copied(values, H))
                if found.shape != (B, 1, heads, D) or found.dtype != dtype or not found.is_cpu:
                    raise ValueError(
                        f"attention of layer {i} gave {found.dtype} {tuple(found.shape)} on {found.device}; must be "
                        f"{dtype} {(B, 1, heads, D)} on cpu"
                    )
                found = found.contiguous()
                ctypes.memmove(y, found.data_ptr(), found.nbytes)
            except BaseException as error:  # it cannot pass through the library
                raised.append(error)
                return 1
            return 0

        return CAttend(called)


class Decoder:
    """The layers of a model between an embedding and the matrix of its logits, as one operation.

    embed: its row i stands for token i; None: tokens are given as they are embedded. It keeps the tensors and holds
    their addresses, as Layers does. Several threads may use it.
    """

    def __init__(self, layers: Layers, head: Matrix, embed: Matrix | None = None) -> None:
        self.layers, self.head, self.embed = layers, head, embed
        self.op = CDecoder(layers.op, CMatrix() if embed is None else embed.op, head.op)
        self.address, self.run = ctypes.addressof(self.op), library.library().skimkv_decoder_run

    def __call__(
        self,
        tokens: Tensor,
        cos: Tensor,
        sin: Tensor,
        steps: Sequence[int | None] | None,
        attend: Attend | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The logits (B,V) after tokens, and where the first of the largest of each row is, (B,1).

        tokens: ids (B,1) where there is an embedding, or else x (B,1,in). The other arguments, and what is raised, are
        those of Layers; ValueError also for a token that is not one of the embedding.
        """
        B = tokens.shape[0]
        if self.embed is None:
            tokens = self.layers.checked(tokens)
        elif tokens.shape != (B, 1) or tokens.is_floating_point() or not tokens.is_cpu:
            raise ValueError(f"tokens are {tokens.dtype} {tuple(tokens.shape)} on {tokens.device}; must be ids (B, 1)")
        else:
            tokens = tokens.to(torch.int64).contiguous()
        logits = torch.empty(B, self.head.out, dtype=self.layers.dtype, device="cpu")
        largest = torch.empty(B, 1, dtype=torch.int64, device="cpu")
        at, results = tokens.data_ptr(), (logits.data_ptr(), largest.data_ptr())
        places = (None, at) if self.embed is None else (at, None)
        self.layers.compute(self.run, self.address, B, places, cos, sin, results, steps, attend)
        return logits, largest
