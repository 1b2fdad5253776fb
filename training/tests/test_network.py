"""The network that is trained: the Llama that its folder holds, with heads that look back from the start."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

import skimkv
from skimkv.hf.load import BUILTIN
from training import folder
from training.data import RowMaker
from training.network import LOOK_BACK, Network, rotate
from training.tests.micro_model import SHAPE


def test_heads_look_back_from_the_start() -> None:
    torch.manual_seed(0)
    network = Network(folder.read_config(BUILTIN / "config.json"))
    seen: list[list[torch.Tensor]] = [[] for _ in network.layers]
    for layer, made in zip(network.layers, seen, strict=True):
        for name in ("q_proj", "k_proj"):
            layer.self_attn[name].register_forward_hook(
                lambda module, inputs, out, made=made: made.append(out.unflatten(-1, (-1, 64)))
            )
    network(torch.randint(2, 2048, (2, 64)))
    angle = torch.arange(64)[:, None, None] * network.theta ** (-torch.arange(32) / 32)
    later = torch.ones(64, 64, dtype=torch.bool).triu(1)
    assert LOOK_BACK == ((1, 2, 3, 4), (4, 8, 12, 16))
    for made, backs, least in zip(seen, LOOK_BACK, (0.8, 0.3), strict=False):
        q, k = (rotate(x, angle.cos(), angle.sin()) for x in made)  # (2,64,4,64), (2,64,2,64)
        for h, back in enumerate(backs):
            weights = (q[:, :, h] @ k[:, :, h // 2].transpose(1, 2) / 8).masked_fill(later, -torch.inf).softmax(-1)
            assert weights.diagonal(-back, 1, 2).mean() > least, (h, back)


def test_the_network_is_the_llama_that_is_written(tmp_path: Path, maker: RowMaker) -> None:
    torch.manual_seed(0)
    network = Network(SimpleNamespace(**SHAPE))
    folder.save_model(network, SimpleNamespace(**SHAPE), maker.tokenizer, tmp_path)
    model, words = skimkv.load(tmp_path, dtype=torch.float32)
    ids = torch.tensor([words("some words, and 12 more").input_ids])
    with torch.no_grad():
        folder.load_weights(network, tmp_path)  # both in the rounding of float16
        torch.testing.assert_close(network.logits(network(ids)), model(ids).logits, atol=1e-5, rtol=1e-4)


def test_the_bundled_model_can_be_trained_on() -> None:
    network = Network(folder.read_config(BUILTIN / "config.json"))
    folder.load_weights(network, BUILTIN)
    words = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    ids = torch.tensor([[0, *words.encode("torpid-kid: 24169\nlank-oak: 77310\ntorpid-kid: ").ids]])
    with torch.no_grad():
        assert words.decode([int(network.logits(network(ids))[0, -1].argmax())]) == "2"


def test_a_shape_that_is_not_trained(tmp_path: Path) -> None:
    for name, value in (("model_type", "gpt2"), ("hidden_size", 0), ("vocab_size", 100), ("rope_parameters", None)):
        (tmp_path / "config.json").write_text(json.dumps({**SHAPE, name: value}))
        with pytest.raises(ValueError, match=name):
            folder.read_config(tmp_path / "config.json")
