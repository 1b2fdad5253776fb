"""Write a GGUF file of random weights, in the shape of a known model: python benchmarks/write_gguf.py FILE [options]

    python benchmarks/write_gguf.py slice.gguf --shape llama-2-7b --layers 8 --type Q8_0
    python benchmarks/write_gguf.py slice-4.gguf --shape llama-3-8b --layers 8 --type Q4_K_M

skimkv and llama.cpp load it, so that `skimkv bench token --model FILE --against llama.cpp=PATH` can time both without
anybody's weights: how fast a token is does not depend on what they are. Q4_K_M is the mixture that llama.cpp makes:
Q4_K, and Q6_K for the output layer and, in about half of the layers, for values and the last feed-forward matrix. A
matrix whose rows are no whole blocks of 256 becomes Q8_0. The answers of such a model are nonsense.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers.convert_slow_tokenizer import bytes_to_unicode

from skimkv.bench.shapes import MODELS, ModelSizes

TYPES = ("Q8_0", "Q4_K_M")
Kind = gguf.GGMLQuantizationType
STEP = 4096  # rows that are drawn at once


def gets_more_bits(layer: int, layers: int) -> bool:
    """Whether the mixture has Q6_K in this layer: in the first eighth, the last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def matrices(sizes: ModelSizes, layers: int, type: str) -> Iterator[tuple[str, int, int, Kind]]:
    """The name, the rows, the columns and the type of every matrix."""
    width, inner, D = sizes.hidden, sizes.intermediate, sizes.head_dim
    q, kv = sizes.heads * D, sizes.kv_heads * D
    shapes = {
        "attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, q),
        "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip

    def kind(columns: int, more_bits: bool) -> Kind:
        if type == "Q8_0" or columns % 256:
            return Kind.Q8_0
        return Kind.Q6_K if more_bits else Kind.Q4_K

    yield "token_embd", sizes.vocabulary, width, kind(width, False)
    for i in range(layers):
        for name, (rows, columns) in shapes.items():
            more = name in ("attn_v", "ffn_down") and gets_more_bits(i, layers)
            yield f"blk.{i}.{name}", rows, columns, kind(columns, more)
    yield "output", sizes.vocabulary, width, kind(width, True)


def random_rows(kind: Kind, rows: int, columns: int, draw: np.random.Generator) -> NDArray[np.uint8]:
    """Rows of blocks of random codes, whose scales make weights of about 0.02: (rows,row_bytes)."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    # the first byte of each scale in float16: of a Q4_K block the second one is that of the offsets
    places, scale = {Kind.Q8_0: ([0], 3e-4), Kind.Q4_K: ([0, 2], 5e-5), Kind.Q6_K: ([208], 2e-5)}[kind]
    for place in places:
        numbers = draw.uniform(0.5, 1.5, blocks.shape[:2]) * scale
        blocks[:, :, place : place + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path: Path, shape: str, layers: int, type: str, context: int = 1 << 17) -> None:
    """Write the file. layers: 0 for all of the model's. context: the tokens that the file says it was made for."""
    sizes, draw = MODELS[shape], np.random.default_rng(0)
    layers = layers or sizes.layers
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(f"{shape}, {layers} layers of random weights")
    w.add_context_length(context)
    w.add_embedding_length(sizes.hidden)
    w.add_block_count(layers)
    w.add_feed_forward_length(sizes.intermediate)
    w.add_head_count(sizes.heads)
    w.add_head_count_kv(sizes.kv_heads)
    w.add_key_length(sizes.head_dim)
    w.add_value_length(sizes.head_dim)
    w.add_rope_dimension_count(sizes.head_dim)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("default")
    tokens = ["<s>", "</s>", *bytes_to_unicode().values()]  # llama.cpp of 2024 loads no vocabulary without all bytes
    w.add_token_list(tokens + [f"token{i}" for i in range(len(tokens), sizes.vocabulary)])
    w.add_token_types([3, 3] + [1] * (sizes.vocabulary - 2))
    w.add_token_merges(["t o"])
    w.add_bos_token_id(0)
    w.add_eos_token_id(1)
    vectors = [f"blk.{i}.{name}" for i in range(layers) for name in ("attn_norm", "ffn_norm")]
    for name in (*vectors, "output_norm"):
        w.add_tensor_info(f"{name}.weight", [sizes.hidden], np.dtype(np.float32), 4 * sizes.hidden)
    planned = list(matrices(sizes, layers, type))
    for name, rows, columns, kind in planned:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        row_bytes = columns // block * size
        w.add_tensor_info(f"{name}.weight", [rows, row_bytes], np.dtype(np.uint8), rows * row_bytes, kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for _ in (*vectors, "output_norm"):
        w.write_tensor_data(np.ones(sizes.hidden, dtype=np.float32))
    for _, rows, columns, kind in planned:
        parts = [random_rows(kind, min(STEP, rows - i), columns, draw) for i in range(0, rows, STEP)]
        w.write_tensor_data(np.concatenate(parts))
    w.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the file to write")
    parser.add_argument("--shape", choices=MODELS, default="llama-2-7b", help="the model whose shape is taken")
    parser.add_argument("--layers", type=int, default=8, help="number of the model's layers; 0 writes all")
    parser.add_argument("--type", choices=TYPES, default="Q8_0", help="the types of the matrices")
    options = parser.parse_args(arguments)
    write(options.file, options.shape, options.layers, options.type)
    print(f"{options.file}: {options.file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
