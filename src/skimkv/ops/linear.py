"""y = x W^T with W in 8 bits, the weights of GGUF's Q8_0: 32 int8 codes along the input and one fp16 scale a block.

A block is 17 words of two bytes: the scale, then codes in pairs. In a file a row's blocks follow each other; `pack`
interleaves sixteen rows word by word, so that a vector of the processor holds one word of sixteen rows:
blocks (out, in/32, 17) -> packed (out/16 rounded up, in/32, 17, 16), all int16, a last panel padded with zeros.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from .cpu import library as native

ROWS, BLOCK, WORDS = 16, 32, 17
TILE = 64  # panels the reference dequantises at once


class CLinear(Structure):
    _fields_ = native._fields(
        a=("w", c_void_p),
        b=("out in_ n", c_int64),
        c=("x y", c_void_p),
        d=("x_n y_n", c_int64),
        e=("bias", c_void_p),
        f=("dtype", c_int32),
    )


def packed_shape(out: int, inputs: int) -> tuple[int, int, int, int]:
    """Shape of the packed weights of `out` rows. Raises ValueError if inputs is no multiple of 32."""
    if inputs < BLOCK or inputs % BLOCK or out < 1:
        raise ValueError(f"8-bit weights need inputs in blocks of {BLOCK}, not {out} x {inputs}")
    return -(-out // ROWS), inputs // BLOCK, WORDS, ROWS


def quantise(w: Tensor) -> Tensor:
    """w (out,in) of any float type -> blocks (out,in/32,17) int16; scale = max |w| / 127 in fp16, codes to nearest.

    A block that holds infinity or NaN (or more than 8e6, which no fp16 scale reaches) is NaN as a whole.
    """
    x = w.float().contiguous().unflatten(-1, (-1, BLOCK))
    scale = (x.abs().amax(-1) / 127).half()
    step = scale.float()
    codes = (x / step.masked_fill(step == 0, torch.inf)[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([scale[..., None].view(torch.int16), codes.view(torch.int16)], -1)


def dequantise(blocks: Tensor) -> Tensor:
    """blocks (...,in/32,17) int16 -> (...,in) float32, exact."""
    scale = blocks[..., :1].contiguous().view(torch.float16).float()
    return (blocks[..., 1:].contiguous().view(torch.int8) * scale).flatten(-2)


def pack(blocks: Tensor, packed: Tensor, first: int = 0) -> None:
    """Write rows `first` (a multiple of 16) and on: blocks (n,in/32,17) into packed (P,in/32,17,16)."""
    n = blocks.shape[0]
    if n % ROWS:
        blocks = torch.cat([blocks, blocks.new_zeros(-n % ROWS, *blocks.shape[1:])])
    panels = blocks.unflatten(0, (-1, ROWS))
    packed[first // ROWS : first // ROWS + panels.shape[0]] = panels.permute(0, 2, 3, 1)


def rows(packed: Tensor, index: Tensor) -> Tensor:
    """Blocks of some rows: index (n,) int64 -> (n,in/32,17)."""
    return packed[index // ROWS, :, :, index % ROWS]


def _check(x: Tensor, packed: Tensor, out: int) -> None:
    shape = packed_shape(out, x.shape[-1])
    if packed.shape != shape or packed.dtype != torch.int16 or packed.device != x.device:
        raise ValueError(
            f"weights are {packed.dtype} {tuple(packed.shape)} on {packed.device}; "
            f"{out} x {x.shape[-1]} needs int16 {shape} on {x.device}"
        )


def reference(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Tensor:
    """x (...,in) · packed · bias (out,) -> (...,out) in x's dtype, in float32 through tiles of dequantised rows.

    Raises ValueError if shapes, dtypes or devices do not fit.
    """
    _check(x, packed, out)
    tiles = []
    for p in range(0, packed.shape[0], TILE):
        panels = packed[p : p + TILE].permute(0, 3, 1, 2).flatten(0, 1)  # (rows, in/32, 17)
        tiles.append(x.float() @ dequantise(panels).T)
    y = torch.cat(tiles, -1)[..., :out]
    return (y if bias is None else y + bias.float()).to(x.dtype)


@functools.cache
def _library() -> ctypes.CDLL:
    lib = native.library()
    lib.skimkv_linear_check.argtypes, lib.skimkv_linear_check.restype = [POINTER(CLinear)], c_char_p
    lib.skimkv_linear_run.argtypes = [POINTER(CLinear), c_int, c_void_p]
    return lib


def fast(x: Tensor, packed: Tensor, out: int, bias: Tensor | None = None) -> Tensor:
    """The same in C++: activations become 16-bit integers, with a scale per block of 32.

    Adds an error of at most 2^-16 max |x| of a block to each activation; x float32, bfloat16 or float16.
    """
    _check(x, packed, out)
    dtype = native.DTYPES.get(x.dtype)
    if dtype is None or x.device.type != "cpu":
        raise ValueError(f"no CPU kernel for activations of {x.dtype} on {x.device}")
    if not packed.is_contiguous():
        raise ValueError("packed weights must be contiguous")
    tokens = x.reshape(-1, x.shape[-1])
    if tokens.stride(-1) != 1 or tokens.stride(0) < tokens.shape[1]:
        tokens = tokens.contiguous()
    y = x.new_empty(*x.shape[:-1], out)
    if not tokens.shape[0]:
        return y
    if bias is not None:
        if bias.shape != (out,) or bias.device != x.device:
            raise ValueError(f"bias is {tuple(bias.shape)} on {bias.device}; must be ({out},) on {x.device}")
        bias = bias.to(x.dtype).contiguous()
    op = CLinear(
        packed.data_ptr(), out, tokens.shape[1], tokens.shape[0], tokens.data_ptr(), y.data_ptr(),
        tokens.stride(0), out, None if bias is None else bias.data_ptr(), dtype,
    )  # fmt: skip
    lib, team = _library(), native.parallel()
    error: bytes | None = lib.skimkv_linear_check(op)
    if error is not None:
        raise ValueError(error.decode())
    if lib.skimkv_linear_run(op, torch.get_num_threads() if team else 1, team):
        raise MemoryError("no memory for the activations of an 8-bit product")
    return y
