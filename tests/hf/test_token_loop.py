"""Our loop of generate() gives the tokens of the library's, and leaves to it what it does not do."""

import contextvars
import copy
import functools

import pytest
import torch
from transformers import GenerationMixin, LlamaForCausalLM, LogitsProcessorList, MaxTimeCriteria, StoppingCriteriaList
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import skimkv
from skimkv.hf import installation
from skimkv.hf.next_logits import NextLogits
from support.tiny_models import new_family, prompt

N = 23
SAMPLE = {"do_sample": True}
SETTINGS = [
    {}, SAMPLE, {"temperature": 0.7, **SAMPLE}, {"top_k": 5, **SAMPLE}, {"top_p": 0.5, **SAMPLE},
    {"min_p": 0.1, **SAMPLE}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2},
    {"bad_words_ids": [[5], [6, 7]]}, {"eos_token_id": list(range(3, 30)), **SAMPLE},
    {"min_new_tokens": 5, "eos_token_id": list(range(60))}, {"prefill_chunk_size": 7},
    {"num_return_sequences": 2, "eos_token_id": list(range(3, 9)), **SAMPLE},
    {"logits_processor": LogitsProcessorList([lambda ids, scores: -scores])},
    {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(600), lambda ids, _: ids[:, -1] % 3 == 0])},
]  # fmt: skip


class Streamer:
    """It keeps what generate() gives it."""

    def __init__(self):
        self.tokens = []

    def put(self, tokens):
        self.tokens.append(tokens.tolist())

    def end(self):
        self.tokens.append("end")


class KnownStreamer(Streamer):
    """One of our package, whose code changes nothing between two tokens."""

    __module__ = "skimkv.tests"


def generate(model, ours, monkeypatch, rows=1, padded=False, method="SparQ(r=8, k=6)", **settings):
    """The tokens and what was streamed, by our loop or the library's, and how often the library's loop ran."""
    ids, mask, sample, calls = prompt(rows, N), torch.ones(rows, N, dtype=torch.long), type(model)._sample, []

    def counted(*args, **kwargs):
        calls.append(1)
        return sample(*args, **kwargs)

    if padded:
        mask[0, :5] = 0
    streamer = Streamer() if rows == 1 and "num_return_sequences" not in settings else None
    torch.manual_seed(3)
    with monkeypatch.context() as patch, skimkv.attach(model, method):
        patch.setattr(type(model), "_sample", counted)
        if ours:  # for `loop_for` the model has the library's loop
            patch.setattr(GenerationMixin, "_sample", counted)
        else:
            patch.setattr(installation, "loop_for", lambda *_: None)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=12, streamer=streamer, **settings)
    return out, streamer and streamer.tokens, len(calls)


@pytest.fixture
def model():
    model = new_family("llama")
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings) or "greedy")
@pytest.mark.parametrize(("rows", "padded"), [(1, False), (3, True)])
def test_the_tokens_are_the_librarys(model, settings, rows, padded, monkeypatch):
    ours, streamed, by_library = generate(model, True, monkeypatch, rows, padded, **settings)
    theirs, expected, calls = generate(model, False, monkeypatch, rows, padded, **settings)
    assert torch.equal(ours, theirs) and streamed == expected
    assert (by_library, calls) == (0, 1)


@pytest.mark.parametrize(
    "settings",
    [{"return_dict_in_generate": True, "output_hidden_states": True}, {"num_beams": 3}, {"num_beams": 3, **SAMPLE}],
)
def test_the_library_does_the_rest(model, settings, monkeypatch):
    ours, _, by_library = generate(model, True, monkeypatch, rows=2, **settings)
    theirs, _, calls = generate(model, False, monkeypatch, rows=2, **settings)
    if "num_beams" in settings:
        assert torch.equal(ours, theirs)
    else:
        assert torch.equal(ours.sequences, theirs.sequences) and len(ours.hidden_states) == 12
    assert by_library == calls


