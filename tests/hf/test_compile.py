"""Compiled decoding: equal tokens, one compilation, and where there is a GPU a replayed graph."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch._dynamo.utils import counters

import skimkv
from skimkv import ops
from skimkv.hf import compile, cuda_graph
from skimkv.hf.weights import quantise
from support.refusals import refuses
from support.tiny_models import build, family, padded, prompt, with_slow

METHODS = ["Dense()", "SparQ(r=4, k=8, channels='int8')", "H2O(k=12)", "LMInfinite(k=12, initial=3)", "Strided(k=12)"]
METHODS += ["SubGen(k=8, recent=8)", "SubGenStream(delta=4.0, t=2, s=16)"]
FAMILIES = ["llama", "mistral", "gemma", "gpt_neox", "opt", "qwen3", "phi3", "gpt2"]
GREEDY = {"max_new_tokens": 28, "do_sample": False}


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()  # models are shared by the tests, and keep what was compiled for them


def tokens(model, spec, backend, **inputs):
    with skimkv.attach(model, spec, compile=backend):
        return model.generate(**(inputs or {"input_ids": prompt(1, 24)}), **GREEDY).tolist()


@pytest.mark.parametrize("name", with_slow(FAMILIES, quick=("llama", "gpt2")))
def test_every_family_gives_the_same_tokens_and_is_compiled_once(name):
    model, spec = family(name), "SparQ(r=4, k=8)"
    expected = tokens(model, spec, False)
    counters.clear()
    assert tokens(model, spec, "eager") == expected
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert counters["stats"]["calls_captured"] > 0


@pytest.mark.slow
def test_methods_caches_and_turns_share_one_graph():
    """Lengths, methods and caches are no part of the graph; a padded batch is one more."""
    model = family("llama")
    with skimkv.attach(model, "Dense()", compile="eager"), torch.no_grad():
        counters.clear()
        for spec in METHODS:
            compiled, plain = skimkv.Cache(model, spec), skimkv.Cache(model, spec)
            text = expected = prompt(1, 24)
            for turn in range(2):
                text = model.generate(text, past_key_values=compiled, max_new_tokens=12, do_sample=False)
                before = compile.set_forward(model, None)
                expected = model.generate(expected, past_key_values=plain, max_new_tokens=12, do_sample=False)
                compile.set_forward(model, before)
                assert text.tolist() == expected.tolist(), (spec, turn)
            assert compiled.nbytes == plain.nbytes and compiled.get_seq_length() == plain.get_seq_length() == 47
        assert counters["stats"]["unique_graphs"] == 1
        model.generate(**padded([24, 9, 17]), **GREEDY)
        assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 4}])
def test_padded_rows_beams_and_drafts(options):
    model, rows = family("llama"), [24] if "prompt_lookup_num_tokens" in options else [24, 9, 17]
    inputs = {**padded(rows), **options}
    for spec in ("SparQ(r=4, k=8)", "H2O(k=12)"):
        assert tokens(model, spec, "eager", **inputs) == tokens(model, spec, False, **inputs)


@pytest.mark.slow
def test_by_inductor():
    model = build("llama", num_key_value_heads=2, head_dim=16)
    counters.clear()
    assert tokens(model, "SparQ(r=4, k=8)", True) == tokens(model, "SparQ(r=4, k=8)", False)
    assert counters["stats"]["unique_graphs"] == 1


def test_what_is_no_step_runs_as_without():
    model, ids = family("llama"), prompt(1, 24)
    with skimkv.attach(model, "Dense()", compile="eager"), torch.no_grad():
        counters.clear()
        cache = skimkv.Cache(model, "Dense()")
        model(ids, past_key_values=cache)
        out = model(ids[:, :1], past_key_values=cache, output_hidden_states=True)
        assert len(out.hidden_states) == 3
        model(ids[:, :2], past_key_values=cache)
        model(ids[:, :1], past_key_values=skimkv.Cache(model, "Dense()"))
        model(ids[:, :1])
        assert not counters["stats"]
        positional = model(ids[:, :1], None, None, cache).logits
        assert counters["stats"]["unique_graphs"] == 1 and positional.shape == (1, 1, 97)
        assert cache.get_seq_length() == 28
        with pytest.raises(ValueError, match="covers 5 of 29 positions"):
            model(ids[:, :1], past_key_values=cache, attention_mask=torch.zeros(1, 5))


@pytest.mark.slow
def test_slices_of_a_growing_text_are_compiled_once():
    """Tokens and positions whose strides differ from step to step."""
    model, ids = family("llama"), prompt(3, 40)
    with skimkv.attach(model, "Dense()", compile="eager"), torch.no_grad():
        for rows in (1, 3):
            cache = skimkv.Cache(model, "Dense()")
            model(ids[:rows, :20], past_key_values=cache)
            counters.clear()
            for n in range(20, 40):
                places = torch.arange(n + 1).expand(rows, -1)[:, -1:]
                model(ids[:rows, : n + 1][:, -1:], past_key_values=cache, position_ids=places)
                model(torch.cat([ids] * (n - 18), 1)[:rows, n : n + 1], past_key_values=cache)
            assert counters["stats"]["unique_graphs"] <= 2, rows  # positions of each row, and one for all


def test_attach_within_attach_and_detach():
    model = family("llama")
    assert "forward" not in model.__dict__
    with skimkv.attach(model, "Dense()", compile="eager"):
        forward = model.forward
        assert "position_ids" in inspect.signature(forward).parameters
        with skimkv.attach(model, "TopK(k=4)"):
            assert "forward" not in model.__dict__
            with skimkv.attach(model, "TopK(k=4)", compile="eager"):
                assert model.forward is forward  # what was compiled works for any method
        assert model.forward is forward
        skimkv.detach(model)
        assert "forward" not in model.__dict__


@pytest.mark.slow
def test_what_was_compiled_is_used_by_the_next_attach_and_by_no_other_model():
    model = build("llama", num_key_value_heads=2, head_dim=16)
    counters.clear()
    texts = [tokens(model, spec, "eager") for spec in ("Dense()", "TopK(k=4)", "Dense()")]
    assert counters["stats"]["unique_graphs"] == 1 and texts[0] == texts[2]
    with skimkv.attach(model, "Dense()", compile="eager"):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.lm_head.weight.copy_(twin.lm_head.weight.flip(0))
        flipped = twin.generate(prompt(1, 24), **GREEDY).tolist()
    skimkv.detach(twin)
    assert flipped == twin.generate(prompt(1, 24), **GREEDY).tolist() != texts[0]


def test_refusals_are_one_line_and_leave_the_model_alone():
    calls = [
        (family.__wrapped__("gemma2"), True, "Gemma2ForCausalLM cannot be compiled: it has layers of sliding"),
        (build("llama").model, True, "LlamaModel cannot be compiled: it takes no position_ids, or has no generate"),
        (build("llama"), "fast", "compile = 'fast' must be True or one of"),
        (quantise(build("llama")), True, "LlamaForCausalLM cannot be compiled: its weights are quantised"),
        (torch.nn.Linear(1, 1), True, "Linear is not a transformers model"),
    ]
    for model, backend, message in calls:
        refuses(lambda model=model, backend=backend: skimkv.attach(model, "Dense()", compile=backend), message)
        assert "_skimkv" not in model.__dict__ and "forward" not in model.__dict__


class FakeDevice:
    """Takes the place of ops.gpu.device where there is no GPU: what the host does around a replay."""

    def __init__(self):
        self.moved = 0

    def prepare(self, store): ...

    def footing(self, stores):
        return (self.moved,)

    def advance(self, store):
        store.advance()


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["SparQ(r=4, k=8)", "H2O(k=12)"])
def test_a_step_is_captured_and_replayed(spec, monkeypatch):
    """Two turns on one cache. Without a GPU a replay is a step that leaves the host's numbers alone."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    captured, replayed, fake, real = [], [], FakeDevice(), cuda_graph.capture

    def numbers():
        return [(layer.seen, layer.store.mark()) for layer in cache.layers]

    def capture(step):
        captured.append(1)
        if place == "cuda":
            return real(step)
        stores = [layer.store.fork() for layer in cache.layers]
        y = step()
        after = [numbers()]
        for layer, store in zip(cache.layers, stores, strict=True):
            layer.store = store  # a capture runs no kernel, the first replay does

        def run():
            replayed.append(1)
            before = after.pop() if after else numbers()
            y.copy_(step())
            for layer, (seen, mark) in zip(cache.layers, before, strict=True):
                layer.seen = seen
                layer.store.rewind(mark)

        return y, run

    model, inputs = family("llama").to(place), {name: x.to(place) for name, x in padded([20, 9]).items()}
    monkeypatch.setattr(compile, "capture", capture)
    if place == "cpu":
        monkeypatch.setattr(ops, "graphable", lambda store: True)
        monkeypatch.setattr(compile, "device", fake)
        monkeypatch.setattr(cuda_graph, "device", fake)

    def turns():
        """Two turns, with new addresses in the second; a few tokens are taken back where the store can forget."""
        text = model.generate(**inputs, past_key_values=cache, **GREEDY)
        cache.reorder_cache(torch.tensor([0, 1]))
        fake.moved += 1
        if spec.startswith("SparQ"):
            cache.crop(-3)
            text = text[:, :-3]
        mask = torch.cat([inputs["attention_mask"], torch.ones(2, text.shape[1] - 20, device=place)], 1).long()
        return model.generate(text, attention_mask=mask, past_key_values=cache, **GREEDY).tolist()

    with ops.backend("gpu" if place == "cuda" else "ref"), skimkv.attach(model, spec, compile="eager"):
        cache = skimkv.Cache(model, spec)
        got = turns()
        assert place == "cuda" or (len(captured), len(replayed)) == (2, 53)
        skimkv.detach(model)
        cache = skimkv.Cache(model, spec)
        assert got == turns()
    model.to("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["Quest(page=4, k=8)", "TOVA(k=12)", "H2O(k=12, score='mean')"])
def test_a_reference_is_never_captured(spec, monkeypatch):
    """Its steps ask the host, which a graph cannot: they run one by one."""
    model, inputs = family("llama"), padded([20, 9])
    monkeypatch.setattr(compile, "capture", lambda step: pytest.fail("a step was captured"))
    monkeypatch.setattr(ops, "graphable", lambda store: True)
    monkeypatch.setattr(compile, "device", FakeDevice())
    monkeypatch.setattr(cuda_graph, "device", FakeDevice())
    with skimkv.attach(model, spec, compile="eager"):
        got = model.generate(**inputs, past_key_values=skimkv.Cache(model, spec), **GREEDY).tolist()
    expected = model.generate(**inputs, past_key_values=skimkv.Cache(model, spec), **GREEDY).tolist()
    assert got == expected


@pytest.mark.slow
def test_a_compiler_that_fails_is_one_line():
    """As where PyTorch finds no C++ compiler; the model is usable afterwards."""

    def broken(graph, inputs):
        raise RuntimeError("No working C++ compiler found.\nMore lines. And more")

    if "broken" not in torch.compiler.list_backends(None):
        torch._dynamo.register_backend(broken, name="broken")
    model = family("llama")
    reason = "^torch.compile with backend 'broken' failed: No working C.. compiler found$"
    with pytest.raises(ValueError, match=reason):
        tokens(model, "Dense()", "broken")
    assert tokens(model, "Dense()", "eager") == tokens(model, "Dense()", False)
