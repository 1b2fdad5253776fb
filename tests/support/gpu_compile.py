"""Compile the GPU kernels for a device that need not be here; one JSON line per kernel, type and layout.

python tests/gpu_compile.py [capability [cases]]: 90 is an H100 or H200. The interpreter must be off (TRITON_INTERPRET
unset).
"""

from __future__ import annotations

import collections
import glob
import json
import os
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from skimkv.ops.gpu import backend as gpu
from skimkv.ops.gpu import launch
from skimkv.stores.base import Shape
from skimkv.stores.clusters import Clusters
from support.kernels import Slots, filled

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
POINTERS |= {torch.int64: "*i64", torch.uint8: "*u8", torch.float64: "*fp64"}
CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
what = ""


def compiled(self, *args, grid, warmup=False, **options):
    """In place of a launch: types from the arguments, and what ptxas and the PTX say."""
    values = dict(zip(self.arg_names, args, strict=False))
    values |= {name: options.pop(name) for name in list(options) if name in self.arg_names}
    types, constants, attributes = {}, {}, {}
    for i, p in enumerate(self.params):
        v = values[p.name]
        if p.is_constexpr or (isinstance(v, int) and v == 1):
            types[p.name], constants[p.name] = "constexpr", v
        elif isinstance(v, torch.Tensor):
            types[p.name], attributes[(i,)] = POINTERS[v.dtype], [["tt.divisibility", 16]]
        else:
            types[p.name] = "fp32" if isinstance(v, float) else "i32"
            if isinstance(v, int) and v % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=self, signature=types, constexprs=constants, attrs=attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
    loads = re.findall(r"(?:ld\.global|cp\.async\.c[ag])[.\w:]*", kernel.asm["ptx"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = glob.glob(os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump*"))[0]
        used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    numbers = {k: int(v) for k, v in re.findall(r"(REG|STACK):(\d+)", used.stdout + used.stderr)}
    kinds = collections.Counter(re.sub(r"\.shared.*", "", load) for load in loads)
    row = {"kernel": self.fn.__name__, "case": what, "registers": numbers["REG"], "stack": numbers["STACK"]}
    print(json.dumps({**row, "shared": kernel.metadata.shared, "loads": kinds}), flush=True)


def token(store):
    B, H, _, D = store.shape
    return torch.randn(2, B, H, D).to(store.dtype).unbind()


CASES = [
    (128, torch.bfloat16, 1, "int8"),
    (128, torch.bfloat16, 4, "copy"),
    (128, torch.float16, 8, "int4"),
    (80, torch.float32, 1, "none"),
]


def main():
    global what
    JITFunction.run = compiled
    launch.runs = lambda store: True
    for D, dtype, G, channels in CASES[: int(sys.argv[2]) if len(sys.argv) > 2 else None]:
        what = f"{D} {dtype} {G} {channels}"
        q, store = filled(D, [700, 256], dtype, G, channels, 32)
        gpu.append(store, *token(store))
        for heads in (0, 10**6):
            launch.LAUNCH["fused"]["heads"] = heads
            gpu.sparq(store, q, 0.1, None, 32, 128, 32, "coverage", G == 1)
        if G == 4:
            continue
        gpu.dense(store, q, 0.1, 5.0 if G == 8 else None)
        slots = Slots(Shape(2, 2, G, D), dtype, "cpu", 512, scored=True)
        gpu.slots(slots, q, *token(slots), 0.1, None, [3, 3])
        gpu.stream(Clusters(Shape(2, 2, G, D), dtype, "cpu", 3.0, 8, 128, 7), q, 0.1, token(slots))
        if dtype == torch.float32:
            gpu.topk(store, q, 0.1, None, 32, True)
            gpu.slots(Slots(Shape(2, 2, G, D), dtype, "cpu", 512), q, *token(slots), 0.1, None)


if __name__ == "__main__":
    main()
