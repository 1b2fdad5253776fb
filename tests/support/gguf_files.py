"""GGUF files of small models for the tests, written with llama.cpp's own package and its order of rows."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

Kind = gguf.GGMLQuantizationType
# Where the float16 scales of a block are.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "IQ4_NL": [0], "MXFP4": [],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_XS": [0],
    "IQ2_XXS": [0], "IQ3_S": [0], "TQ2_0": [64],
}  # fmt: skip
VOCABULARY = ["<s>", "</s>", *bytes_to_unicode().values(), "th", "the"]


def of_family(family: str, tied: bool = False):
    """A model of llama, mistral, qwen2 or qwen3 whose rows are whole blocks of 256 weights."""
    config = AutoConfig.for_model(
        family, vocab_size=len(VOCABULARY) + 3, hidden_size=256, intermediate_size=512, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, num_hidden_layers=2, max_position_embeddings=512, tie_word_embeddings=tied,
        bos_token_id=0, eos_token_id=1, initializer_range=0.2, sliding_window=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).float().eval()


def tiny(tied: bool = False, **more) -> LlamaForCausalLM:
    """Grouped queries, three blocks a row, and a vocabulary that fills no panel."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(VOCABULARY) + 3, head_dim=16, num_hidden_layers=2, max_position_embeddings=512,
        tie_word_embeddings=tied, bos_token_id=0, eos_token_id=1, initializer_range=0.2, **(sizes | more),
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def header(path: Path, config: LlamaConfig, architecture: str = "llama") -> gguf.GGUFWriter:
    """A writer that has the metadata and the tokenizer."""
    w = gguf.GGUFWriter(path, architecture)
    w.add_context_length(config.max_position_embeddings)
    w.add_embedding_length(config.hidden_size)
    w.add_block_count(config.num_hidden_layers)
    w.add_feed_forward_length(config.intermediate_size)
    w.add_head_count(config.num_attention_heads)
    w.add_head_count_kv(config.num_key_value_heads)
    w.add_key_length(config.head_dim)
    w.add_value_length(config.head_dim)
    w.add_rope_dimension_count(config.head_dim)
    w.add_rope_freq_base(config.rope_parameters["rope_theta"])
    w.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_tokenizer(w, config.vocab_size)
    return w


def add_tokenizer(w: gguf.GGUFWriter, tokens: int, pre: str = "default") -> None:
    """Add byte pairs with two merges, and padding up to this number of tokens."""
    padding = [f"[PAD{i}]" for i in range(len(VOCABULARY), tokens)]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list(VOCABULARY + padding)
    w.add_token_types([3, 3] + [1] * (len(VOCABULARY) - 2) + [5] * len(padding))
    w.add_token_merges(["t h", "th e"])
    w.add_bos_token_id(0)
    w.add_eos_token_id(1)


def finish(w: gguf.GGUFWriter) -> None:
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def order_of_heads(rows: int, heads: int) -> Tensor:
    """As llama.cpp's converter: of each head, row i and row i + D/2 become rows 2i and 2i + 1."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()


def add(w: gguf.GGUFWriter, name: str, value: Tensor, kind: Kind) -> Tensor:
    """Write a matrix of whole blocks as this kind, another tensor as F32; returns what it stands for, in float32.

    Blocks of a kind that nothing here can make are random.
    """
    array = np.ascontiguousarray(value.detach().float().numpy())
    if array.ndim < 2 or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Kind.F32
    try:
        raw = gguf.quants.quantize(array, kind)
    except NotImplementedError:
        raw = random_blocks(kind.name, *array.shape, seed=len(w.tensors[0]) + 1).numpy()
    w.add_tensor(name, raw, raw_dtype=kind)
    return torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind)))


def write(path: Path, model: LlamaForCausalLM, kinds: dict[str, Kind] | None = None, edit=None) -> LlamaForCausalLM:
    """The model as a file: matrices as Q8_0 unless `kinds` says otherwise. Returns the model that the file stands for,
    in float32. edit(writer) may add more."""
    config, kinds = model.config, kinds or {}
    w = header(path, config, config.model_type)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == config.model_type.replace("mistral", "llama"))
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    for full, parameter in model.named_parameters():
        name, _, suffix = full.rpartition(".")
        short = names.get_name(name)
        part, kind = short.rpartition(".")[2], kinds.get(short, Kind.Q8_0)
        order = torch.arange(len(parameter))
        if part in heads and config.model_type in ("llama", "mistral"):
            order = order_of_heads(len(parameter), heads[part])
        parameter.data = add(w, f"{short}.{suffix}", parameter[order], kind)[order.argsort()]
    if edit:
        edit(w)
    finish(w)
    return model


def random_file(path: Path, config: LlamaConfig) -> None:
    """A large file of random weights, without a model in memory."""
    w = header(path, config)
    draw = np.random.default_rng(0)
    D, width, inner = config.head_dim, config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    shapes = {"attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, q)}
    shapes |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    matrices = {f"blk.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in shapes.items()}
    matrices |= {"token_embd": (config.vocab_size, width), "output": (config.vocab_size, width)}
    for name, (rows, columns) in matrices.items():
        raw = draw.integers(0, 256, (rows, columns // 32, 34), dtype=np.uint8)
        raw[..., :2] = np.float16(0.02 / 73).reshape(1).view(np.uint8)
        w.add_tensor(f"{name}.weight", raw.reshape(rows, -1), raw_dtype=Kind.Q8_0)
    norms = [f"blk.{i}.{n}" for i in range(config.num_hidden_layers) for n in ("attn_norm", "ffn_norm")]
    for name in (*norms, "output_norm"):
        w.add_tensor(f"{name}.weight", np.ones(width, dtype=np.float32))
    finish(w)


def random_blocks(type: str, out: int, inputs: int, seed: int = 0) -> Tensor:
    """Rows of blocks of random bits with scales of about 0.01: (out,row_bytes) uint8."""
    draw, (weights, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[Kind[type]]
    rows = draw.integers(0, 256, (out, inputs // weights, size), dtype=np.uint8)
    for at in SCALES[type]:
        scale = draw.uniform(0.2, 1, (out, inputs // weights, 1)) * (0.01 if weights == 32 else 3e-4)
        rows[:, :, at : at + 2] = scale.astype(np.float16).view(np.uint8)
    if type == "MXFP4":  # its scale is the exponent of a float
        rows[:, :, 0] = draw.integers(118, 122, rows.shape[:2])
    return torch.from_numpy(rows.reshape(out, -1))


def logits(model, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits.float()


def close(a: Tensor, b: Tensor, within: float = 2e-3) -> bool:
    """Differences are small beside the spread of the logits."""
    return bool((a - b).abs().max() <= within * b.std())


def near(a: Tensor, b: Tensor) -> bool:
    """Not the same weights, or not the same precision, but the same model."""
    return bool((a - b).std() <= 0.08 * b.std())