@pytest.mark.parametrize("asked", [[], ["output_scores"], ["output_logits"], ["output_scores", "output_logits"]])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.5, **SAMPLE}, {"repetition_penalty": 1.3}])
def test_more_than_the_text_is_returned(model, asked, settings, monkeypatch):
    settings = {**settings, **dict.fromkeys(asked, True), "return_dict_in_generate": True}
    ours, streamed, by_library = generate(model, True, monkeypatch, **settings)
    theirs, expected, calls = generate(model, False, monkeypatch, **settings)
    assert type(ours) is type(theirs) and list(ours) == list(theirs) and (by_library, calls) == (0, 1)
    assert torch.equal(ours.sequences, theirs.sequences) and streamed == expected
    for name in ("scores", "logits"):
        of_ours, of_theirs = getattr(ours, name), getattr(theirs, name)
        assert type(of_ours) is type(of_theirs)
        assert of_ours is None or (len(of_ours) == 12 and all(map(torch.equal, of_ours, of_theirs)))
    assert ours.past_key_values.get_seq_length() == theirs.past_key_values.get_seq_length() == N + 11


def test_criteria_to_stop_are_given_the_scores(model, monkeypatch):
    def is_enough(ids, scores):
        assert all(score.shape == (1, model.config.vocab_size) for score in scores)
        return torch.tensor([len(scores) == 4])

    settings = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "stopping_criteria": StoppingCriteriaList([is_enough]),
    }
    ours, _, by_library = generate(model, True, monkeypatch, **settings)
    theirs, _, _ = generate(model, False, monkeypatch, **settings)
    assert torch.equal(ours.sequences, theirs.sequences) and len(ours.scores) == len(theirs.scores) == 4
    assert by_library == 0


def test_quick_samples_are_as_likely(model):
    """The first tokens of 4,000 rows, within five standard deviations; top_k=20 leaves the others out."""
    n, ids = 4000, prompt(1, N)
    with skimkv.attach(model, "Dense()"), skimkv.quick_sampling():
        torch.manual_seed(0)
        settings = {"max_new_tokens": 1, "top_k": 20, "temperature": 0.5, **SAMPLE}
        drawn = model.generate(ids.expand(n, -1), attention_mask=torch.ones(n, N), **settings)[:, -1]
    with torch.no_grad():
        logits = 2 * model(ids).logits[0, -1].float()
    likely = logits.masked_fill(logits < logits.topk(20).values[-1], -torch.inf).softmax(-1)
    error = (likely * (1 - likely) / n).sqrt()
    assert ((drawn.bincount(minlength=len(likely)) / n - likely).abs() <= 5 * error).all()


def test_quick_samples_are_decided_by_the_seed_and_only_in_the_with(model, monkeypatch):
    settings = {"rows": 2, "temperature": 1.5, **SAMPLE}
    theirs, _, _ = generate(model, False, monkeypatch, **settings)
    with skimkv.quick_sampling():
        quick, again = (generate(model, True, monkeypatch, **settings)[0] for _ in range(2))
        greedy, _, _ = generate(model, True, monkeypatch, rows=2)
        only_one, _, _ = generate(model, True, monkeypatch, rows=2, top_k=1, **SAMPLE)
    assert torch.equal(quick, again) and not torch.equal(quick, theirs) and torch.equal(greedy, only_one)
    assert torch.equal(generate(model, True, monkeypatch, **settings)[0], theirs)


def test_quick_sampling_may_be_left_in_another_context(model):
    """As the generators of a server are, whose steps run in one thread and then in another."""

    def steps():
        with skimkv.quick_sampling():
            yield
            yield

    generator = steps()
    for _ in range(2):
        contextvars.copy_context().run(next, generator)
    contextvars.copy_context().run(generator.close)


def test_settings_of_the_model_count(model, monkeypatch):
    model.generation_config.num_beams = 2
    assert installation.loop_for(model, {"num_beams": 1}) is not None
    assert installation.loop_for(model, {}) is None
    assert installation.loop_for(model, {"num_beams": 1, "assistant_model": model}) is None


