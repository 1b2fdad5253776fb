"""Loading: a model and its tokenizer, or one line that names the path and the reason."""

import json

import huggingface_hub
import pytest
import torch

import skimkv
from skimkv.hf.load import BUILTIN
from support.tiny_models import family, prompt, tokenizer


@pytest.fixture
def folder(tmp_path):
    family("llama").save_pretrained(tmp_path, max_shard_size="60KB")
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def refused(path, reason, **options):
    with pytest.raises(ValueError, match=reason) as caught:
        skimkv.load(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message


@torch.no_grad()
def test_a_folder(folder):
    model, words = skimkv.load(folder)
    assert not model.training
    assert torch.equal(model(prompt()).logits, family("llama")(prompt()).logits)
    assert words("w5 w9")["input_ids"] == [5, 9]
    assert skimkv.load(str(folder), dtype="bfloat16")[0].dtype == torch.bfloat16
    assert skimkv.load(folder, dtype=torch.float64)[0].dtype == torch.float64
    with pytest.raises(ValueError, match="unknown dtype 'float17'"):
        skimkv.load(folder, dtype="float17")
    with pytest.raises(ValueError, match="unknown dtype 'nn'"):
        skimkv.load(folder, dtype="nn")


def test_builtin():
    model, words = skimkv.load("builtin", dtype=torch.float32)
    assert model.config.num_hidden_layers == 4
    ids = words("<s>torpid-kid: 24169\nlank-oak: 77310\ntorpid-kid: ", return_tensors="pt").input_ids
    with skimkv.attach(model, "SparQ(r=16, k=64)"):
        out = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert words.decode(out[0, ids.shape[1] :]).startswith("24169")
    assert BUILTIN.is_dir()


def test_folders_that_hold_no_model(tmp_path, folder):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "the folder is empty")
    (empty / "notes.txt").write_text("nothing")
    refused(empty, "no config.json")
    refused(folder / "config.json", "not a model folder")
    (folder / "config.json").write_text('{"model_type": "llama", ')
    refused(folder, "config")
    (folder / "config.json").write_text('{"model_type": "lama"}')
    refused(folder, "lama")


def test_a_folder_without_weights(folder):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    refused(folder, r"no weights \(\*.safetensors\)")


def test_pickles_are_refused(folder):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    torch.save(family("llama").state_dict(), folder / "pytorch_model.bin")
    refused(folder, "a pickle checkpoint, which can run code; only safetensors is read")


def test_truncated_and_corrupt_weights(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:5], b"", b"\xff" * 64, b"\x10" + bytes(7) + b"{not json at all"):
        shard.write_bytes(damaged)
        with pytest.raises(ValueError, match="truncated or corrupt") as caught:
            skimkv.load(folder)
        assert str(shard) in str(caught.value)
        assert "\n" not in str(caught.value)
    shard.unlink()
    refused(folder, shard.name)


def test_weights_that_are_missing_or_of_another_size(folder, tmp_path):
    """The library would fill what is missing with random numbers."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    refused(folder, "lacks 9 weights, the first is model.layers.2")
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 98}))
    refused(folder, r"lm_head.weight is \(97, 64\), by config.json it should be \(98, 64\)")


def test_a_folder_without_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    refused(folder, "cannot load its tokenizer: ")


def test_an_unknown_id_offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused("nobody/no-such-model", "cannot load its tokenizer: .*connect")
    for path in ("./no/such/folder", "/no/such/folder", "~/no-such-folder", "a/b/c", ""):
        refused(path, "no such folder")
