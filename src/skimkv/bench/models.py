"""What the benches of whole models decode with: models, random or loaded, and their caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..hf.cache import Cache
from ..hf.layer import Layer
from ..hf.load import check_formats, check_source, load
from ..hf.next_logits import NextLogits
from ..hf.positions import positions_of
from ..hf.states import state_tensors
from ..hf.supported import model_layers, needed_max_tokens
from ..hf.weights import random_linear
from ..methods import Dense
from ..methods.base import Method
from ..stores import memory
from ..stores.base import Shape
from .caches import filled_store, keys_values, random_store
from .shapes import check_model, read_tensors, share_of_experts


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
    """The model that is timed. shape: its name, or what it was loaded from. weights: their format.

    file: of GGUF, if it is one. is_loaded: its weights are its own, and its modules are what `skimkv.load` gives.
    """

    model: PreTrainedModel
    shape: str
    weights: str
    file: Path | None = None
    is_loaded: bool = False


def random_subject(
    shape: str, layers: int | None, weights: str, positions: int, device: torch.device | str = "cpu"
) -> Subject:
    """Make the model of `random_llama`. Raises ValueError as that does, and for int8 weights on a GPU."""
    if weights == "int8" and torch.device(device).type == "cuda":
        raise ValueError("--weights int8: there is no GPU kernel for them; give bfloat16 or float32")
    return Subject(random_llama(shape, layers, weights, positions, device), shape, weights)


def loaded_subject(model: str, weights: str | None = None, device: torch.device | str = "cpu") -> Subject:
    """Load a model with its own weights: "builtin", a folder, a GGUF file, or a hub id, as `skimkv.load` does.

    weights: as of `load`. The tokenizer of a GGUF file is not read. It generates to the last token that is asked for.
    Raises ValueError, in one line with the name, if it cannot be read, or if no method decodes it.
    """
    source = check_source(model)
    check_formats(model, None, weights)
    if source.kind == "gguf":
        from ..hf.gguf_model import load_gguf_model, read_contents

        path = Path(source.location)
        subject = Subject(load_gguf_model(path), model, read_contents(path).weights, path, is_loaded=True)
    else:
        network, _ = load(model, weights=weights, device=device, fast=weights is not None)
        subject = Subject(network, model, weights or str(network.dtype).removeprefix("torch."), is_loaded=True)
    model_layers(subject.model)
    subject.model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    return subject


def check_tokens(model: PreTrainedModel, n: int) -> None:
    """Warn if n tokens go past the model's positions. Raises ValueError if they are looked up in a table that ends."""
    positions_of(model).check_table(n, None)
    positions_of(model).check(n, n)


def check_fillable(subject: Subject) -> None:
    """Raises ValueError, in one line, if a cache of random tokens cannot stand for one of this model's.

    So it is for layers that keep states, or keys and values of different shapes, and for experts of an unknown number.
    """
    model = subject.model
    why = None
    try:
        expected = cache_shape(model)
        share_of_experts(model)
    except (AttributeError, RuntimeError):  # of settings that are missing, or differ between layers
        why = "its layers differ in their heads, or its experts are not counted in its configuration"
    else:
        cache: Any = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(input_ids=torch.tensor([[1, 2]], device=model.device), past_key_values=cache, use_cache=True)
        shapes = {tuple(keys.shape) for layer in cache.layers if (keys := getattr(layer, "keys", None)) is not None}
        if any(layer.has_states or not layer.attends for layer in model_layers(model)):
            why = "it has layers that keep states, or that look at no other token"
        elif shapes != {(1, expected.H, 2, expected.D)}:
            why = "its layers differ in their heads"
    if why is not None:
        raise ValueError(f"{subject.shape}: {why}; `skimkv bench generate` measures it with a prompt")


def layer_count(model: PreTrainedModel) -> int:
    """Return the number of a model's layers."""
    return int(model.config.get_text_config(decoder=True).num_hidden_layers)


def cache_shape(model: PreTrainedModel) -> Shape:
    """Return the shape of one layer's cache, for one sequence."""
    config: Any = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    H = getattr(config, "num_key_value_heads", None) or heads
    return Shape(1, H, heads // H, getattr(config, "head_dim", None) or config.hidden_size // heads)


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that one token reads: of a table of embeddings one row, of experts the chosen ones.

    The row is not counted. A table that is the output layer too is read whole.
    """
    return int(sum(tensor.nbytes * share for tensor, share in read_tensors(model)))


def step_bytes(model: PreTrainedModel, method: Method, n: int, observed: Sequence[Mapping[str, int]] = ()) -> int:
    """Return the bytes of caches that one step after n tokens reads and writes, in all layers.

    observed: what the stores of the layers that the method decodes tell of their step (`Store.observed`); without it
    the bytes that depend on the data are the most that are expected. A sliding layer that the method does not decode is
    dense attention over its window.
    """
    shape, total, of_stores = cache_shape(model), 0, iter(observed)
    for layer in model_layers(model, needed_max_tokens(model, n + 1)):
        if layer.supported:
            total += method.traffic(n, shape, model.dtype, **next(of_stores, {})).bytes
        elif layer.window is not None:
            total += Dense().traffic(min(n, layer.window - 1), shape, model.dtype).bytes
    return total


def random_cache(model: PreTrainedModel, method: Method | None, tokens: int, more: int) -> Any:
    """Return a cache of random tokens with room for `more`: the method's, or for None that of transformers."""
    shape, dtype = cache_shape(model), model.dtype
    longest = needed_max_tokens(model, tokens + more)
    cache: Any = DynamicCache(config=model.config) if method is None else Cache(model, method, longest)
    for i, layer in enumerate(cache.layers):
        base = random_store(shape, dtype, tokens, more, i, model.device)
        if isinstance(layer, Layer):
            assert method is not None
            layer.take_store(filled_store(method, base, more))
        else:
            layer.update(*keys_values(base))
    return cache


def allocated_bytes(cache: Any) -> int:
    """Return the bytes that a cache has allocated, ours or that of transformers."""
    if isinstance(cache, Cache):
        return cache.allocated
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    tensors += [state for layer in cache.layers for state in state_tensors(layer)]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def name_of(method: Method | None) -> str:
    """Return the method's spec, or `transformers`."""
    return "transformers" if method is None else repr(method)


class Decoder(NamedTuple):
    """One way to decode: by a method, or for None as transformers does, after `tokens` tokens."""

    method: Method | None
    tokens: int

    @property
    def name(self) -> str:
        """The name of the method."""
        return name_of(self.method)

    @property
    def label(self) -> str:
        """The name, and after how many tokens."""
        return f"{self.name} after {self.tokens}"

    def bound(self, model: PreTrainedModel) -> int:
        """Return an upper bound of the bytes that its cache takes in all layers."""
        shape, n, size = cache_shape(model), self.tokens, 0
        for layer in model_layers(model, needed_max_tokens(model, n)):
            method = self.method if layer.supported and self.method is not None else Dense()
            size += method.bound(
                n if layer.supported or layer.window is None else min(n, layer.window), shape, model.dtype
            )
        return size


class NextToken:
    """Take one decode step after the other with a cache, as generate() does for its tokens."""

    def __init__(self, model: PreTrainedModel, cache: Any) -> None:
        self._logits, self._device, self._cache = NextLogits(model), model.device, cache

    def __call__(self) -> None:
        """Take one step."""
        ids, places = torch.tensor([[[5]], [[self._cache.get_seq_length()]]], device=self._device)
        with torch.inference_mode():
            self._logits(ids, past_key_values=self._cache, position_ids=places, use_cache=True)
