"""A pipeline of transformers, and streams: with attach, and with a cache for each call."""

import threading
from functools import partial

import peft
import pytest
from transformers import TextIteratorStreamer, pipeline

import skimkv
from support.generation import GREEDY, N
from support.tiny_models import family, prompt, tokenizer

WORDS = tokenizer()
TEXTS = [WORDS.decode(row) for row in (*prompt(1, N), *prompt(1, 9, 1), *prompt(1, 14, 2))]
OPTIONS = {"return_full_text": False, **GREEDY}
FULL, DROPS = ["Dense()", "TopK(k=128)", "H2O(k=128)"], "LMInfinite(k=4, initial=1)"


def text_generation(model):
    return pipeline("text-generation", model=model, tokenizer=WORDS, device="cpu")


@pytest.fixture
def generate():
    yield text_generation(family("llama"))
    skimkv.detach(family("llama"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_attach(name, batch_size):
    model = family(name)
    generate, options = text_generation(model), {"batch_size": batch_size, **OPTIONS}
    expected = generate(TEXTS, **options)
    for spec in FULL:
        with skimkv.attach(model, spec):
            assert generate(TEXTS, **options) == expected
    with skimkv.attach(model, DROPS):
        assert generate(TEXTS, **options) != expected, "a method that drops tokens must change the text"


@pytest.mark.parametrize("spec", FULL)
def test_a_cache_for_each_call(generate, spec):
    model = generate.model
    for text in TEXTS:
        expected = generate(text, **OPTIONS)
        assert generate(text, past_key_values=skimkv.Cache(model, spec), **OPTIONS) == expected
    together = generate(TEXTS, batch_size=3, **OPTIONS)
    assert generate(TEXTS, batch_size=3, past_key_values=skimkv.Cache(model, spec), **OPTIONS) == together


def test_a_cache_of_another_text_is_refused(generate):
    """A pipeline without batch_size hands the same cache to every text of a list."""
    with pytest.raises(ValueError, match=r"^the cache holds 43 tokens and the prompt has 9: .* or a new cache$"):
        generate(TEXTS, past_key_values=skimkv.Cache(generate.model, "Dense()"), **OPTIONS)


def test_a_model_of_peft():
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(skimkv.load("builtin", dtype="float32")[0], config).eval()
    generate = pipeline("text-generation", model=model, tokenizer=skimkv.load("builtin")[1], device="cpu")
    expected = generate("red-fox: 31425", **OPTIONS)
    with skimkv.attach(model, "H2O(k=128)"):
        assert generate("red-fox: 31425", **OPTIONS) == expected


def streamed(call, **request):
    """The text that a call streams from a thread of its own."""
    streamer = TextIteratorStreamer(WORDS, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=call, kwargs={**request, "streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    return text


@pytest.mark.parametrize("spec", [*FULL, DROPS])
def test_a_stream_of_a_thread_inside_the_with(generate, spec):
    """What streams is the text that generate() returns, where the stream is read to its end before the `with` ends."""
    model, inputs = generate.model, WORDS(TEXTS[0], return_tensors="pt")
    with skimkv.attach(model, spec):
        expected = WORDS.decode(model.generate(**inputs, **GREEDY)[0, N:])
        assert streamed(model.generate, **inputs, **GREEDY) == expected
        assert streamed(partial(generate, TEXTS[0]), **OPTIONS) == expected
    cache = skimkv.Cache(model, spec)
    assert streamed(model.generate, **inputs, past_key_values=cache, **GREEDY) == expected
