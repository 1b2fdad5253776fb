"""Models and machines by name: what they read, from sizes and from a config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skimkv.bench.shapes import HARDWARE, MODELS, reads_of_folder, reads_of_gguf, reads_of_sizes
from support import gguf_architectures
from support.refusals import refuses
from support.tiny_models import family


@pytest.mark.parametrize(("name", "parameters"), [("llama-2-7b", 6738415616), ("llama-3-8b", 8030261248)])
def test_parameters_of_known_models(name, parameters):
    """All that a step reads is all but the table of embeddings."""
    sizes = MODELS[name]
    assert reads_of_sizes(name, sizes).weights == parameters - sizes.vocabulary * sizes.hidden


def test_a_model_whose_head_is_its_table_of_embeddings():
    """SmolLM 135M has 134,515,008 parameters, and a step reads all of them."""
    reads = reads_of_sizes("smollm-135m", MODELS["smollm-135m"])
    assert reads.weights == 134515008
    assert (reads.layers, reads.H, reads.G, reads.D) == (30, 3, 3, 64)


def test_the_head_size_is_given_or_follows():
    assert reads_of_sizes("a", (64, 64, 4, 2, 2, 9)).D == 16
    assert reads_of_sizes("a", (64, 64, 4, 2, 2, 9, 32)).D == 32


@pytest.mark.parametrize(("name", "size", "ridge"), [("ipu", 2, 32), ("a10", 1, 210), ("h100", 1, 295)])
def test_the_machines_of_appendix_c(name, size, ridge):
    assert HARDWARE[name].ridge(size) == pytest.approx(ridge, rel=0.01)


def test_weights_are_counted_from_a_config(tmp_path: Path):
    for name in ("llama", "gemma3"):
        model: Any = family(name)
        model.config.save_pretrained(tmp_path)
        reads = reads_of_folder(tmp_path)
        every = sum(p.numel() for p in model.parameters())
        assert reads.weights == every - model.get_input_embeddings().weight.numel()
        assert (reads.layers, reads.H, reads.G, reads.D) == (2, 2, 2, 16)
    assert (reads.sliding, reads.window) == (1, 8)


def test_a_mixture_of_experts_and_a_folder_without_a_model_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no config\.json"):
        reads_of_folder(tmp_path)
    model: Any = family("llama")
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_local_experts": 8}))
    with pytest.raises(ValueError, match="mixture of experts"):
        reads_of_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json describes no causal model"):
        reads_of_folder(tmp_path)


@pytest.mark.parametrize(("architecture", "sliding", "window"), [("llama", 0, 0), ("gemma2", 2, 8), ("gemma3", 5, 8)])
def test_a_gguf_file_has_the_layers_of_a_folder(tmp_path: Path, architecture: str, sliding: int, window: int):
    model = gguf_architectures.write(tmp_path / "m.gguf", architecture)
    model.config.save_pretrained(tmp_path)
    of_file, of_folder = reads_of_gguf(tmp_path / "m.gguf")[0], reads_of_folder(tmp_path)
    assert (of_file.sliding, of_file.window) == (sliding, window)
    assert of_file[2:-1] == of_folder[2:-1]


def test_a_gguf_file_whose_configuration_has_no_number_of_kv_heads(tmp_path: Path):
    gguf_architectures.write(tmp_path / "m.gguf", "gpt2")
    reads, _ = reads_of_gguf(tmp_path / "m.gguf")
    assert (reads.layers, reads.H, reads.G, reads.D) == (2, 4, 1, 16)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("qwen35", "it has layers of linear attention or a state space"),
        ("lfm2", "it has layers of linear attention or a state space"),
        ("qwen3moe", "a mixture of experts"),
        ("gpt-oss", "a mixture of experts"),
    ],
)
def test_what_is_refused_of_a_folder_is_refused_of_a_gguf_file(tmp_path: Path, architecture: str, reason: str):
    if architecture not in gguf_architectures.ARCHITECTURES:
        pytest.skip("this version of transformers does not read the architecture")
    gguf_architectures.write(tmp_path / "m.gguf", architecture).config.save_pretrained(tmp_path)
    refuses(lambda: reads_of_folder(tmp_path), f"^{tmp_path}: {reason}")
    refuses(lambda: reads_of_gguf(tmp_path / "m.gguf"), f"^{tmp_path}/m.gguf: {reason}")
