"""8-bit models end to end: checkpoints quantised while they load, the command line, and what stays resident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from skimkv.hf.load import BUILTIN, load
from skimkv.hf.matrix_modules import MatrixEmbedding, MatrixLinear, MatrixModule
from skimkv.hf.weights import FORMATS, quantise, quantise_while_loading, random_linear
from skimkv.ops import matrices, packed_weights
from support import gguf_files
from support.gguf_files import close, logits, near, tiny
from support.tiny_models import build

IDS = torch.arange(2, 42)[None] * 7 % 257
GREEDY = {"max_new_tokens": 16, "do_sample": False}


def _gemma() -> torch.nn.Module:
    return build("gemma", vocab_size=300, num_key_value_heads=1, head_dim=16, tie_word_embeddings=True)


MAKE = {
    "llama": tiny,
    "tied": lambda: tiny(True, attention_bias=True),
    "gpt2": lambda: build("gpt2", vocab_size=300),
    "gemma": _gemma,
}


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", MAKE)
def test_a_model_with_matrices_of_a_format(tmp_path, backend, name, format):
    """Made while it is loaded, or afterwards: its tokens are those of the library's modules with these matrices."""
    model = MAKE[name]().eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", **quantise_while_loading(format))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert format == "int4" or near(logits(loaded, IDS), logits(reference, IDS))
    parts = {name: part for name, part in loaded.named_modules() if isinstance(part, MatrixModule)}
    assert any(isinstance(part, MatrixLinear) for part in parts.values())
    for name, part in parts.items():
        assert part.kind == FORMATS[format].kind and part.dtype == torch.float32
        rows = matrices.dequantise(part.weight, part.kind, torch.arange(part.shape[0])).float()
        reference.get_submodule(name).weight.data = rows.T if getattr(part, "transposed", False) else rows
    assert close(logits(loaded, IDS), logits(reference, IDS))
    assert torch.equal(loaded.generate(IDS, **GREEDY), reference.generate(IDS, **GREEDY))
    with pytest.raises(ValueError, match="not serializable"):
        loaded.save_pretrained(tmp_path / "again")
    live = quantise(model, format)
    assert torch.equal(logits(live, IDS), logits(loaded, IDS))
    assert sum(p.nbytes for p in live.parameters()) == sum(p.nbytes for p in loaded.parameters())


def test_what_is_replaced():
    model = quantise(tiny())
    assert type(model.model.embed_tokens) is torch.nn.Embedding  # read row by row
    assert sum(isinstance(m, MatrixLinear) for m in model.modules()) == 2 * 7 + 1
    model = quantise(_gemma())  # its embedding scales: a tied head stays with it
    assert type(model.lm_head) is torch.nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight
    odd = quantise(tiny(intermediate_size=100))  # 100 inputs are no blocks
    assert type(odd.model.layers[0].mlp.down_proj) is torch.nn.Linear
    with pytest.raises(ValueError, match="no linear layer with inputs in blocks of 32"):
        quantise(tiny(hidden_size=48, intermediate_size=40, num_attention_heads=3, num_key_value_heads=1, tied=True))


def test_modules():
    packed = torch.zeros(packed_weights.packed_shape(10, 64), dtype=torch.int16)
    table, head = MatrixEmbedding(packed, "packed", 10, 64), random_linear(64, 40, torch.Generator(), torch.float32)
    for bad in (-1, 10):
        with pytest.raises(IndexError, match="from 0 to 9"):
            table(torch.tensor([[0, bad]]))
    assert head(torch.randn(2, 3, 64)).shape == (2, 3, 40) and head(torch.randn(4, 64)).std() > 0.3
    assert repr(head) == "MatrixLinear(64, 40, packed)"
    for layer in (head, MatrixLinear(torch.randn(40, 64).bfloat16(), "floats", 40, 64)):
        with pytest.raises(ValueError, match="no gradient"):
            layer(torch.randn(1, 64, requires_grad=True))
    with pytest.raises(ValueError, match=r"needs torch\.int16"):
        MatrixLinear(torch.zeros(3, 2, 17, 8, dtype=torch.int16), "packed", 40, 64)


# --- the command line and load()


def test_a_checkpoint_of_other_sizes_is_named(tmp_path):
    tiny().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 192}
    (tmp_path / "config.json").write_text(json.dumps(config))
    AutoTokenizer.from_pretrained(BUILTIN).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"by config.json it should be \((96, 192|192, 96)\)"):
        load(tmp_path, weights="int8")


# --- memory

MEASURE = """
import sys
from pathlib import Path
import torch
from skimkv.hf.weights import quantise_while_loading
from skimkv.hf.gguf_model import load_gguf
import skimkv
from support import gguf_files
from transformers import AutoModelForCausalLM

def kib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key + ":"))

with torch.inference_mode():  # what any model costs: libraries, threads, their buffers
    gguf_files.tiny().generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=2)
before = kib("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts again here
path = sys.argv[1]
if path.endswith(".gguf"):
    model, _ = load_gguf(path)
else:
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", **quantise_while_loading("int8"))
cache = skimkv.Cache(model, "SparQ(r=16, k=32, channels='int8')")
with torch.inference_mode():
    model.generate(torch.arange(2, 130)[None], past_key_values=cache, max_new_tokens=4, do_sample=False)
print(kib("VmHWM") - before, sum(p.nbytes for p in model.parameters()) // 1024, cache.allocated // 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("source", ["gguf", "safetensors"])
def test_resident_memory(tmp_path, source):
    """The peak, from nothing to generated tokens, is within 1.1 x (weights + cache); a full-precision copy is not."""
    layers = 14 if source == "gguf" else 7
    config = LlamaConfig(
        vocab_size=8000, hidden_size=1536, intermediate_size=4096, head_dim=128, num_hidden_layers=layers,
        num_attention_heads=12, num_key_value_heads=12, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    path = tmp_path / "m.gguf"
    if source == "gguf":
        gguf_files.random_file(path, config)
        size = path.stat().st_size // 1024
    else:
        path = tmp_path
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.to_empty(device="cpu")
        for p in model.parameters():
            p.data = torch.full_like(p, 0.01)
        model.save_pretrained(path, max_shard_size="100MB")
        del model
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    peak, weights, cache = map(int, run.stdout.split()[-3:])
    if source == "gguf":
        assert weights <= size * 1.001
    assert weights > 200_000
    assert peak <= 1.1 * (weights + cache), (peak, weights, cache)
