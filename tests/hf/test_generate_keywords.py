"""Every keyword that the library documents for generate() works as with the model's own attention, or is refused."""

import contextlib
import copy
import inspect
import re

import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
)

import skimkv
from support.generation import N, draft_of
from support.refusals import refuses
from support.tiny_models import VOCAB, build, family, prompt

SAMPLE, BEAM = {"do_sample": True}, {"num_beams": 3}
LOOKUP = {"prompt_lookup_num_tokens": 3}


def letters(tokens=VOCAB):
    """One letter per token; a text may stop at any string of them."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({chr(33 + i): i for i in range(tokens)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def drafted(**options):
    return lambda: {"assistant_model": draft_of(family("llama")), **options}


def drafted_in_other_tokens(**options):
    """The draft of a model with fewer tokens passes from one tokenizer to the other as text."""
    draft = build("llama", num_key_value_heads=2, head_dim=16, vocab_size=VOCAB - 7)
    tokenizers = {"tokenizer": letters(), "assistant_tokenizer": letters(VOCAB - 7)}
    return lambda: {"assistant_model": draft, **tokenizers, **options}


class Streamer:
    """It takes tokens and keeps none."""

    def put(self, tokens): ...

    def end(self): ...


@torch.no_grad()
def every_second_token(model, input_ids, **options):
    """A way to generate that somebody else wrote: it appends the second most likely token."""
    cache = options["past_key_values"]
    for _ in range(5):
        logits = model(input_ids[:, cache.get_seq_length() :], past_key_values=cache).logits
        input_ids = torch.cat([input_ids, logits[:, -1].topk(2).indices[:, 1:]], 1)
    return input_ids


# keyword -> generate()'s arguments in which it takes part; a function makes them anew for every call
WORKING = {
    "max_length": {"max_length": N + 9, "max_new_tokens": None},
    "max_new_tokens": {"max_new_tokens": 3},
    "min_length": {"min_length": N + 5, "eos_token_id": 40},
    "min_new_tokens": {"min_new_tokens": 5, "eos_token_id": 40},
    "early_stopping": {"early_stopping": True, **BEAM},
    "max_time": {"max_time": 600.0},
    "stop_strings": lambda: {"stop_strings": [chr(33 + i) for i in range(3, 50)], "tokenizer": letters()},
    "do_sample": SAMPLE,
    "num_beams": BEAM,
    "use_cache": {"use_cache": True},
    "temperature": {"temperature": 0.7, **SAMPLE},
    "top_k": {"top_k": 5, **SAMPLE},
    "top_p": {"top_p": 0.5, **SAMPLE},
    "min_p": {"min_p": 0.1, **SAMPLE},
    "top_h": {"top_h": 0.5, **SAMPLE},
    "typical_p": {"typical_p": 0.5, **SAMPLE},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01, **SAMPLE},
    "eta_cutoff": {"eta_cutoff": 0.01, **SAMPLE},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "length_penalty": {"length_penalty": 2.0, **BEAM},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [6, 7]]},
    "renormalize_logits": {"renormalize_logits": True, **BEAM},
    "forced_bos_token_id": {"forced_bos_token_id": 9},
    "forced_eos_token_id": {"forced_eos_token_id": 9},
    "remove_invalid_values": {"remove_invalid_values": True},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 40},
    "suppress_tokens": {"suppress_tokens": [5, 6]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [5, 6]},
    "sequence_bias": {"sequence_bias": [[[5], 2.0]]},
    "guidance_scale": lambda: {"guidance_scale": 1.5, "negative_prompt_ids": prompt(1, 9, 3)},
    "watermarking_config": {"watermarking_config": {"bias": 2.5, "seeding_scheme": "selfhash"}},
    "num_return_sequences": {"num_return_sequences": 2, **SAMPLE},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "pad_token_id": {"pad_token_id": 2},
    "bos_token_id": {"bos_token_id": 1},
    "eos_token_id": {"eos_token_id": list(range(3, 30))},
    "num_assistant_tokens": drafted(num_assistant_tokens=3),
    "num_assistant_tokens_schedule": drafted(num_assistant_tokens_schedule="heuristic"),
    "assistant_confidence_threshold": drafted(assistant_confidence_threshold=0.2),
    "assistant_early_exit": {"assistant_early_exit": 1},
    "prompt_lookup_num_tokens": LOOKUP,
    "max_matching_ngram_size": {"max_matching_ngram_size": 1, **LOOKUP},
    "assistant_ensemble_weight": drafted(assistant_ensemble_weight=0.5, **SAMPLE),
    "assistant_lookbehind": drafted_in_other_tokens(assistant_lookbehind=5),
    "target_lookbehind": drafted_in_other_tokens(target_lookbehind=5),
    "disable_compile": {"disable_compile": True},
    "compile_config": {"compile_config": CompileConfig()},
    "low_memory": {"low_memory": True},
    "prefill_chunk_size": {"prefill_chunk_size": 7},
    "logits_processor": lambda: {"logits_processor": LogitsProcessorList([lambda ids, scores: -scores])},
    "stopping_criteria": lambda: {
        "stopping_criteria": StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] > N + 4])])
    },
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(3, 40))},
    "negative_prompt_ids": lambda: {"guidance_scale": 2.0, "negative_prompt_ids": prompt(1, 9, 3)},
    "negative_prompt_attention_mask": lambda: {
        "guidance_scale": 2.0,
        "negative_prompt_ids": prompt(1, 9, 3),
        "negative_prompt_attention_mask": (torch.arange(9) > 3).long()[None],
    },
    "synced_gpus": {"synced_gpus": False},
    "assistant_model": drafted(),
    "streamer": lambda: {"streamer": Streamer()},
    "generation_config": {"generation_config": GenerationConfig(repetition_penalty=1.3, pad_token_id=0)},
    "custom_generate": {"custom_generate": every_second_token},
}
# keyword -> arguments, and what the refusal names
REFUSED = {
    "output_attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    "cache_implementation": ({"cache_implementation": "static"}, "cache_implementation"),
    "cache_config": ({"cache_implementation": "quantized", "cache_config": {}}, "cache_implementation"),
    "max_cache_len": ({"cache_implementation": "static", "max_cache_len": 99}, "cache_implementation"),
}
# keyword -> arguments that the library itself refuses for these models, and what it names
REFUSED_BY_THE_LIBRARY = {
    "dola_layers": ({"dola_layers": "high"}, "trust_remote_code"),
    "penalty_alpha": ({"penalty_alpha": 0.6, "top_k": 4}, "trust_remote_code"),
    "num_beam_groups": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "trust_remote_code"),
    "diversity_penalty": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "trust_remote_code"),
    "force_words_ids": ({"force_words_ids": [[5]], **BEAM}, "trust_remote_code"),
    "constraints": ({"constraints": [1], **BEAM}, "trust_remote_code"),
    "use_mtp": ({"use_mtp": True}, "num_mtp_layers"),
}
# they are about an encoder, generate_batch() or another kind of draft, or the library alone sets them
ELSEWHERE = {
    "decoder_start_token_id", "is_assistant", "speculation_type", "token_healing", "continuous_batching_config",
    "transformers_version",
}  # fmt: skip
DECIDED = {*WORKING, *REFUSED, *REFUSED_BY_THE_LIBRARY, *ELSEWHERE}


@pytest.fixture
def model():
    model = copy.deepcopy(family("llama"))
    model.generation_config.pad_token_id = 0
    return model


def tokens(model, arguments, **options):
    arguments = arguments() if callable(arguments) else arguments
    torch.manual_seed(3)
    out = model.generate(prompt(1, N), **{"max_new_tokens": 12, "do_sample": False, **arguments, **options})
    return getattr(out, "sequences", out).tolist()


def test_every_documented_keyword_is_here():
    documented = set(re.findall(r"^\s*(\w+) \(`", inspect.getdoc(GenerationConfig) or "", re.M))
    assert len(documented) > 40
    assert documented <= DECIDED, documented - DECIDED


def test_every_attribute_of_a_generation_config_is_here():
    """Also those that are not documented, and the parameters of generate(): a new one fails until it is decided."""
    attributes = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    parameters = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "inputs", "kwargs"}
    assert len(attributes) > 60 and len(parameters) > 8
    assert attributes | parameters <= DECIDED, (attributes | parameters) - DECIDED


@pytest.mark.slow
@pytest.mark.parametrize("keyword", WORKING)
def test_a_keyword_that_works(model, keyword):
    arguments = WORKING[keyword]
    expected = tokens(model, arguments)
    for spec in ("SparQ(r=4, k=128)", "H2O(k=128)"):
        with skimkv.attach(model, spec):
            assert tokens(model, arguments) == expected
    assert tokens(model, arguments, past_key_values=skimkv.Cache(model, "H2O(k=128)")) == expected


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_is_refused(model, keyword):
    arguments, named = REFUSED[keyword]
    with skimkv.attach(model, "SparQ(r=4, k=128)"):
        refuses(lambda: tokens(model, arguments), named)
    refuses(lambda: tokens(model, arguments, past_key_values=skimkv.Cache(model, "H2O(k=128)")), named)


@pytest.mark.parametrize("keyword", [name for name in REFUSED_BY_THE_LIBRARY if hasattr(GenerationConfig(), name)])
def test_a_keyword_that_the_library_refuses(model, keyword):
    arguments, named = REFUSED_BY_THE_LIBRARY[keyword]
    for spec in (None, "SparQ(r=4, k=128)"):
        attached = skimkv.attach(model, spec) if spec else contextlib.nullcontext()
        with attached, pytest.raises(ValueError, match=named):
            tokens(model, arguments)


def test_continuous_batching_is_refused(model):
    with skimkv.attach(model, "Dense()"), pytest.raises(ValueError, match=r"skimkv.* is not supported"):
        model.generate_batch([prompt(1, N)[0].tolist()], progress_bar=False)


def test_no_cache_at_all_is_refused(model):
    match = r"^use_cache=False: Dense\(\) decodes from its cache; leave it out, or detach\(model\)$"
    with skimkv.attach(model, "Dense()"), pytest.raises(ValueError, match=match):
        tokens(model, {"use_cache": False})
    with pytest.raises(ValueError, match=match):
        tokens(model, {"use_cache": False}, past_key_values=skimkv.Cache(model, "Dense()"))


@torch.no_grad()
def guided(model, prompt_cache, negative_cache):
    """Classifier-free guidance by hand: the tokens that the log-likelihoods of two texts choose together."""
    text, negative, out = prompt(1, N), prompt(1, 9, 3), []
    for _ in range(12):
        wanted = model(text, past_key_values=prompt_cache).logits[:, -1].log_softmax(-1)
        unwanted = model(negative, past_key_values=negative_cache).logits[:, -1].log_softmax(-1)
        out.append((2 * (wanted - unwanted) + unwanted).argmax(-1, keepdim=True))
        text = negative = out[-1]
    return torch.cat([prompt(1, N), *out], 1).tolist()


def test_guidance_decodes_both_texts_with_the_method(model):
    spec, options = "LMInfinite(k=3, initial=1)", WORKING["negative_prompt_ids"]
    assert tokens(model, options) == guided(model, DynamicCache(), DynamicCache())
    expected = guided(model, skimkv.Cache(model, spec), skimkv.Cache(model, spec))
    assert expected != guided(model, skimkv.Cache(model, spec), DynamicCache())
    with skimkv.attach(model, spec):
        assert tokens(model, options) == expected
        assert tokens(model, options, past_key_values=DynamicCache()) == guided(model, DynamicCache(), DynamicCache())
    assert tokens(model, options, past_key_values=skimkv.Cache(model, spec)) == expected


def test_prompt_as_embeddings(model):
    embeddings = model.get_input_embeddings()(prompt(1, N)).detach()
    options = {"inputs_embeds": embeddings, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**options).tolist()
    with skimkv.attach(model, "SparQ(r=4, k=128)"):
        assert model.generate(**options).tolist() == expected
    assert model.generate(**options, past_key_values=skimkv.Cache(model, "H2O(k=128)")).tolist() == expected


@pytest.mark.parametrize("compiled", [False, "eager"])
@pytest.mark.parametrize("spec", ["SparQ(r=16, k=128)", "H2O(k=128)"])
def test_autocast(model, spec, compiled):
    """The same logits as the model's own attention in autocast, to bfloat16's rounding."""
    ids = prompt(1, N)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        own = model(ids).logits[:, -5:]
        skimkv.attach(model, spec, compile=compiled)
        cache = skimkv.Cache(model, spec)
        model(ids[:, : N - 4], past_key_values=cache)
        got = torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(N - 4, N)], 1)
    assert cache.stores[0].dtype == torch.bfloat16
    assert (got - own[:, 1:]).abs().max() < 20 * torch.finfo(torch.bfloat16).eps * own.abs().max()
