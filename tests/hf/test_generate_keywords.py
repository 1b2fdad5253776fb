"""Every keyword that the library documents for generate() works as with the model's own attention, or is refused."""

import copy
import inspect
import re

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedTokenizerFast, StoppingCriteriaList

import skimkv
from support.generation import N, draft_of
from support.tiny_models import VOCAB, family, prompt

SAMPLE, BEAM = {"do_sample": True}, {"num_beams": 3}
LOOKUP = {"prompt_lookup_num_tokens": 3}


def letters():
    """One letter per token; a text may stop at any string of them."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({chr(33 + i): i for i in range(VOCAB)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def drafted(**options):
    return lambda: {"assistant_model": draft_of(family("llama")), **options}


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
    "disable_compile": {"disable_compile": True},
    "prefill_chunk_size": {"prefill_chunk_size": 7},
    "logits_processor": lambda: {"logits_processor": LogitsProcessorList([lambda ids, scores: -scores])},
    "stopping_criteria": lambda: {
        "stopping_criteria": StoppingCriteriaList([lambda ids, scores: torch.tensor([ids.shape[1] > N + 4])])
    },
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(3, 40))},
    "negative_prompt_ids": lambda: {"guidance_scale": 2.0, "negative_prompt_ids": prompt(1, 9, 3)},
    "synced_gpus": {"synced_gpus": False},
}
# keyword -> arguments, and what the refusal names
REFUSED = {
    "output_attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    "cache_implementation": ({"cache_implementation": "static"}, "cache_implementation"),
    "cache_config": ({"cache_implementation": "quantized", "cache_config": {}}, "cache_implementation"),
    "max_cache_len": ({"cache_implementation": "static", "max_cache_len": 99}, "cache_implementation"),
}
# they are about an encoder, set by the library itself, or need a second tokenizer or another kind of head
ELSEWHERE = {"decoder_start_token_id", "is_assistant", "assistant_ensemble_weight", "speculation_type", "token_healing"}


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
    assert documented <= {*WORKING, *REFUSED, *ELSEWHERE}, documented - {*WORKING, *REFUSED, *ELSEWHERE}


@pytest.mark.parametrize("keyword", WORKING)
def test_a_keyword_that_works(model, keyword):
    arguments = WORKING[keyword]
    expected = tokens(model, arguments)
    with skimkv.attach(model, "SparQ(r=4, k=128)"):
        assert tokens(model, arguments) == expected
    assert tokens(model, arguments, past_key_values=skimkv.Cache(model, "H2O(k=128)")) == expected


@pytest.mark.parametrize("keyword", REFUSED)
def test_a_keyword_that_is_refused(model, keyword):
    arguments, named = REFUSED[keyword]
    with skimkv.attach(model, "SparQ(r=4, k=128)"), pytest.raises(ValueError, match=named) as caught:
        tokens(model, arguments)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=named):
        tokens(model, arguments, past_key_values=skimkv.Cache(model, "H2O(k=128)"))


def test_no_cache_at_all_is_refused(model):
    with skimkv.attach(model, "Dense()"), pytest.raises(ValueError, match="use_cache=False"):
        tokens(model, {"use_cache": False})
    with pytest.raises(ValueError, match="use_cache=False"):
        tokens(model, {"use_cache": False}, past_key_values=skimkv.Cache(model, "Dense()"))


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
