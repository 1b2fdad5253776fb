"""The angles of positions that follow one another, computed for many at once, are those of each position alone."""

from __future__ import annotations

import pytest
import torch

from skimkv.hf.angles import AngleTable, angles
from support.tiny_models import FAMILIES, build

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 80, "rope_theta": 1e4}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [1.5] * 8}
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "llama3": LLAMA3,
    "yarn": YARN,
    "dynamic": DYNAMIC,
    "longrope": LONG,
}


def model_with(rope):
    options = {} if ROPES[rope] is None else {"rope_parameters": ROPES[rope]}
    return build("llama", **FAMILIES["llama"][1], **options).model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", ROPES)
def test_one_position_after_the_other(rope, dtype):
    """Also those that follow from the length of the text, which are computed one by one, and after a jump."""
    table, alone = AngleTable(model_with(rope)), model_with(rope)
    x = torch.zeros(1, 1, 64, dtype=dtype)
    for position in (*range(30, 30 + 2 * AngleTable.AT_ONCE), 200, 3, 4, 159):
        positions = torch.tensor([[position]])
        assert all(map(torch.equal, table(x, positions), angles(alone, x, positions))), position


def test_each_type_of_layers_has_its_own():
    model = build("gemma3_text", **FAMILIES["gemma3"][1]).model
    table, x = AngleTable(model), torch.zeros(1, 1, 64)
    for position in range(100):
        found, expected = (f(x, torch.tensor([[position]])) for f in (table, lambda *a: angles(model, *a)))
        assert found[0].shape == (2, 1, 1, 16) and all(map(torch.equal, found, expected))


def test_it_calls_the_model_once_for_many_positions(monkeypatch):
    model, calls = model_with("default"), []
    forward = type(model.rotary_emb).forward
    monkeypatch.setattr(type(model.rotary_emb), "forward", lambda *a, **k: calls.append(1) or forward(*a, **k))
    table, x = AngleTable(model), torch.zeros(1, 1, 64)
    for position in range(AngleTable.AT_ONCE):
        table(x, torch.tensor([[position]]))
    assert len(calls) == 2  # all of them, and the first one to compare
    table(x.bfloat16(), torch.tensor([[1]]))
    assert len(calls) == 4
    table(torch.zeros(2, 1, 64), torch.tensor([[1], [2]]))
    assert len(calls) == 5


def test_angles_that_are_no_function_of_positions(monkeypatch):
    """Of somebody's class, which says that it is like the library's."""
    model = model_with("default")
    forward = type(model.rotary_emb).forward

    def by_length(self, x, position_ids):
        cos, sin = forward(self, x, position_ids=position_ids)
        return cos * position_ids.max(), sin

    monkeypatch.setattr(type(model.rotary_emb), "forward", by_length)
    table, x = AngleTable(model), torch.zeros(1, 1, 64)
    for position in range(20, 30):
        positions = torch.tensor([[position]])
        assert all(map(torch.equal, table(x, positions), angles(model, x, positions)))