def test_code_of_others_keeps_the_librarys_loop(model, monkeypatch):
    """A model, or somebody who changed this object, may prepare inputs in another way."""
    assert installation.loop_for(model, {}) is not None
    for name in ("prepare_inputs_for_generation", "generate", "_sample"):
        with monkeypatch.context() as patch:
            patch.setattr(type(model), name, lambda self, *args, **kwargs: None)
            assert installation.loop_for(model, {}) is None
    model.prepare_inputs_for_generation = lambda *args, **kwargs: {}
    assert installation.loop_for(model, {}) is None


def tokens_and_calls(model, monkeypatch, streamer=None, direct=True, rows=1, **settings):
    """The tokens of generate(), and how often it called the model for one."""
    calls, forward = [], type(model).forward

    @functools.wraps(forward)  # so that it is taken for the library's
    def counted(self, *args, **kwargs):
        calls.append(1)
        return forward(self, *args, **kwargs)

    torch.manual_seed(3)
    with monkeypatch.context() as patch, skimkv.attach(model, "SparQ(r=8, k=6)"):
        patch.setattr(type(model), "forward", counted)
        if not direct:
            patch.setattr(NextLogits, "_hands_on", lambda *_: False)
        out = model.generate(prompt(rows, N), max_new_tokens=12, streamer=streamer, **settings)
    return out, len(calls)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("settings", [{}, SAMPLE, {"repetition_penalty": 1.3}])
def test_tokens_go_to_the_layers(name, settings, monkeypatch):
    """The prompt and the first token go through the model's own forward, and the other ten do not."""
    model = new_family(name)
    out, calls = tokens_and_calls(model, monkeypatch, KnownStreamer(), **settings)
    theirs, by_model = tokens_and_calls(model, monkeypatch, direct=False, **settings)
    assert torch.equal(out, theirs) and (calls, by_model) == (2, 12)


def test_rows_of_padded_texts_go_to_the_layers(model, monkeypatch):
    mask = torch.ones(3, N, dtype=torch.long)
    mask[0, :5] = 0
    out, calls = tokens_and_calls(model, monkeypatch, rows=3, attention_mask=mask)
    theirs, by_model = tokens_and_calls(model, monkeypatch, direct=False, rows=3, attention_mask=mask)
    assert torch.equal(out, theirs) and (calls, by_model) == (2, 12)


