"""Tiny random models of any causal family that transformers has, made from the family's own default configuration.

Sizes are made small, and everything else stays as the library's defaults say. There are as few layers as show every
kind of layer that the default configuration has.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from skimkv.hf.tiny_sizes import SIZES

WINDOW = 8  # of sliding layers

MOST_LAYERS = 12
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers")
# No token may end the text, or be masked by generate().
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")

WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size", "attention_chunk_size", "window_size")

# What a family needs besides: sizes that must fit one another, and layers of the kinds that its published models have
# where the default configuration has but one kind. `...` leaves the library's default.
_CONV = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
_ROTARY = {"rope_theta": 10000.0}
_ASSISTANT = {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_hidden_layers": 2,
    "num_kv_shared_layers": 2,
}  # fmt: skip
PARTICULAR: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "mrope_section": [4, 2, 2], **_ROTARY}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, **_ROTARY}},
    "dots3_note": {
        "text_config": {"num_key_value_heads": 4, "head_dim": ...},
        "vision_config": {"num_hidden_layers": ..., "adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": {"num_key_value_heads": 4, "head_dim": ...},
    "gemma4": {"text_config": {"pad_token_id": 0}},
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_ASSISTANT}},
    "gemma4_unified_assistant": {"text_config": {"model_type": "gemma4_unified_text", **_ASSISTANT}},
    "gemma4_unified": {"text_config": {"pad_token_id": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "lfm2": _CONV,
    "lfm2_moe": _CONV,
    "mamba2": {"num_heads": 8},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {"axial_pos_embds": False},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "num_hidden_layers": 2},
    "zaya": {"num_experts_per_tok": 1},
}


def families() -> list[str]:
    """The model types that transformers.AutoModelForCausalLM knows, in alphabetical order."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def random_model(config: Any, **options: Any) -> PreTrainedModel:
    """A model of this configuration, its random weights large enough that attention matters to every token.

    options: as of AutoModelForCausalLM.from_config.
    """
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_(1, 2)
            elif weight.ndim == 2:
                attends = any(part in name for part in ("attn", "attention"))
                weight.normal_(0, 0.4 if attends else 0.15)
    return model


def tiny_configuration(family: str, **options: Any) -> Any:
    """The default configuration of a family with tiny sizes; options go before them.

    Raises whatever the library raises where it cannot make one.
    """
    kind = CONFIG_MAPPING[family]
    MODEL_FOR_CAUSAL_LM_MAPPING[kind]  # its file may define kinds of layers
    options = {**PARTICULAR.get(family, {}), **options}
    try:
        default = kind()
    except Exception:  # some families have no default configuration
        default = None
    kinds = _layer_kinds(default)
    for layers in range(2, MOST_LAYERS + 1):
        try:
            made = _configuration(kind, default, layers, options)
        except Exception:  # a family may want a multiple of some number
            if layers == MOST_LAYERS:
                raise
            continue
        if _layer_kinds(made) >= kinds:
            return made
    return _configuration(kind, default, 2, options)


def _configuration(kind: Any, default: Any, layers: int, options: dict[str, Any]) -> Any:
    sizes = _sizes(kind, layers)
    for name in kind.sub_configs:
        part = getattr(default, name, None)
        model_type = options.get(name, {}).get("model_type") if part is None else part.model_type
        if model_type is not None:
            part_kind = CONFIG_MAPPING[model_type] if part is None else type(part)
            sizes[name] = {**_sizes(part_kind, layers), "model_type": model_type}
    for name, option in options.items():
        sizes[name] = {**sizes[name], **option} if isinstance(sizes.get(name), dict) else option
    return kind(**_without_ellipses(sizes))


def _without_ellipses(sizes: dict[str, Any]) -> dict[str, Any]:
    given = {name: size for name, size in sizes.items() if size is not ...}
    return {name: _without_ellipses(size) if isinstance(size, dict) else size for name, size in given.items()}


def _sizes(kind: Any, layers: int) -> dict[str, Any]:
    """The tiny sizes of the settings that a kind of configuration has."""
    known = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    sizes = {name: size for name, size in SIZES.items() if name in known}
    sizes |= {name: layers for name in LAYER_COUNTS if name in known}
    sizes |= {name: WINDOW for name in WINDOWS if name in known and isinstance(getattr(kind, name, None), int)}
    sizes |= {name: None if "None" in known[name] else 0 for name in SPECIAL if name in known}
    if "tie_word_embeddings" in known:
        sizes["tie_word_embeddings"] = False
    if "is_decoder" in known:
        sizes["is_decoder"] = True
    return sizes


def _layer_kinds(config: Any) -> set[type[Any]]:
    """The kinds of layers that the library's cache has for a configuration; none if it cannot tell."""
    try:
        return {type(layer) for layer in DynamicCache(config=config).layers}
    except Exception:
        return set()
