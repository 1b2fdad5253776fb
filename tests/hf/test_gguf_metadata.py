"""Metadata of GGUF files that change what is computed: they are read as llama.cpp reads them, or refused by name."""

from __future__ import annotations

import gguf
import pytest
import torch

from skimkv.hf.gguf_model import load_gguf_model, read_config
from support import gguf_architectures
from support.gguf_files import close, logits, tiny, write
from support.refusals import refuses

IDS = torch.arange(2, 202)[None] * 7 % 257
Kinds = gguf.GGUFValueType
BASE = {"rope_theta": 1e4}


def key(name: str, value: object, kind: Kinds):
    return lambda w: w.add_key_value(f"llama.{name}", value, kind)


def both(*edits):
    return lambda w: [edit(w) for edit in edits]


def scaling(type: str):
    return key("rope.scaling.type", type, Kinds.STRING)


def number(name: str, value: float):
    return key(name, value, Kinds.FLOAT32)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_KEYS = (
    scaling("yarn"), number("rope.scaling.factor", 4.0), key("rope.scaling.original_context_length", 64, Kinds.UINT32),
)  # fmt: skip


@pytest.mark.parametrize(
    ("edit", "rope"),
    [
        (number("rope.scaling.factor", 4.0), {"rope_type": "linear", "factor": 4.0}),
        (number("rope.scale_linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
        (
            both(number("rope.scale_linear", 8.0), number("rope.scaling.factor", 2.0)),
            {"rope_type": "linear", "factor": 2.0},
        ),
        (both(scaling("none"), number("rope.scaling.factor", 4.0)), {"rope_type": "default"}),
        (number("rope.scaling.factor", 0.0), {"rope_type": "default"}),
        (both(*YARN_KEYS), YARN),
        (
            both(*YARN_KEYS, number("rope.scaling.attn_factor", 0.8)),
            YARN | {"attention_factor": 0.8 * (1 + 0.1 * 1.3862943611)},
        ),
        (
            both(
                *YARN_KEYS,
                number("rope.scaling.yarn_beta_fast", 16.0),
                number("rope.scaling.yarn_beta_slow", 2.0),
            ),
            YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
        ),
    ],
)
def test_the_rotation_is_the_one_that_the_metadata_say(tmp_path, edit, rope):
    plain = tiny()
    model = tiny(rope_parameters=BASE | rope)
    model.load_state_dict(plain.state_dict())
    reference = write(tmp_path / "m.gguf", model, edit=edit)
    loaded = load_gguf_model(tmp_path / "m.gguf", torch.float32)
    assert close(logits(loaded, IDS), logits(reference, IDS), 1e-2)
    plain.load_state_dict(reference.state_dict())
    changes = rope["rope_type"] != "default"
    assert close(logits(loaded, IDS), logits(plain, IDS), 0.05) != changes


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (scaling("longrope"), "llama.rope.scaling.type = 'longrope' is not supported; only none, linear and yarn are"),
        (number("rope.scaling.attn_factor", 0.5), "llama.rope.scaling.attn_factor = 0.5 is not supported; only 1 is"),
        (number("rope.scaling.factor", -1.0), r"llama.rope.scaling.factor = -1.0 must be a finite number"),
        (number("rope.freq_base_swa", 5.0), "llama.rope.freq_base_swa = 5.0 is not supported: it may change"),
        (key("attention.causal", False, Kinds.BOOL), "llama.attention.causal = False is not supported; only True is"),
        (number("attention.scale", 0.5), "llama.attention.scale = 0.5 is not supported: it may change"),
        (number("attention.max_alibi_bias", 8.0), "llama.attention.max_alibi_bias = 8.0 is not supported; only 0 is"),
        (key("attention.sliding_window", 64, Kinds.UINT32), "llama.attention.sliding_window = 64 is not supported"),
        (key("attention.value_length", 8, Kinds.UINT32), "llama.attention.value_length = 8 is not supported; only 16"),
        (key("rope.dimension_count", 8, Kinds.UINT32), "llama.rope.dimension_count = 8 is not supported; only 16 is"),
        (number("logit_scale", 0.5), "llama.logit_scale = 0.5 is not supported; only 0 and 1 are"),
        (number("final_logit_softcapping", 30.0), "llama.final_logit_softcapping = 30.0 is not supported; only 0 is"),
        (number("expert_weights_scale", 2.5), "llama.expert_weights_scale = 2.5 is not supported; only 0 and 1 are"),
        (number("something.new", 1.0), "llama.something.new = 1.0 is not supported: it may change what the model"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, edit, reason):
    def replace(w):
        w.kv_data[0].pop("llama.attention.value_length")
        w.kv_data[0].pop("llama.rope.dimension_count")
        edit(w)

    write(tmp_path / "m.gguf", tiny(), edit=replace)
    refuses(lambda: load_gguf_model(tmp_path / "m.gguf"), f"{tmp_path}/m.gguf.*{reason}")


@pytest.mark.parametrize(
    "edit",
    [
        key("attention.causal", True, Kinds.BOOL),
        key("expert_count", 0, Kinds.UINT32),
        number("logit_scale", 1.0),
        key("tensor_data_layout", "Meta AI original pth", Kinds.STRING),
        key("rope.scaling.finetuned", True, Kinds.BOOL),
    ],
)
def test_a_value_that_changes_nothing_is_no_mistake(tmp_path, edit):
    write(tmp_path / "m.gguf", tiny(), edit=edit)
    assert read_config(tmp_path / "m.gguf").rope_parameters["rope_type"] == "default"


NORMS = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"


@pytest.mark.parametrize(
    ("architecture", "needed"),
    [("llama", NORMS[1]), ("stablelm", NORMS[0]), ("gpt2", NORMS[0]), ("nemotron", NORMS[0])],
)
def test_a_missing_epsilon_has_the_name_that_the_architecture_needs(tmp_path, monkeypatch, architecture, needed):
    path, other = tmp_path / "m.gguf", NORMS[needed == NORMS[0]]
    finish, keys = gguf_architectures.finish, list[str]()

    def finish_otherwise(writer):
        """Take the epsilon out of the metadata, and put it back under these keys."""
        value = writer.kv_data[0].pop(f"{architecture}.{needed}")
        writer.kv_data[0] |= {f"{architecture}.{key}": value for key in keys}
        finish(writer)

    monkeypatch.setattr(gguf_architectures, "finish", finish_otherwise)
    gguf_architectures.write(path, architecture)
    refuses(lambda: load_gguf_model(path), f"^{path}: its metadata lacks {architecture}.{needed}$")
    for key in (needed, other):
        keys[:] = [key]
        gguf_architectures.write(path, architecture)
        assert read_config(path).num_hidden_layers == 2
