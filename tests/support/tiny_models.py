"""Tiny random models of every family that is tested: two layers, hidden size 64, 97 tokens, float32."""

import functools
from collections.abc import Iterable

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.generation import candidate_generator

from support.random_models import random_model

# With scikit-learn transformers adapts a draft's threshold, and 5.17 then fails on the draft's own sliding cache.
candidate_generator.is_sklearn_available = lambda: False

VOCAB = 97
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 160,
    # a random model generates every token: none of them may end the text, or be masked by generate()
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

# name -> (model type, configuration on top of _SIZES)
FAMILIES = {
    "llama": ("llama", _GROUPED),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": None}),
    "mistral-sliding": ("mistral", {**_GROUPED, "sliding_window": 8}),
    "gemma": ("gemma", _GROUPED),
    # logits of these models reach 40: the cap bends them, and a lower one would make them all equal
    "gemma2": ("gemma2", {**_GROUPED, **_MIXED, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 4}),
    "gemma3": ("gemma3_text", {**_GROUPED, **_MIXED, "query_pre_attn_scalar": 16}),
    "gpt_neox": ("gpt_neox", {}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "qwen3": ("qwen3", _GROUPED),
    "phi3": ("phi3", {"num_key_value_heads": 2, "sliding_window": None}),
    "gpt2": ("gpt2", {}),
    "mixtral": ("mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "gpt_oss": ("gpt_oss", {**_GROUPED, **_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
WITH_FULL_ATTENTION = [name for name in FAMILIES if name != "mistral-sliding"]
# The families of the quick run: grouped queries; a cap on logits and sliding layers; biases and learned positions;
# parallel attention; norms of queries and keys; a mixture of experts; attention sinks.
QUICK = ("llama", "gemma2", "gpt2", "gpt_neox", "qwen3", "mixtral", "gpt_oss")


def with_slow(names: Iterable[str], quick: Iterable[str] = QUICK) -> list[object]:
    """These families as parameters of a test; those that are not in `quick` run only where slow tests do."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@torch.inference_mode(False)  # a test may ask for one in this mode first, and another one may train it
def build(kind: str, **options: object) -> torch.nn.Module:
    """A random model of this type, its weights large enough that attention matters to every token."""
    known = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 160} if kind == "gpt2" else {}
    # before 5.21 the library's sdpa ignores the cap on gemma2's logits, and sdpa is its default
    own = {"attn_implementation": "eager"} if kind == "gemma2" else {}
    return random_model(CONFIG_MAPPING[kind](**{**_SIZES, **known, **options}), **own)


@torch.inference_mode(False)
def new_family(name: str) -> torch.nn.Module:
    """A model of a family for one test alone, on which no other test has left hooks."""
    kind, options = FAMILIES[name]
    return build(kind, **options)


family = functools.cache(new_family)  # for tests that leave it as it was


def prompt(rows: int = 1, n: int = 24, seed: int = 0) -> torch.Tensor:
    """Random tokens (rows, n), none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (rows, n), generator=generator)


def padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """A left-padded batch of rows of these lengths."""
    n = max(lengths)
    ids, mask = prompt(len(lengths), n, seed), torch.ones(len(lengths), n, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, : n - length], mask[row, : n - length] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def tokenizer() -> object:
    """One word per token: w3 w4 ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)
