"""`skimkv bench token` and `skimkv bench memory`: a whole decoded token, and what a cache holds.

A token: a Llama of a real model's shape with random weights, a cache filled with random keys and values (no prompt
is run), one token at a time. The floor is what must be read, weights and cache, over the measured bandwidth.
"""

from __future__ import annotations

import gc
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ..hf.attach import Cache, detach
from ..hf.layer import Layer
from ..hf.weights import Linear8, storage
from ..methods import Dense, parse
from ..methods.base import Method
from ..stores.base import Shape
from .attention import FLUSH, filled, machine, peak_calls, random_full

FIELDS = "hidden_size intermediate_size num_attention_heads num_key_value_heads num_hidden_layers vocab_size".split()
SHAPES = {
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000),
    "llama-3-8b": (4096, 14336, 32, 8, 32, 128256),
    "mistral-7b": (4096, 14336, 32, 8, 32, 32000),
    "qwen3-4b": (2560, 9728, 32, 8, 36, 151936),
    "tiny": (256, 640, 4, 2, 4, 2048),
}
HEAD = {"tiny": 64}


def random_linear(like: torch.nn.Linear, draw: torch.Generator, dtype: torch.dtype) -> Linear8:
    """Random codes at one scale, written in place: the full-precision matrix never exists."""
    weight = storage(like.out_features, like.in_features)  # (panels, in/32, 17 words, 16 rows) int16
    weight.random_(-(2**15), 2**15, generator=draw)
    weight[:, :, 0] = torch.tensor(0.02 / 64, dtype=torch.float16).view(torch.int16)
    return Linear8(like.in_features, like.out_features, weight=weight, dtype=dtype)


