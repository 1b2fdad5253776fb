"""How fast a decode step can be: arithmetic intensity, and the share of its time that attention takes.

SparQ Attention, section 2 and appendices C and D. A step is its products with the weights, then its attention;
each takes as long as the slower of its arithmetic and its transfers. Nothing else is counted: it is a ceiling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..methods import Dense
from ..methods.base import Method
from ..stores.base import Shape

WEIGHTS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 34 / 32}  # bytes; int8: blocks of 32 and a scale


class Hardware(NamedTuple):
    """Peaks as the makers print them, dense: bytes per second, multiply-adds per second by the bytes of a number."""

    name: str
    bandwidth: float
    peak: dict[int, float]
    memory: float | None  # bytes
    source: str

    def ridge(self, size: int) -> float:
        """r_A / r_M: multiply-adds per element transferred below which memory is the limit (appendix C)."""
        return self.peak[size] * size / self.bandwidth


HARDWARE = {
    "a100": Hardware("A100 SXM 40 GB", 1.555e12, {1: 312e12, 2: 156e12}, 40e9, "NVIDIA A100 data sheet"),
    "a100-80": Hardware("A100 SXM 80 GB", 2.039e12, {1: 312e12, 2: 156e12}, 80e9, "NVIDIA A100 data sheet"),
    "h100": Hardware("H100 SXM", 3.35e12, {1: 989.5e12, 2: 494.7e12}, 80e9, "NVIDIA H100 data sheet"),
    "h100-pcie": Hardware("H100 PCIe", 2.0e12, {1: 756.5e12, 2: 378e12}, 80e9, "NVIDIA H100 data sheet"),
    "h200": Hardware("H200 SXM", 4.8e12, {1: 989.5e12, 2: 494.7e12}, 141e9, "NVIDIA H200 data sheet"),
    "a10": Hardware("A10", 0.6e12, {1: 125e12, 2: 62.5e12}, 24e9, "NVIDIA A10 data sheet"),
    "ipu": Hardware("Bow IPU", 11e12, {2: 175e12}, 0.9e9, "SparQ appendix C: SRAM exchange; Bow-2000 data sheet"),
}


def rho(S: float, g: float, d_m: float) -> float:
    """S / (g d_m): the KV cache against the weights (appendix C)."""
    return S / (g * d_m)


def intensity(rho: float, g: float, B: float = math.inf) -> float:
    """A/M = (6 + rho g) / (6/B + rho), multiply-adds per element of a standard transformer (eq. C2)."""
    return (6 + rho * g) / (6 / B + rho)


def share(rho: float, B: float) -> float:
    """rho / (rho + 6/B): attention's part of the transfers of a standard transformer (eq. 1)."""
    return rho / (rho + 6 / B)


class Model(NamedTuple):
    """What a decode step reads: `weights` elements, and per layer the cache of H KV heads of size D.

    `sliding` of the layers see only the last `window` tokens, whatever the method.
    """

    name: str
    weights: int
    layers: int
    H: int
    G: int
    D: int
    sliding: int = 0
    window: int = 0


LARGER = {"llama-2-70b": (8192, 28672, 64, 8, 80, 32000), "llama-3-70b": (8192, 28672, 64, 8, 80, 128256)}
FIELDS = "hidden,intermediate,heads,kv_heads,layers,vocabulary"


