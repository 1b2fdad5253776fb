"""The configuration of a GGUF file's model, from its metadata.

Which key is which setting stands in transformers' own tables. What these leave out and llama.cpp computes with is read
here, with llama.cpp's meaning and defaults: rotations and their scaling, soft caps, sliding windows, experts. A key
that nothing reads is refused by name, unless it changes no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import AutoConfig, PretrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS, get_gguf_config

from .gguf import GGUFFile, TensorEntry

# Keys that change no number that the model computes.
HARMLESS = {"vocab_size", "context_length", "tensor_data_layout", "rope.scaling.finetuned", "leading_dense_block_count",
            "rope.scaling.original_context_length"}  # fmt: skip
# Keys that may be there with a value that changes nothing, where the architecture does not read them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "attention.max_alibi_bias": (0,), "attention.clamp_kqv": (0,),
    "attention.sliding_window": (0,), "attention.shared_kv_layers": (0,), "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,), "router_logit_softcapping": (0,), "logit_scale": (0, 1), "residual_scale": (0, 1),
    "embedding_scale": (0, 1), "expert_count": (0,), "expert_used_count": (0,), "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1), "expert_group_count": (0, 1), "expert_group_used_count": (0, 1),
    "nextn_predict_layers": (0,), "pooling_type": (0,), "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_attn_factor": (1,), "rope.scaling.yarn_log_multiplier": (0,), "rope.scaling.alpha": (0,),
    "rope.scaling.attn_factor": (1,), "swin_norm": (False,),
}  # fmt: skip
GATED_BY_SIGMOID = 2  # expert_gating_func


class Metadata:
    """The values that a file has under its architecture's name. It remembers which of them were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.architecture = values, str(values.get("general.architecture"))
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any type; the default if there is none."""
        self._read.add(key)
        return self.values.get(f"{self.architecture}.{key}", default)

    def one(self, key: str, default: Any = None) -> Any:
        """A value that must be there and be the same in all layers. Raises ValueError otherwise."""
        value = self.get(key, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{self.architecture}.{key} differs between layers, which is not supported: {value}")
            value = value[0]
        if value is None:
            raise ValueError(f"its metadata lacks {self.architecture}.{key}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.one(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.architecture}.{key} = {value!r} must be a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number that is not negative."""
        value = self.one(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ValueError(f"{self.architecture}.{key} = {value!r} must be a finite number of at least 0")
        return float(value)

    def read_all_but(self, prefix: str) -> None:
        """Count all keys as read but those that begin with this."""
        start = f"{self.architecture}."
        self._read |= {key.removeprefix(start) for key in self.values if not key.startswith(start + prefix)}

    def check_rest(self) -> None:
        """Raises ValueError, with the key and its value, for a key that was not read and may change a number."""
        start = f"{self.architecture}."
        for full, value in self.values.items():
            key = full.removeprefix(start)
            if not full.startswith(start) or key in self._read or key in HARMLESS or value in NEUTRAL.get(key, ()):
                continue
            if key in NEUTRAL:
                allowed = " and ".join(map(str, NEUTRAL[key]))
                raise ValueError(
                    f"{full} = {value!r} is not supported; only {allowed} {'is' if len(NEUTRAL[key]) == 1 else 'are'}"
                )
            raise ValueError(f"{full} = {value!r} is not supported: it may change what the model computes")


Settings = dict[str, Any]


class Architecture(NamedTuple):
    """An architecture of GGUF files that can be loaded.

    model: what transformers calls its configuration. more(metadata, file, settings): the settings that transformers'
    table leaves out; None where that library's own function reads them all.
    """

    model: str
    more: Callable[[Metadata, GGUFFile, Settings], Settings] | None


def _plain(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    """Models of Llama's form; biases where the file has them."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "sliding_window": None,
    }


def _qwen_moe(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    """Qwen's models of experts. Width of an expert: as llama.cpp has it where the file does not say."""
    used, width = settings["num_experts_per_tok"], settings.get("intermediate_size", 0)
    more = {"moe_intermediate_size": metadata.count("expert_feed_forward_length", width // used or None)}
    if metadata.architecture == "qwen2moe":
        more["shared_expert_intermediate_size"] = metadata.count("expert_shared_feed_forward_length", width or None)
        _only(metadata, "expert_weights_norm", False)
    else:
        _only(metadata, "expert_weights_norm", True)
    metadata.get("expert_shared_count")  # the shared experts of all counts are one matrix
    return more


def _gpt_oss(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    """gpt-oss: every other layer slides."""
    return {
        "intermediate_size": metadata.count("expert_feed_forward_length"),
        "sliding_window": metadata.count("attention.sliding_window"),
        "layer_types": _layer_types(metadata, settings, 2),
    }


def _gemma(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    """Gemma 2 and 3: soft caps, and layers that slide."""
    layers, heads = settings["num_hidden_layers"], settings["num_attention_heads"]
    second = metadata.architecture == "gemma2"
    # llama.cpp tells the models of 27 thousand million parameters by their layers
    largest = layers == (46 if second else 62)
    final = metadata.number("final_logit_softcapping", 30.0 if second else 0.0)
    more: Settings = {
        "query_pre_attn_scalar": settings["hidden_size"] // heads if largest else settings["head_dim"],
        "final_logit_softcapping": final or None,
    }
    window = metadata.get("attention.sliding_window", 4096 if second else 0)
    if second:
        more["attn_logit_softcapping"] = metadata.number("attn_logit_softcapping", 50.0) or None
    if window:
        more |= {
            "sliding_window": metadata.count("attention.sliding_window", window),
            "layer_types": _layer_types(metadata, settings, 2 if second else 6),
        }
    else:
        more["layer_types"] = ["full_attention"] * layers
    if not second:
        sliding = metadata.number("rope.freq_base_swa", 10000.0)
        more["rope_parameters"] = {
            "full_attention": settings["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
        }
    elif metadata.get("rope.freq_base_swa", theta := settings["rope_parameters"]["rope_theta"]) != theta:
        raise ValueError(f"gemma2.rope.freq_base_swa is not supported; only that of all layers, {theta}, is")
    return more


def _phi3(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    """Phi-3 and Phi-4-mini: two lists of factors for long contexts. As in llama.cpp, no layer slides."""
    metadata.get("attention.sliding_window")
    more: Settings = {"sliding_window": None}
    names = [f"rope_factors_{length}.weight" for length in ("long", "short")]
    if all(name in file.tensors for name in names):
        long, short = (file.floats(file.tensors[name]).tolist() for name in names)
        rope = settings["rope_parameters"]
        rope |= {
            "rope_type": "longrope", "long_factor": long, "short_factor": short,
            "attention_factor": metadata.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": metadata.count(
                "rope.scaling.original_context_length", settings["max_position_embeddings"]
            ),
        }  # fmt: skip
        more["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return more


def _stablelm(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    """StableLM: biases and a second normalisation where the file has them."""
    parallel = "blk.0.ffn_norm.weight" not in file.tensors
    _only(metadata, "use_parallel_residual", parallel)
    return {"use_qkv_bias": "blk.0.attn_q.bias" in file.tensors, "use_parallel_residual": parallel}


def _starcoder2(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    return {"use_bias": "blk.0.attn_q.bias" in file.tensors, "sliding_window": None}


def _gpt2(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    return {"n_positions": settings["n_ctx"], "n_inner": settings["feed_forward_length"]}


def _minimax_m2(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    _only(metadata, "expert_gating_func", GATED_BY_SIGMOID)
    return {"intermediate_size": metadata.count("expert_feed_forward_length")}


def _no_more(metadata: Metadata, file: GGUFFile, settings: Settings) -> Settings:
    return {}


ARCHITECTURES = {
    "llama": Architecture("llama", _plain),
    "mistral": Architecture("mistral", _plain),
    "qwen2": Architecture("qwen2", _no_more),
    "qwen3": Architecture("qwen3", _plain),
    "qwen2moe": Architecture("qwen2_moe", _qwen_moe),
    "qwen3moe": Architecture("qwen3_moe", _qwen_moe),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss),
    "gemma2": Architecture("gemma2", _gemma),
    "gemma3": Architecture("gemma3_text", _gemma),
    "phi3": Architecture("phi3", _phi3),
    "stablelm": Architecture("stablelm", _stablelm),
    "starcoder2": Architecture("starcoder2", _starcoder2),
    "nemotron": Architecture("nemotron", _plain),
    "gpt2": Architecture("gpt2", _gpt2),
    "minimax-m2": Architecture("minimax_m2", _minimax_m2),
    **{name: Architecture(name, None) for name in GGUF_CONFIG_ARCHS},
}

# Architectures whose files are not loaded, and why: those that transformers reads, and GLM's, which it does not.
REFUSED = {
    "falcon": "its attention does not take another function",
    "bloom": "its attention does not take another function",
    "mamba": "it has no attention",
    "t5": "it is an encoder-decoder",
    "t5encoder": "it has no decoder",
    "deci": "its layers differ in their numbers of heads",
    "gemma4": "transformers' table reads neither the widths of its sliding layers nor its shared keys and values",
    **dict.fromkeys(("chatglm", "glm4", "glm4moe"), "transformers has no table of its metadata"),
}


def read_configuration(file: GGUFFile) -> PretrainedConfig:
    """The model's configuration. Raises ValueError for metadata that is missing, damaged or not supported."""
    metadata, tensors = Metadata(file.metadata), file.tensors
    architecture = ARCHITECTURES[metadata.architecture]
    if "token_embd.weight" not in tensors:
        raise ValueError("token_embd.weight is missing")
    layers, stored = metadata.count("block_count"), len({n.split(".")[1] for n in tensors if n.startswith("blk.")})
    if layers != stored:  # before a model of that many layers is made
        raise ValueError(f"the metadata say {layers} layers; {stored} layers are there")
    if architecture.more is None:
        settings = _by_function(metadata, tensors)
    else:
        settings = _by_table(metadata, file, architecture)
        settings |= architecture.more(metadata, file, settings)
    _check_sizes(metadata, settings, tensors)
    metadata.check_rest()
    ends = [file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    settings |= {
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({end for end in ends if end is not None}) or None,
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "vocab_size": tensors["token_embd.weight"].shape[0],
    }
    padding, tokens = settings["pad_token_id"], settings["vocab_size"]
    if padding is not None and not (isinstance(padding, int) and 0 <= padding < tokens):
        raise ValueError(f"tokenizer.ggml.padding_token_id = {padding!r} is no token; there are {tokens}")
    config: PretrainedConfig = AutoConfig.for_model(settings.pop("model_type", architecture.model), **settings)
    return config


def _by_function(metadata: Metadata, tensors: Mapping[str, TensorEntry]) -> Settings:
    """The settings of an architecture for which transformers has a function."""
    vocabulary = {"tokenizer.ggml.tokens": tensors["token_embd.weight"].shape[0]}
    settings: Settings = get_gguf_config({**metadata.values, **vocabulary}, tuple(tensors))
    metadata.read_all_but("rope.scal")
    _only(metadata, "attention.value_length", metadata.get("attention.key_length"))
    for key in ("attention.causal", "attention.sliding_window"):
        if (value := metadata.get(key)) is not None and value not in NEUTRAL[key]:
            raise ValueError(f"{metadata.architecture}.{key} = {value!r} is not supported; only {NEUTRAL[key][0]} is")
    return settings


def _by_table(metadata: Metadata, file: GGUFFile, architecture: Architecture) -> Settings:
    """The settings of transformers' table, and those that all models of these architectures have."""
    name = architecture.model.removesuffix("_text")
    tables: Mapping[str, Any] = GGUF_CONFIG_MAPPING
    table: Mapping[str, str | None] = tables[name]
    settings: Settings = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(name, {}))
    for key, setting in table.items():
        if setting is None or key in LATER:
            continue
        if key.startswith("attention.layer_norm"):
            settings[setting] = metadata.number(_epsilon(metadata, PLAIN_NORM if name == "nemotron" else key))
        elif key == "attention.head_count_kv":
            settings[setting] = metadata.count(key, metadata.count("attention.head_count"))
        elif key != "feed_forward_length" or metadata.get(key) or "expert_count" not in table:
            settings[setting] = metadata.count(key)
    heads, width = metadata.count("attention.head_count"), metadata.count("embedding_length")
    size = metadata.count("attention.key_length", width // heads)
    _only(metadata, "attention.value_length", size)
    if size * heads != width and name in WITHOUT_HEAD_SIZE:
        raise ValueError(
            f"{metadata.architecture}.attention.key_length = {size} is not supported; only {width // heads} is"
        )
    settings["head_dim"] = size
    if name == "gpt2":
        return settings
    settings["rope_parameters"] = _rotation(metadata, size, partly=name in PARTLY_ROTATED)
    return settings


# Keys of transformers' table that are read here in another way.
LATER = {"rope.freq_base", "rope.dimension_count", "attention.key_length", "attention.sliding_window", "vocab_size",
         "sliding_window", "expert_gating_func"}  # fmt: skip
PLAIN_NORM, RMS_NORM = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
WITHOUT_HEAD_SIZE = {"phi3", "stablelm", "starcoder2", "gpt2"}
PARTLY_ROTATED = {"phi3", "stablelm", "nemotron", "minimax_m2"}


def _epsilon(metadata: Metadata, needed: str) -> str:
    """The key of the normalisations' epsilon: the one that the architecture needs, unless only the other is there."""
    other = RMS_NORM if needed == PLAIN_NORM else PLAIN_NORM
    return other if metadata.get(needed) is None and metadata.get(other) is not None else needed


def _rotation(metadata: Metadata, size: int, partly: bool) -> Settings:
    """How queries and keys of `size` channels are turned. partly: the model's code can turn the first channels only."""
    name = metadata.architecture
    rope: Settings = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10000.0)}
    turned = metadata.count("rope.dimension_count", size)
    if partly:
        rope["partial_rotary_factor"] = turned / size
    elif turned != size:
        raise ValueError(f"{name}.rope.dimension_count = {turned} is not supported; only {size} is")
    kind = metadata.get("rope.scaling.type", "linear")
    old = metadata.number("rope.scale_linear", 0.0)
    factor = metadata.number("rope.scaling.factor", old) or 1.0
    if kind == "yarn":
        # llama.cpp multiplies the factor of its own by that of the file
        attention = (1 + 0.1 * math.log(factor)) * metadata.number("rope.scaling.attn_factor", 1.0)
        return rope | {
            "rope_type": "yarn", "factor": factor, "attention_factor": attention,
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
            "original_max_position_embeddings": metadata.count(
                "rope.scaling.original_context_length", metadata.count("context_length")
            ),
        }  # fmt: skip
    if kind not in ("none", "linear") and not (kind == "longrope" and name == "phi3"):
        raise ValueError(f"{name}.rope.scaling.type = {kind!r} is not supported; only none, linear and yarn are")
    if kind != "none" and factor != 1.0:
        rope |= {"rope_type": "linear", "factor": factor}
    return rope


def _layer_types(metadata: Metadata, settings: Settings, default: int) -> list[str]:
    """Which layers slide: a list of the file, or all but every n-th."""
    layers = settings["num_hidden_layers"]
    pattern = metadata.get("attention.sliding_window_pattern", default)
    if isinstance(pattern, list):
        if len(pattern) < layers:
            raise ValueError(f"attention.sliding_window_pattern has {len(pattern)} values for {layers} layers")
        slides = [bool(value) for value in pattern[:layers]]
    elif isinstance(pattern, int) and pattern >= 0:
        slides = [pattern == 0 or i % pattern < pattern - 1 for i in range(layers)]
    else:
        raise ValueError(f"attention.sliding_window_pattern = {pattern!r} must be a whole number of at least 0")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _only(metadata: Metadata, key: str, expected: Any) -> None:
    """Raises ValueError if a key is there with another value."""
    if (value := metadata.get(key, expected)) != expected:
        raise ValueError(f"{metadata.architecture}.{key} = {value} is not supported; only {expected} is")


def _check_sizes(metadata: Metadata, settings: Settings, tensors: Mapping[str, TensorEntry]) -> None:
    """Raises ValueError if a size is not that of the tensors: before a model is made, which a wrong size could fill."""
    entry, width = tensors["token_embd.weight"], metadata.count("embedding_length")
    if len(entry.shape) != 2 or entry.shape[1] != width:
        raise ValueError(f"{entry.name} is {entry.shape}; the metadata say {(entry.shape[0], width)}")
    heads, kv_heads = metadata.count("attention.head_count"), settings.get("num_key_value_heads")
    size = settings.get("head_dim") or width // heads
    counts = {"attn_q": heads, "attn_k": kv_heads or heads, "attn_qkv": heads + 2 * (kv_heads or heads)}
    if metadata.architecture in GGUF_CONFIG_ARCHS:
        return
    for name, count in counts.items():
        entry = tensors.get(f"blk.0.{name}.weight", entry)
        if entry.name.endswith(f"{name}.weight") and entry.shape[0] != count * size:
            raise ValueError(f"the metadata say {count} x {size} rows; {entry.name} has {entry.shape[0]}")
