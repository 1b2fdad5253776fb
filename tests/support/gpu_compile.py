"""Compile the GPU kernels for a GPU that need not be here, and print one JSON line for each launch.

python tests/support/gpu_compile.py [cases], by default all of CASES. Launches go Triton's own way from the arguments to
the types, up to the point where a kernel would be loaded: the Compiler of benchmarks/gpu_static.py stands there.
"""

from __future__ import annotations

import collections
import json
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from gpu_static import Compiler, used_by

from skimkv.methods import parse
from skimkv.ops import Token
from skimkv.ops.gpu import launch, run
from skimkv.ops.gpu.run import GpuBackend, PagedBackend, append_slots
from skimkv.stores.base import Shape
from skimkv.stores.row_blocks import RowBlockLayout, RowBlocks
from support.kernels import filled

H = 2
CASES = [
    (128, torch.bfloat16, 1, "int8"),
    (128, torch.bfloat16, 4, "copy"),
    (128, torch.float16, 8, "int4"),
    (80, torch.float32, 1, "none"),
]


def compile_on_stores(D, dtype, G, channels):
    """The append, and steps of every kind of store; both forms of SparQ's step 1."""
    backend, softmax = GpuBackend(), {"scale": 0.1}
    if G == 8:
        softmax |= {"softcap": 5.0, "sinks": torch.zeros(H, G)}
    q, tokens = filled(D, [700, 256], dtype, G, channels, 32)
    token = Token(*torch.randn(2, 2, H, D).to(dtype))
    for heads in (dict.fromkeys(launch.MOST_HEADS_OF_WARP, 0), launch.MOST_HEADS_OF_WARP):
        run.MOST_HEADS_OF_WARP = heads
        backend.run(parse(f"SparQ(r=32, k=128, mean_value={G == 1})").kernel(tokens), tokens, q, token, softmax)
    for spec in ("Dense()", "TopK(k=32, oracle=True)"):
        backend.run(parse(spec).kernel(tokens), tokens, q, token, softmax)
    for spec in ("H2O(k=512)", "LMInfinite(k=512)"):
        slots = parse(spec).store(Shape(2, H, G, D), dtype)
        backend.run(parse(spec).kernel(slots), slots, q, token, softmax)


def compile_on_blocks(D, dtype, G):
    """The append and the steps on an engine's blocks."""
    layout = RowBlockLayout(512, H, D, dtype, "copy")
    blocks = RowBlocks(torch.zeros(4, H, 512, layout.bytes_per_token // dtype.itemsize, dtype=dtype), layout, G)
    backend = PagedBackend(layout, blocks.distance, 3, 2, "cpu")
    backend.begin(torch.tensor([[3, 1], [0, 0]], dtype=torch.int32), torch.tensor([700, 256], dtype=torch.int32))
    append_slots(blocks, *torch.randn(2, 5, H, D).to(dtype), torch.arange(5))
    for spec in ("Dense()", "SparQ(r=32, k=128, mean_value=False)", "TopK(k=32, oracle=True)"):
        q = torch.randn(2, H, G, D).to(dtype)
        backend.run(parse(spec).kernel(blocks), blocks, q, None, {"scale": 0.1})


def main():
    for case in CASES[: int(sys.argv[1]) if len(sys.argv) > 1 else None]:
        with Compiler() as compiler:
            compile_on_stores(*case)
            if case[2] == 4:
                compile_on_blocks(*case[:3])
        for at in compiler.launches:
            loads = re.findall(r"(?:ld\.global|cp\.async\.c[ag])[.\w:]*", at.compiled.asm["ptx"])
            kinds = collections.Counter(re.sub(r"\.shared.*", "", load) for load in loads)
            row = {"kernel": at.compiled.metadata.name, "case": str(case), "loads": kinds}
            print(json.dumps(row | used_by(at.compiled.asm["cubin"])), flush=True)


if __name__ == "__main__":
    main()
