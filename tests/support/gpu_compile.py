"""Compile the GPU kernels for a GPU that need not be here, and print one JSON line for each launch.

python tests/support/gpu_compile.py [capability [cases]]: capability 90 is an H100 or H200. TRITON_INTERPRET must not be
set. Launches go Triton's own way from the arguments to the types, up to the point where a kernel would be loaded.
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
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from skimkv.methods import SubGenStream
from skimkv.ops.gpu import backend, launch
from skimkv.ops.gpu.backend import GpuKernels
from skimkv.ops.gpu.paged import PagedKernels, append_slots
from skimkv.stores.base import Shape
from skimkv.stores.row_blocks import RowBlockLayout, RowBlocks
from skimkv.stores.slots import Slots
from support.kernels import filled

CAPABILITY = int(sys.argv[1]) if len(sys.argv) > 1 else 90
TOOLS = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
what = ""


class AbsentGpu:
    """What Triton asks of a driver before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


def tool(name, *args):
    (path,) = glob.glob(os.path.join(TOOLS, name + "*"))[:1]
    done = subprocess.run([path, *args], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def instead_of_a_launch(self, *args, grid, warmup=False, **options):
    """Compile, and print what ptxas, the PTX and the machine code say."""
    kernel = compile_kernel(self, *args, grid=grid, warmup=True, **options)
    loads = re.findall(r"(?:ld\.global|cp\.async\.c[ag])[.\w:]*", kernel.asm["ptx"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        used = dict(re.findall(r"(REG|STACK):(\d+)", tool("cuobjdump", "-res-usage", file.name)))
        code = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?![.\s]|NOP)", tool("nvdisasm", file.name), re.M)
    kinds = collections.Counter(re.sub(r"\.shared.*", "", load) for load in loads)
    row = {"kernel": self.fn.__name__, "case": what, "registers": int(used["REG"]), "stack": int(used["STACK"])}
    row |= {"instructions": len(code), "shared": kernel.metadata.shared, "loads": kinds}
    print(json.dumps(row), flush=True)


def token(store):
    B, H, _, D = store.shape
    return torch.randn(2, B, H, D).to(store.dtype).unbind()


CASES = [
    (128, torch.bfloat16, 1, "int8"),
    (128, torch.bfloat16, 4, "copy"),
    (128, torch.float16, 8, "int4"),
    (80, torch.float32, 1, "none"),
]
compile_kernel = JITFunction.run


def compile_on_blocks(D, dtype, G):
    """The steps and the append on an engine's blocks."""
    layout = RowBlockLayout(512, 2, D, dtype, "copy")
    blocks = RowBlocks(torch.zeros(4, 2, 512, layout.bytes_per_token // dtype.itemsize, dtype=dtype), layout, G)
    kernels = PagedKernels(layout, blocks.distance, 3, 2, "cpu")
    kernels.begin(torch.tensor([[3, 1], [0, 0]], dtype=torch.int32), torch.tensor([700, 256], dtype=torch.int32))
    q, plain = torch.randn(2, 2, G, D).to(dtype), {"scale": 0.1}
    append_slots(blocks, *torch.randn(2, 5, 2, D).to(dtype), torch.arange(5))
    kernels.dense(blocks, q, None, **plain)
    kernels.sparq(blocks, q, None, r=32, k=128, local=32, temperature="coverage", mean_value=False, **plain)
    kernels.top_k(blocks, q, None, k=32, oracle=True, **plain)


def main():
    global what
    driver.set_active(AbsentGpu())
    JITFunction.run = instead_of_a_launch
    launch.runs = lambda store: True
    gpu = GpuKernels()
    for D, dtype, G, channels in CASES[: int(sys.argv[2]) if len(sys.argv) > 2 else None]:
        what = f"{D} {dtype} {G} {channels}"
        q, store = filled(D, [700, 256], dtype, G, channels, 32)
        plain = {"scale": 0.1, "softcap": None}
        sinks = torch.zeros(2, G) if G == 8 else None
        if sinks is not None:
            plain["sinks"] = sinks
        gpu.append(store, *token(store))
        for heads in (0, launch.MOST_HEADS_OF_WARP):
            backend.MOST_HEADS_OF_WARP = heads
            sparq = {"r": 32, "k": 128, "local": 32, "temperature": "coverage", "mean_value": G == 1}
            gpu.sparq(store, q, None, **plain, **sparq)
        if G == 4:
            compile_on_blocks(D, dtype, G)
            continue
        gpu.dense(store, q, None, **(plain | {"softcap": 5.0 if G == 8 else None}))
        shape = Shape(2, 2, G, D)
        slots = Slots(shape, dtype, "cpu", 512, scored=True)
        gpu.scored_slots(slots, q, token(slots), **plain, recent=[3, 3])
        gpu.clusters(SubGenStream(3.0, 8, 128, 7).store(shape, dtype), q, token(slots), scale=0.1, sinks=sinks)
        if dtype == torch.float32:
            gpu.top_k(store, q, None, **plain, k=32, oracle=True)
            slots = Slots(shape, dtype, "cpu", 512)
            gpu.ring_slots(slots, q, token(slots), **plain)


if __name__ == "__main__":
    main()
