"""What the benches of whole models decode with: models of a real one's shape with random weights, and their caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ..hf.cache import Cache
from ..hf.layer import Layer
from ..hf.weights import random_linear
from ..methods import Dense
from ..methods.base import Method
from ..stores import memory
from ..stores.base import Shape
from .caches import filled_store, keys_values, random_store
from .shapes import check_model


def random_llama(
    shape: str, layers: int | None, weights: str, positions: int, device: torch.device | str = "cpu"
) -> LlamaForCausalLM:
    """Return a Llama of that shape with random weights, in eval mode; None layers: as many as the shape has.

    Raises ValueError if the shape or the format of the weights is unknown.
    """
    sizes = check_model(shape, weights)
    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.intermediate, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, num_hidden_layers=layers or sizes.layers, vocab_size=sizes.vocabulary,
        head_dim=sizes.head_dim, max_position_embeddings=positions,
    )  # fmt: skip
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(dtype)  # type: ignore[arg-type]
    draw = torch.Generator(device).manual_seed(0)
    for parent in list(model.modules()):
        for name, part in list(parent.named_children()):
            if isinstance(part, torch.nn.Linear) and weights == "int8":
                setattr(parent, name, random_linear(part.in_features, part.out_features, draw, dtype))
    for parent in model.modules():
        for name, empty in list(parent.named_parameters(recurse=False)):
            if empty.is_meta:
                random = memory.empty(empty.shape, dtype, device).fill_(1)
                if empty.ndim > 1:
                    random.normal_(0, 0.02, generator=draw)
                setattr(parent, name, torch.nn.Parameter(random, requires_grad=False))
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    result: LlamaForCausalLM = model.eval()
    return result


class Subject(NamedTuple):
    """The model whose tokens are timed. shape: its name, or the file. weights: their format. file: of GGUF, if any."""

    model: LlamaForCausalLM
    shape: str
    weights: str
    file: Path | None = None


def gguf_subject(path: Path) -> Subject:
    """Load the model of a GGUF file, of any architecture that can be loaded; it needs no tokenizer.

    Raises ValueError, in one line with the path, if it cannot be read.
    """
    from ..hf.gguf_model import load_gguf_model, read_contents

    model: Any = load_gguf_model(path)
    return Subject(model, str(path), read_contents(path).weights, path)


def cache_shape(model: LlamaForCausalLM) -> Shape:
    """Return the shape of one layer's cache, for one sequence."""
    config: Any = model.config
    H = config.num_key_value_heads
    return Shape(1, H, config.num_attention_heads // H, config.head_dim)


def weight_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of weights that one token reads: all but the embedding table, of which it reads a row."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return sum(t.nbytes for name, t in tensors if "embed_tokens" not in name)


def random_cache(model: LlamaForCausalLM, method: Method | None, tokens: int, more: int) -> Any:
    """Return a cache of random tokens with room for `more`: the method's, or for None that of transformers."""
    shape, dtype = cache_shape(model), model.dtype
    cache: Any = DynamicCache(config=model.config) if method is None else Cache(model, method)
    for i, layer in enumerate(cache.layers):
        base = random_store(shape, dtype, tokens, more, i, model.device)
        if method is None:
            cache.update(*keys_values(base), i)
        else:
            assert isinstance(layer, Layer)
            layer.take_store(filled_store(method, base, more))
    return cache


class Decoder(NamedTuple):
    """One way to decode: by a method, or for None as transformers does, after `tokens` tokens."""

    method: Method | None
    tokens: int

    @property
    def name(self) -> str:
        """The method's spec, or `transformers`."""
        return "transformers" if self.method is None else repr(self.method)

    @property
    def label(self) -> str:
        """The name, and after how many tokens."""
        return f"{self.name} after {self.tokens}"

    def bound(self, model: LlamaForCausalLM) -> int:
        """Return an upper bound of the bytes that its cache takes in all layers."""
        size = (self.method or Dense()).bound(self.tokens, cache_shape(model), model.dtype)
        return size * len(model.model.layers)


def next_token(model: LlamaForCausalLM, cache: Any) -> None:
    """Take one decode step, as generate() does for each token."""
    ids, places = torch.tensor([[[5]], [[cache.get_seq_length()]]], device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, position_ids=places, use_cache=True)
