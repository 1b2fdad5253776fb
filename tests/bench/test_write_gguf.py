"""benchmarks/write_gguf.py: files of random weights that skimkv loads."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import pytest
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from skimkv.bench.shapes import MODELS
from skimkv.hf.gguf_model import load_gguf_model, read_contents

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "write_gguf.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("benchmarks_write_gguf", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_mixture_loads_and_gives_finite_logits(script, tmp_path: Path, capsys):
    path = tmp_path / "tiny.gguf"
    script.main([str(path), "--shape", "tiny", "--layers", "3", "--type", "Q4_K_M"])
    assert capsys.readouterr().out == f"{path}: {path.stat().st_size:,} bytes\n"
    contents, sizes = read_contents(path), MODELS["tiny"]
    assert contents.config.num_hidden_layers == 3
    assert contents.weights == "Q4_K, Q6_K, Q8_0"
    # of 640 columns: no whole blocks of 256
    assert contents.matrices["Q8_0"] == 3 * sizes.hidden * sizes.intermediate
    values = sizes.kv_heads * sizes.head_dim * sizes.hidden
    assert contents.matrices["Q6_K"] == sizes.vocabulary * sizes.hidden + values, "in layer 2 of 3"
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"]
    tokens = [bytes(field.parts[i]).decode() for i in field.data]
    assert len(set(tokens)) == sizes.vocabulary and set(bytes_to_unicode().values()) <= set(tokens)
    model = load_gguf_model(path)
    logits = model(torch.tensor([[5, 7, 9]])).logits
    assert logits.isfinite().all() and 0.1 < logits.float().std() < 100


def test_layers_with_more_bits_are_those_of_llama_cpp(script):
    """Of 32 layers: the first 4, the last 4, and every third of the 24 between."""
    more = [i for i in range(32) if script.gets_more_bits(i, 32)]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