def llama(name: str, sizes: Sequence[int], head: int = 0) -> Model:
    """A Llama of sizes FIELDS: gated, its embedding table not read but for a row. head: size D, 0 for hidden/heads."""
    if len(sizes) not in (6, 7) or min(sizes) < 1:
        raise ValueError(f"sizes = {','.join(map(str, sizes))} must be {FIELDS}[,head_dim], each at least 1")
    hidden, ffn, heads, kv, layers, words, *given = sizes
    if heads % kv:
        raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv}")
    if not given and not head and hidden % heads:
        raise ValueError(f"hidden = {hidden} is no multiple of heads = {heads}: give head_dim as well")
    D = given[0] if given else head or hidden // heads
    each = 2 * hidden * D * (heads + kv) + 3 * hidden * ffn + 2 * hidden
    return Model(name, layers * each + hidden + words * hidden, layers, kv, heads // kv, D)


def of_folder(path: Path) -> Model:
    """From a folder's config.json: the model is built without memory for its weights, and they are counted.

    Raises ValueError if there is none, the model cannot be served, or it reads only some of its weights per token.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..hf.attach import Cache
    from ..hf.layer import Layer

    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: no config.json")
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: config.json describes no causal model: {str(error).splitlines()[0]}") from None
    text = model.config.get_text_config(decoder=True)
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(f"{path}: a mixture of experts, which reads only some of its weights per token")
    served = [isinstance(layer, Layer) for layer in Cache(model, Dense()).layers]
    head = getattr(model.get_output_embeddings(), "weight", None)
    tables = (part.weight for part in model.modules() if isinstance(part, torch.nn.Embedding))
    rows = sum(table.numel() for table in tables if table is not head)  # of those a step reads one each
    H = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    D = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    read = sum(p.numel() for p in model.parameters()) - rows
    window = getattr(text, "sliding_window", None) or 0
    return Model(str(path), read, len(served), H, text.num_attention_heads // H, D, served.count(False), window)


class Step(NamedTuple):
    """One decode step of a batch. Seconds; `intensity` in multiply-adds per byte; `held`: weights and cache, bytes."""

    method: str
    length: int
    seconds: float
    attention: float
    intensity: float
    memory_bound: bool
    held: int

    @property
    def share(self) -> float:
        """Of the time, in attention."""
        return self.attention / self.seconds


def step(
    hardware: Hardware, model: Model, method: Method, n: int, batch: int, weights: str, cache: torch.dtype
) -> Step:
    """After n tokens. Every element of the cache that is read enters G multiply-adds (eq. C1).

    Arithmetic runs at the peak of 16-bit numbers, or of 32-bit ones where that is known and the cache has them.
    """
    shape = Shape(batch, model.H, model.G, model.D)
    own = method.traffic(n, shape, cache)
    slide = Dense().traffic(min(n, model.window), shape, cache)
    full = model.layers - model.sliding
    moved, elements = (full * getattr(own, x) + model.sliding * getattr(slide, x) for x in ("bytes", "elements"))
    read = model.weights * WEIGHTS[weights]
    rate = hardware.peak.get(cache.itemsize, hardware.peak[2])
    products, sums = batch * model.weights, elements * model.G
    parts = [(products, read), (sums, moved)]
    dense, attention = (max(a / rate, m / hardware.bandwidth) for a, m in parts)
    slower = [m / hardware.bandwidth >= a / rate for a, m in parts]
    held = full * method.bound(n, shape, cache) + model.sliding * Dense().bound(min(n, model.window), shape, cache)
    return Step(
        repr(method), n, dense + attention, attention, (products + sums) / (read + moved), all(slower), int(read + held)
    )


def crossing(hardware: Hardware, model: Model, batch: int, weights: str, cache: torch.dtype) -> int | None:
    """The least power of two of tokens at which dense attention takes half of the step's time; None up to 2^24."""
    for power in range(25):
        if step(hardware, model, Dense(), 1 << power, batch, weights, cache).share >= 0.5:
            return 1 << power
    return None


def here() -> Hardware:
    """This machine's processor, measured: the best read bandwidth and the best of PyTorch's products, in a second."""
    from . import attention as bench

    def best(call: Any, times: int = 5) -> float:
        seconds = []
        for _ in range(times + 1):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])

    buffer = torch.ones(bench.FLUSH // 4)
    bandwidth = max(buffer.nbytes / best(call) for call in bench.peak_calls(buffer).values())
    n, peak = 1024, {}
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.ones(n, n, dtype=dtype)
        peak[dtype.itemsize] = n**3 / best(partial(torch.mm, a, a))
    return Hardware(f"here: {bench.machine()}", bandwidth, {4: peak[4], 2: max(peak.values())}, None, "measured")