class Filtered(LlamaForCausalLM):
    """A model of a user, which never says the token that it says after the last one of all."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        ids = kwargs["input_ids"]
        if ids.shape[1] == 1:
            output.logits[ids[:, 0] == self.token, :, self.never] = -torch.inf
        return output


class Bounded(LlamaDecoderLayer):
    """A layer of a user, whose results are bounded. Small ones, as of a trial, are what they are."""

    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs).clamp(-0.5, 0.5)


class Noted(torch.nn.Linear):
    """A last layer of a user, which notes its calls."""

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_classes_of_users_compute_every_token(model):
    ids = prompt(1, N)
    text = model.generate(ids, max_new_tokens=12)[0]
    for change in ("model", "layer", "head"):
        changed = copy.deepcopy(model)
        if change == "model":
            changed.__class__, changed.token, changed.never = Filtered, int(text[N + 5]), int(text[N + 6])
        elif change == "layer":
            changed.model.layers[1].__class__ = Bounded
        else:
            changed.lm_head.__class__, changed.lm_head.calls = Noted, 0
        expected = changed.generate(ids, max_new_tokens=12)
        if change == "head":
            changed.lm_head.calls = 0
        else:
            assert not torch.equal(expected[0], text)
        with skimkv.attach(changed, "Dense()"):
            assert torch.equal(changed.generate(ids, max_new_tokens=12), expected)
        if change == "head":
            assert changed.lm_head.calls == 12


def test_what_streamers_and_models_get(model):
    """A streamer may write into what it gets, and sampled beams give it to the model too, as the library does."""

    class Writes(KnownStreamer):
        def put(self, value):
            super().put(value)
            if value.ndim == 1:  # a token, and not the prompt
                value.fill_(9)

    ids = prompt(1, N)
    expected = model.generate(ids, max_new_tokens=12)
    with skimkv.attach(model, "Dense()"):
        assert torch.equal(model.generate(ids, max_new_tokens=12, streamer=Writes()), expected)
        model.generate(ids, max_new_tokens=4, streamer=KnownStreamer(), num_beams=2, do_sample=True)


def no_hook(*_):
    """A hook that does nothing."""


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.register_forward_hook(no_hook),
        lambda model: model.register_forward_pre_hook(no_hook),
        lambda model: model.model.register_forward_hook(no_hook),
        lambda model: model.model.register_forward_pre_hook(no_hook),
        lambda model: model.model.layers[1].register_forward_hook(no_hook),
        lambda model: vars(model).update(forward=lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)),
    ],
    ids=["hook", "hook before", "decoder", "before decoder", "layer", "forward"],
)
def test_who_watches_the_model_sees_every_token(model, change, monkeypatch):
    change(model)
    assert tokens_and_calls(model, monkeypatch)[1] == 12


PARTS = [
    "lm_head",
    "model.embed_tokens",
    "model.rotary_emb",
    "model.norm",
    "model.layers.0",
    "model.layers.1.mlp.act_fn",
]


@pytest.mark.parametrize("name", PARTS)
def test_a_hook_sees_its_part_once_a_token(model, name, monkeypatch):
    """And no token but those of the text, with its rows: nothing is prepared with others."""
    expected, seen = tokens_and_calls(model, monkeypatch)[0], []
    model.get_submodule(name).register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    found, calls = tokens_and_calls(model, monkeypatch)
    assert calls == 12 and seen == [1] * 12 and torch.equal(found, expected)


@pytest.mark.parametrize("name", ["lm_head", "model.embed_tokens"])
def test_what_a_hook_changes_between_tokens_counts(model, name, monkeypatch):
    """It exchanges a weight after some tokens."""
    original, seen = copy.deepcopy(model), []

    def hook(*_):
        seen.append(1)
        if len(seen) == 6:
            model.model.layers[0].mlp.down_proj.weight.data = -9 * model.model.layers[0].mlp.down_proj.weight

    model.get_submodule(name).register_forward_hook(hook)
    changed, _ = tokens_and_calls(model, monkeypatch)
    assert not torch.equal(changed, tokens_and_calls(original, monkeypatch)[0])


def test_a_forward_that_somebody_gave_the_last_layer_is_called(model, monkeypatch):
    head, seen = model.lm_head, []
    head.forward = lambda x: seen.append(1) or type(head).forward(head, x)
    assert tokens_and_calls(model, monkeypatch)[1] == 12 and len(seen) == 12


def test_logits_that_the_model_changes(model, monkeypatch):
    """As Granite's and Gemma 2's do, which are not what the last layer returns."""
    forward = type(model).forward

    def halves(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits / 2
        return output

    monkeypatch.setattr(type(model), "forward", halves)
    seen = []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    assert tokens_and_calls(model, monkeypatch)[1] == 12
    assert len(seen) == 12


def test_what_a_users_code_changes_between_tokens_counts(model, monkeypatch):
    class Changes(Streamer):
        """It exchanges a weight after some tokens."""

        def put(self, tokens):
            super().put(tokens)
            if len(self.tokens) == 6:
                weight = model.model.layers[0].mlp.down_proj.weight
                model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(-9 * weight, requires_grad=False)

    original = copy.deepcopy(model)
    changed, calls = tokens_and_calls(model, monkeypatch, Changes())
    assert calls == 12 and not torch.equal(changed, tokens_and_calls(original, monkeypatch)[0])


@pytest.mark.parametrize(
    "settings",
    [
        {"logits_processor": LogitsProcessorList([lambda ids, scores: scores])},
        {"stopping_criteria": StoppingCriteriaList([lambda ids, _: torch.zeros(len(ids), dtype=torch.bool)])},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(97))},
        {"streamer": Streamer()},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_a_users_code_keeps_the_models_forward(model, settings, monkeypatch):
    assert tokens_and_calls(model, monkeypatch, **settings)[1] == 12
