"""The models and machines that benchmarks know by name: sizes, bandwidths and arithmetic peaks.

Neither torch nor transformers is imported with this module, so that an unknown name is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from ..hf.gguf_model import Contents


class ModelSizes(NamedTuple):
    """The sizes of a model with Llama's architecture: gated feed-forward layers and grouped query heads."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocabulary: int
    head_dim: int


MODELS = {
    "llama-2-7b": ModelSizes(4096, 11008, 32, 32, 32, 32000, 128),
    "llama-2-13b": ModelSizes(5120, 13824, 40, 40, 40, 32000, 128),
    "llama-2-70b": ModelSizes(8192, 28672, 64, 8, 80, 32000, 128),
    "llama-3-8b": ModelSizes(4096, 14336, 32, 8, 32, 128256, 128),
    "llama-3-70b": ModelSizes(8192, 28672, 64, 8, 80, 128256, 128),
    "mistral-7b": ModelSizes(4096, 14336, 32, 8, 32, 32000, 128),
    "qwen3-4b": ModelSizes(2560, 9728, 32, 8, 36, 151936, 128),
    "llama-134m": ModelSizes(768, 2048, 12, 12, 12, 32000, 64),
    "smollm-135m": ModelSizes(576, 1536, 9, 3, 30, 49152, 64),
    "tiny": ModelSizes(256, 640, 4, 2, 4, 2048, 64),
}
TIED = {"qwen3-4b", "smollm-135m"}  # of MODELS, those whose output layer is their table of embeddings
FIELDS = "hidden,intermediate,heads,kv_heads,layers,vocabulary"
RANDOM_WEIGHTS = ("int8", "bfloat16", "float32")  # formats in which `bench token` makes weights


def check_model(name: str, weights: str) -> ModelSizes:
    """Return the sizes of a model that `bench token` can make. Raises ValueError if it or its weights are unknown."""
    if name not in MODELS:
        raise ValueError(f"unknown shape {name!r}; known: {', '.join(MODELS)}")
    if weights not in RANDOM_WEIGHTS:
        raise ValueError(f"unknown weights {weights!r}; known: {', '.join(RANDOM_WEIGHTS)}")
    return MODELS[name]


class ModelReads(NamedTuple):
    """What a decode step of a model reads: `weights` elements, and in every layer the cache of H KV heads.

    G query heads share a KV head; D is the head size. `sliding` of the layers see only the last `window` tokens, the
    current one included, whatever the method. weight_bytes: of the weights as a file holds them; None where only their
    number is known. held_weights and held_weight_bytes: of all weights in memory, also of those that a step does not
    read, such as tables of embeddings; None where it reads all.
    """

    name: str
    weights: int
    layers: int
    H: int
    G: int
    D: int
    sliding: int = 0
    window: int = 0
    weight_bytes: int | None = None
    held_weights: int | None = None
    held_weight_bytes: int | None = None


def reads_of_sizes(name: str, sizes: Sequence[int]) -> ModelReads:
    """What a model of these sizes reads: FIELDS, and perhaps the head size; of the embedding table only one row.

    The table is held beside the output layer, unless the name is one of TIED.
    Raises ValueError if the sizes fit no model.
    """
    if len(sizes) not in (6, 7) or min(sizes) < 1:
        raise ValueError(f"the sizes must be {FIELDS}[,head_dim], each at least 1")
    hidden, intermediate, heads, kv_heads, layers, vocabulary, *given = sizes
    if heads % kv_heads:
        raise ValueError(f"heads = {heads} must be a multiple of kv_heads = {kv_heads}")
    if not given and hidden % heads:
        raise ValueError(f"hidden = {hidden} is no multiple of heads = {heads}: give head_dim as well")
    D = given[0] if given else hidden // heads
    layer = 2 * hidden * D * (heads + kv_heads) + 3 * hidden * intermediate + 2 * hidden
    weights = layers * layer + hidden + vocabulary * hidden
    held = weights if name in TIED else weights + vocabulary * hidden
    return ModelReads(name, weights, layers, kv_heads, heads // kv_heads, D, held_weights=held)


def reads_of_gguf(path: Path) -> tuple[ModelReads, str]:
    """What the model of a GGUF file reads, and the types of its weights.

    Raises ValueError if the file cannot be read, and for the models that `reads_of_folder` refuses.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from ..hf.errors import as_value_error

    with as_value_error(str(path)):
        contents, held = contents_of_gguf(path)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(contents.config)  # type: ignore[no-untyped-call]
    reads = _reads_of_model(path, model, contents.elements, held)
    return reads._replace(weight_bytes=contents.nbytes, held_weight_bytes=contents.held_bytes), contents.weights


def contents_of_gguf(path: str | Path) -> tuple[Contents, int]:
    """What a GGUF file holds, and the number of all its weights.

    A table of learned positions counts as nothing that a step reads, because it reads one row of it.
    """
    from ..hf.gguf import GGUFFile
    from ..hf.gguf_model import read_contents

    contents = read_contents(path)
    with GGUFFile(Path(path)) as file:
        entries = file.tensors
        held = sum(math.prod(entry.shape) for entry in entries.values())
    if (table := entries.get("position_embd.weight")) is not None:
        elements, nbytes = contents.elements - math.prod(table.shape), contents.nbytes - table.nbytes
        contents = contents._replace(elements=elements, nbytes=nbytes)
    return contents, held


def reads_of_folder(path: Path) -> ModelReads:
    """What the model of a folder's config.json reads: it is built without memory for its weights, which are counted.

    Raises ValueError if there is no config.json, if the model is not supported, if it reads only some of its weights
    for a token, or if its layers keep states or differ in their heads.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"{path}: no config.json")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ..hf.load import check_counts

    check_counts(path)
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: config.json describes no causal model: {str(error).splitlines()[0]}") from None
    if has_experts(model):
        raise ValueError(f"{path}: {_EXPERTS_REFUSED}")
    held = sum(parameter.numel() for parameter in model.parameters())
    return _reads_of_model(path, model, elements_read(model), held)


