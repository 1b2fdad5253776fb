"""Every architecture of GGUF files that is loaded: the same logits and tokens as transformers' own model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

import skimkv
from skimkv.hf.expert_modules import Experts
from skimkv.hf.gguf_config import ARCHITECTURES, REFUSED
from skimkv.hf.gguf_model import load_gguf, read_contents
from support import gguf_architectures, gguf_files
from support.gguf_files import close, logits

IDS = torch.arange(2, 42)[None] * 7 % 257
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1}
DOCS = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_a_file_is_the_model_that_it_was_written_from(tmp_path, architecture):
    """And a method decodes it."""
    reference = gguf_architectures.write(tmp_path / "m.gguf", architecture)
    loaded, _ = load_gguf(tmp_path / "m.gguf", torch.float32)
    assert type(loaded) is type(reference)
    assert close(logits(loaded, IDS), logits(reference, IDS), 5e-3)
    expected = reference.generate(IDS, **GREEDY)
    assert torch.equal(loaded.generate(IDS, **GREEDY), expected)
    with skimkv.attach(loaded, "SparQ(r=16, k=128)"):
        assert torch.equal(loaded.generate(IDS, **GREEDY), expected)
    experts = [part for part in loaded.modules() if isinstance(part, Experts)]
    assert bool(experts) == ("expert_count" in gguf_architectures.CASES[architecture].metadata)
    assert all(layer.kind == "Q4_0" for part in experts for layer in (*part.gate, *part.up, *part.down))
    assert read_contents(tmp_path / "m.gguf").config.to_dict() | {"dtype": 0} == loaded.config.to_dict() | {"dtype": 0}


# What transformers' own loader reads as llama.cpp does; of the others it leaves out metadata or tensors.
AS_TRANSFORMERS = ["llama", "qwen2", "lfm2", "qwen35", "qwen35moe"]
READS_ALL = ARCHITECTURES.keys() >= {*AS_TRANSFORMERS}  # older versions of transformers read fewer architectures


@pytest.mark.parametrize("architecture", [name for name in AS_TRANSFORMERS if READS_ALL or name in ARCHITECTURES])
def test_transformers_own_load_of_the_file_is_the_same(tmp_path, architecture):
    gguf_architectures.write(tmp_path / "m.gguf", architecture)
    loaded, _ = load_gguf(tmp_path / "m.gguf", torch.float32)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    assert close(logits(loaded, IDS), logits(own, IDS), 5e-3)


@pytest.mark.parametrize("architecture", list(REFUSED))
def test_others_are_refused_with_the_reason(tmp_path, architecture):
    gguf_files.finish(gguf_files.header(tmp_path / "m.gguf", gguf_files.tiny().config, architecture))
    with pytest.raises(ValueError, match=f"architecture '{architecture}' is not supported: {REFUSED[architecture]}"):
        load_gguf(tmp_path / "m.gguf")


def test_transformers_still_has_no_table_of_these():
    """Once it has one, they can be loaded."""
    without = [name for name, reason in REFUSED.items() if reason == "transformers has no table of its metadata"]
    assert without == ["chatglm", "glm4", "glm4moe"]
    assert not {*without, "glm"} & {*GGUF_CONFIG_MAPPING, *GGUF_CONFIG_ARCHS}


@pytest.mark.skipif(not READS_ALL, reason="this version of transformers reads fewer architectures")
def test_the_table_of_the_docs():
    assert gguf_architectures.table() in DOCS.read_text(), "python -m support.gguf_architectures prints it (in tests/)"
