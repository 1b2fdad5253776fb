"""Models and machines by name: what they read, from sizes and from a config.json, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skimkv.bench import shapes
from skimkv.bench.shapes import HARDWARE, MODELS, elements_read, reads_of_folder, reads_of_gguf, reads_of_sizes
from support import gguf_architectures
from support.random_models import random_model, tiny_configuration
from support.refusals import refuses
from support.tiny_models import VOCAB, family, with_slow


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
    for name in ("mixtral", "dbrx", "aria_text", "ernie4_5_moe"):
        tiny_configuration(name).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="mixture of experts"):
            reads_of_folder(tmp_path)
    config: Any = tiny_configuration("qwen3_moe", mlp_only_layers=[0, 1])  # whose layers have no experts
    config.save_pretrained(tmp_path)
    assert reads_of_folder(tmp_path).layers == config.num_hidden_layers == 2
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json describes no causal model"):
        reads_of_folder(tmp_path)


@pytest.mark.parametrize(("architecture", "sliding", "window"), [("llama", 0, 0), ("gemma2", 2, 8), ("gemma3", 5, 8)])
def test_a_gguf_file_has_the_layers_of_a_folder(tmp_path: Path, architecture: str, sliding: int, window: int):
    model = gguf_architectures.write(tmp_path / "m.gguf", architecture)
    model.config.save_pretrained(tmp_path)
    of_file, of_folder = reads_of_gguf(tmp_path / "m.gguf")[0], reads_of_folder(tmp_path)
    assert (of_file.sliding, of_file.window) == (sliding, window)
    as_folder = of_file._replace(name=of_folder.name, weight_bytes=None, held_weight_bytes=None)
    assert as_folder == of_folder


def test_a_gguf_file_has_a_table_of_positions_of_which_a_step_reads_one_row(tmp_path: Path):
    gguf_architectures.write(tmp_path / "m.gguf", "gpt2")
    reads, _ = reads_of_gguf(tmp_path / "m.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    tables = {"position_embd.weight"} | ({"token_embd.weight"} if "output.weight" in tensors else set())
    read = [tensor for name, tensor in tensors.items() if name not in tables]
    assert reads.weights == sum(int(tensor.n_elements) for tensor in read)
    assert reads.weight_bytes == sum(int(tensor.n_bytes) for tensor in read)
    assert reads.held_weight_bytes == sum(int(tensor.n_bytes) for tensor in tensors.values())


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


class WeightsRead(TorchDispatchMode):
    """Notes which elements of a model's parameters operators take, but for the rows that are looked up in tables."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._elements = {
            p.untyped_storage().data_ptr(): torch.zeros(p.numel(), dtype=bool) for p in model.parameters()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [[leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)] for tree in (args, result)]
        taken, given = [{t.untyped_storage().data_ptr(): t for t in some} for some in tensors]
        for place, tensor in taken.items():
            if place in self._elements and place not in given and "embedding" not in str(func):  # no view
                self._elements[place][tensor.storage_offset() :][: tensor.numel()] = True
        return result

    def count(self) -> int:
        """Return the number of elements."""
        return sum(int(elements.sum()) for elements in self._elements.values())


EXPERTS = ["mixtral", "dbrx", "aria_text", "hunyuan_v1_moe", "cohere2_moe", "qwen2_moe", "gpt_oss", "gemma4_text"]
OTHERS = ["llama", "gpt2", "opt", "bert", "modernbert-decoder", "gemma3", "gemma3_text", "fuyu", "phi4_multimodal"]
SETTINGS: dict[str, dict[str, Any]] = {
    "hunyuan_v1_moe": {"moe_topk": [1, 2]}, "gemma4_text": {"enable_moe_block": True},
    "dbrx": {"ffn_config": {"moe_num_experts": 6, "moe_top_k": 2, "ffn_hidden_size": 32}},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", with_slow(EXPERTS + OTHERS, ["dbrx", "aria_text", "mixtral", "gpt2", "bert", "gemma3"])
)
def test_weights_are_counted_that_the_operators_of_a_step_take(name: str):
    """Experts by all of their names, tables, output layers of several matrices, and parts for pictures and sounds."""
    model: Any = random_model(tiny_configuration(name, **SETTINGS.get(name, {})))
    if name in EXPERTS:
        model.set_experts_implementation("eager")
        assert elements_read(model) < sum(p.numel() for p in model.parameters()) - VOCAB * 64
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=True).past_key_values
        with WeightsRead(model) as read:
            model(input_ids=torch.tensor([[5]]), past_key_values=cache, use_cache=True)
    counted = read.count()
    assert elements_read(model) == pytest.approx(counted, abs=VOCAB), "a bias of the output layer may be left out"


def test_experts_of_an_unknown_number(monkeypatch: pytest.MonkeyPatch):
    model: Any = random_model(tiny_configuration("dbrx"))
    assert shapes.share_of_experts(model) == 1 / 4
    monkeypatch.setattr(shapes, "CHOSEN", ("chosen", "used"))
    with pytest.raises(AttributeError, match="DbrxFFNConfig has none of chosen, used"):
        shapes.share_of_experts(model)


def test_layers_that_differ_in_their_heads_are_refused(tmp_path: Path):
    tiny_configuration("gemma4_text").save_pretrained(tmp_path)
    refuses(lambda: reads_of_folder(tmp_path), f"^{tmp_path}: its layers differ in their heads")