_EXPERTS_REFUSED = "a mixture of experts, which reads only some of its weights per token"


def _reads_of_model(path: Path, model: Any, weights: int, held: int) -> ModelReads:
    """What a model without memory reads of its cache, beside this number of weights of those that are held.

    Raises ValueError, with the path, for a mixture of experts, and for layers that keep states or differ in heads.
    """
    from ..hf.supported import model_layers

    if has_experts(model):
        raise ValueError(f"{path}: {_EXPERTS_REFUSED}")
    layers = model_layers(model)
    if any(layer.has_states for layer in layers):
        raise ValueError(
            f"{path}: it has layers of linear attention or a state space, whose bytes are not computed here"
        )
    windows = [layer.window or 0 for layer in layers if not layer.supported]
    heads = set(heads_of_layers(model))
    if len(heads) > 1:
        raise ValueError(f"{path}: its layers differ in their heads, whose bytes are not computed here")
    sizes = (str(path), weights, len(layers), *heads.pop(), len(windows), max(windows, default=0))
    return ModelReads(*sizes, held_weights=held)


def heads_of_layers(model: Any) -> list[tuple[int, int, int]]:
    """Return the number of KV heads, of query heads that share one, and the head size of each layer of a model."""
    text = model.config.get_text_config(decoder=True)
    try:
        return [_heads(text)] * text.num_hidden_layers
    except RuntimeError:  # what transformers raises where layers differ
        return [_heads(layer) for layer in text.per_layer_config]


def _heads(config: Any) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    H = getattr(config, "num_key_value_heads", None) or heads
    return H, heads // H, getattr(config, "head_dim", None) or config.hidden_size // heads


# What configurations call the number of a layer's experts, and how many of them a token chooses.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")


def has_experts(model: Any) -> bool:
    """Whether some layer of a model is a mixture of experts."""
    return any(".experts." in name for name, _ in model.named_parameters())


def share_of_experts(model: Any) -> float:
    """The share of its experts that a model chooses for a token, the mean of its layers; 1 if it has none.

    Experts that every token passes are not among them. Raises AttributeError if the configuration does not say how many
    experts there are, or how many are chosen.
    """
    if not has_experts(model):
        return 1.0
    text = model.config.get_text_config(decoder=True)
    config = getattr(text, "ffn_config", None) or text
    numbers = []
    for names in (EXPERTS, CHOSEN):
        number = next((number for name in names if (number := getattr(config, name, None))), None)
        if number is None:
            raise AttributeError(f"{type(config).__name__} has none of {', '.join(names)}")
        of_layers = [number] if isinstance(number, int) else list(number)[: text.num_hidden_layers]
        numbers.append(sum(of_layers) / len(of_layers))
    total, chosen = numbers
    return float(min(chosen / total, 1))


def lookup_tables(model: Any) -> list[Tensor]:
    """The tables of which a token reads one row: those of embeddings, also of positions, but for the output layer's."""
    import torch

    from ..hf.matrix_modules import MatrixEmbedding

    head = getattr(model.get_output_embeddings(), "weight", None)
    tables = [part.weight for part in model.modules() if isinstance(part, torch.nn.Embedding | MatrixEmbedding)]
    return list({id(table): table for table in tables if table is not head}.values())


def read_tensors(model: Any) -> Iterator[tuple[Tensor, float]]:
    """The parameters and buffers that a decode step of one token reads, each once, with the share that it reads.

    Of experts these are the chosen ones. A table of embeddings is left out, because a step reads one row of it, unless
    it is the output layer too; so are the parts of a model that take pictures or sounds.
    Raises AttributeError as `share_of_experts` does.
    """
    from transformers import PreTrainedModel

    from ..hf.supported import decoder_of

    decoder, head = decoder_of(model), model.get_output_embeddings()
    parts = [model] if decoder is model.base_model else [decoder, head]
    done = {id(table) for table in lookup_tables(model)}  # or left out
    for child in decoder.children():
        models = (part for part in child.modules() if isinstance(part, PreTrainedModel))
        if any(part.main_input_name != "input_ids" for part in models):
            done |= {id(tensor) for tensor in (*child.parameters(), *child.buffers())}
    share = share_of_experts(model)
    for part in parts:
        for name, tensor in (*part.named_parameters(), *part.named_buffers()):
            if id(tensor) not in done:
                done.add(id(tensor))
                yield tensor, share if ".experts." in name else 1.0


def elements_read(model: Any) -> int:
    """How many weights a decode step of one token reads, by `read_tensors`, whose buffers are no weights."""
    from torch.nn import Parameter

    return round(sum(t.numel() * share for t, share in read_tensors(model) if isinstance(t, Parameter)))


# Of a weight in each format; those of codes have blocks of 32 and a scale.
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 34 / 32, "int4": 18 / 32}


class Hardware(NamedTuple):
    """A machine's peaks, as its maker prints them for dense arithmetic.

    bandwidth: bytes per second. peak: multiply-adds per second, by the bytes of a number. memory: bytes, or None.
    """

    name: str
    bandwidth: float
    peak: dict[int, float]
    memory: float | None
    source: str

    def ridge(self, size: int) -> float:
        """Return r_A / r_M: multiply-adds per element transferred below which memory is the limit (appendix C)."""
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