def build(
    shape: str, layers: int | None, weights: str, length: int, place: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    """A Llama of that shape with random weights, in eval mode; no full-precision copy of int8 weights is made."""
    if shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    if weights not in ("int8", "bfloat16", "float32"):
        raise ValueError(f"unknown weights {weights!r}; known: int8, bfloat16, float32")
    sizes: dict[str, Any] = dict(zip(FIELDS, SHAPES[shape], strict=True))
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    config = LlamaConfig(**sizes, head_dim=HEAD.get(shape, 128), max_position_embeddings=length + 1024)
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(dtype)  # type: ignore[arg-type]
    draw = torch.Generator(place).manual_seed(0)
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, torch.nn.Linear) and weights == "int8":
                setattr(parent, name, random_linear(part, draw, dtype))
    for parent in model.modules():
        for name, p in list(parent.named_parameters(recurse=False)):
            if p.is_meta:
                filled_ = torch.ones(p.shape, dtype=dtype, device=place)
                if p.ndim > 1:
                    filled_.normal_(0, 0.02, generator=draw)
                setattr(parent, name, torch.nn.Parameter(filled_, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(place)
    result: LlamaForCausalLM = model.eval()
    return result


def heads(model: LlamaForCausalLM) -> Shape:
    config: Any = model.config
    H = config.num_key_value_heads
    return Shape(1, H, config.num_attention_heads // H, config.head_dim)


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of weights one token reads: all but the embedding table, of which it reads a row."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return sum(t.nbytes for name, t in tensors if "embed_tokens" not in name)


class Clock:
    """Wraps every layer's attention call, ours or the library's, and adds up its seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = fn(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return timed


def prefilled(model: LlamaForCausalLM, method: Method | None, length: int) -> Any:
    """A cache of `length` random tokens: ours, or for None the library's own."""
    shape, dtype = heads(model), model.dtype
    cache: Any = Cache(model, method) if method else DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        base = random_full(shape, dtype, length, i, model.device)
        if isinstance(layer, Layer):
            assert method is not None
            layer.store, layer.seen, layer.is_initialized = filled(method, base, length), length, True
        else:
            (chunk,) = base.chunks
            cache.update(chunk.k[:, :, :length], chunk.v[:, :, :length], i)
    return cache


def step(model: LlamaForCausalLM, cache: Any) -> None:
    ids, places = torch.tensor([[[5]], [[cache.get_seq_length()]]], device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, position_ids=places, use_cache=True)


def token(
    shape: str,
    layers: int | None,
    weights: str,
    lengths: Sequence[int],
    methods: Sequence[str],
    rounds: int = 9,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """The rows of the JSON contract; `transformers` is the library's own cache and attention."""
    model = build(shape, layers, weights, max(lengths))
    count = len(model.model.layers)
    seconds: dict[tuple[str, int], float] = {}
    rows, peaks = [], []
    read = weight_bytes(model)
    flush = torch.ones(FLUSH // 4)
    for n in lengths:
        for spec in ["transformers", *methods]:
            method = None if spec == "transformers" else parse(spec)
            cache, clock = prefilled(model, method, n), Clock()
            if method is None:
                detach(model)
            attend = _timed(model, cache, clock)
            total, inside, peak = [], [], []
            for i in range(rounds + 1):
                for call in peak_calls(flush).values():
                    start = time.perf_counter()
                    call()
                    peak.append(flush.nbytes / (time.perf_counter() - start))
                clock.seconds, start = 0.0, time.perf_counter()
                step(model, cache)
                if i:
                    total.append(time.perf_counter() - start)
                    inside.append(clock.seconds)
                tick()
            attend()
            best = statistics.quantiles(peak, n=10)[-1]
            peaks.append(best)
            moved = (method or Dense()).traffic(n + rounds // 2, heads(model), model.dtype).bytes * count
            ms, ms_attention = (statistics.median(x) * 1e3 for x in (total, inside))
            name = repr(method) if method else "transformers"
            seconds[name, n] = ms
            rows.append(
                {
                    "method": name,
                    "shape": shape,
                    "layers": count,
                    "weights": weights,
                    "length": n,
                    "ms": ms,
                    "ms_min": min(total) * 1e3,
                    "ms_max": max(total) * 1e3,
                    "ms_attention": ms_attention,
                    "ms_weights": ms - ms_attention,
                    "floor_ms": (moved + read) / best * 1e3,
                    "cache_bytes": moved,
                    "weight_bytes": read,
                    "speedup_transformers": seconds["transformers", n] / ms,
                }
            )
            del cache
            gc.collect()
    return {"machine": machine(), "peak_gb_per_s": max(peaks) / 1e9, "rows": rows}


def _timed(model: LlamaForCausalLM, cache: Any, clock: Clock) -> Callable[[], None]:
    """Time cache update and attention of every layer; returns what undoes it."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config._attn_implementation
    plain = ALL_ATTENTION_FUNCTIONS[name]
    AttentionInterface.register(name, clock.wrap(plain))
    cache.update = clock.wrap(cache.update)
    return lambda: AttentionInterface.register(name, plain)


def memory(shape: Shape, lengths: Sequence[int], methods: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    """Per method and length, each in a process of its own: bytes held, allocated, and the growth of peak memory."""
    rows = []
    name = str(dtype).removeprefix("torch.")
    for method in methods:
        for n in lengths:
            code = f"from skimkv.bench_token import _held; _held({method!r}, {tuple(shape)!r}, {n}, {name!r})"
            out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            held, allocated, peak = map(int, out.split())
            sizes = {"nbytes": held, "allocated": allocated, "peak_rss_growth": peak}
            rows.append({"method": repr(parse(method)), "length": n, **sizes})
    return {"machine": machine(), "rows": rows}


def _held(spec: str, sizes: tuple[int, int, int, int], n: int, dtype_name: str) -> None:
    """Grow a store to n tokens as a model does: a prompt of half, then token by token for 256, then blocks."""
    method, shape, dtype = parse(spec), Shape(*sizes), getattr(torch, dtype_name)
    B, H, G, D = shape
    draw: Callable[..., Tensor] = lambda *s: torch.randn(*s).to(dtype)  # noqa: E731
    warm = method.store(shape, dtype)
    method.prefill(warm, draw(B, H, G, 300, D), draw(B, H, 300, D), draw(B, H, 300, D), scale=D**-0.5)
    method.decode(warm, draw(B, H, G, D), draw(B, H, D), draw(B, H, D), scale=D**-0.5)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    store = method.store(shape, dtype)
    for start in range(0, n, 256):
        m = min(256, n - start)
        method.prefill(store, draw(B, H, G, m, D), draw(B, H, m, D), draw(B, H, m, D), scale=D**-0.5)
    method.decode(store, draw(B, H, G, D), draw(B, H, D), draw(B, H, D), scale=D**-0.5)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(store.nbytes, store.allocated, growth)
