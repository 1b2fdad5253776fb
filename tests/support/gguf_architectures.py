"""A tiny GGUF file of every architecture that is loaded, as llama.cpp's converter writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skimkv.hf.gguf_config import ARCHITECTURES, REFUSED
from support.gguf_files import VOCABULARY, Kind, add, add_tokenizer, finish, order_of_heads

SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY) + 3, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
HEAD = {"head_dim": 16}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4}
SHARED_EXPERT, SHARED_EXPERT_KEYS = {"shared_expert_intermediate_size": 64}, {"expert_shared_feed_forward_length": 64}
# Metadata of heads of 16 channels, and of four experts.
HEAD_KEYS = {"attention.key_length": 16, "attention.value_length": 16}
EXPERT_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
LINEAR_ATTENTION = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 2, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


class Tiny(NamedTuple):
    """A tiny model. settings: of its configuration. metadata: keys and values beside those that all files have."""

    settings: dict[str, Any]
    metadata: dict[str, Any]
    names: str = ""  # the architecture whose names of tensors the file has


def rope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4} | more}


CASES: dict[str, Tiny] = {
    "llama": Tiny(HEAD | rope(), {"rope.dimension_count": 16}),
    "qwen2": Tiny(HEAD | rope(), {}),
    "qwen3": Tiny(HEAD | {"head_dim": 32} | rope(), {"attention.key_length": 32, "attention.value_length": 32}),
    "gemma2": Tiny(
        HEAD | rope() | {
            "num_hidden_layers": 4, "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0, "tie_word_embeddings": True,
        },
        HEAD_KEYS | {
            "attention.sliding_window": 8, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": Tiny(
        HEAD | {
            "num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        HEAD_KEYS | {"attention.sliding_window": 8, "rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    ),
    "phi3": Tiny(rope(partial_rotary_factor=0.5), {"rope.dimension_count": 8}),
    "qwen2moe": Tiny(rope() | EXPERTS | SHARED_EXPERT, EXPERT_KEYS | SHARED_EXPERT_KEYS),
    "qwen3moe": Tiny(HEAD | rope() | EXPERTS | {"norm_topk_prob": True}, EXPERT_KEYS | HEAD_KEYS),
    "gpt-oss": Tiny(
        HEAD | {
            "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64,
                "beta_fast": 32.0, "beta_slow": 1.0,
            },
        },
        EXPERT_KEYS | HEAD_KEYS | {
            "attention.sliding_window": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "stablelm": Tiny(rope(partial_rotary_factor=0.25) | {"use_qkv_bias": True}, {"rope.dimension_count": 4}),
    "starcoder2": Tiny(rope(), {}),
    "nemotron": Tiny(HEAD | rope(partial_rotary_factor=0.5), {"rope.dimension_count": 8}),
    "gpt2": Tiny({"n_positions": 256, "n_inner": 96}, {}),
    "minimax-m2": Tiny(
        HEAD | rope(partial_rotary_factor=0.5)
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
        EXPERT_KEYS | HEAD_KEYS | {"expert_gating_func": 2, "rope.dimension_count": 8},
    ),
    "lfm2": Tiny(
        rope() | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False, "conv_L_cache": 3},
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
    "qwen35": Tiny(
        HEAD | LINEAR_ATTENTION | rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1], mrope_interleaved=True),
        HEAD_KEYS | {
            "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0], "full_attention_interval": 2,
            "ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4,
            "ssm.inner_size": 64,
        },
    ),
}  # fmt: skip
CASES["mistral"] = CASES["llama"]
CASES["qwen35moe"] = Tiny(
    CASES["qwen35"].settings | EXPERTS | SHARED_EXPERT, CASES["qwen35"].metadata | EXPERT_KEYS | SHARED_EXPERT_KEYS
)
OFFSET = ("gemma2", "gemma3", "nemotron", "qwen35", "qwen35moe")  # whose normalisations are written with 1 added


def tiny_model(architecture: str) -> PreTrainedModel:
    """A tiny model with random weights; normalisations and biases too are random."""
    torch.manual_seed(0)
    known = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text"}
    name = known.get(architecture, ARCHITECTURES[architecture].model)
    config = AutoConfig.for_model(name, **SIZES | CASES[architecture].settings)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_(0, 0.2)
        elif "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return model


def write(path: Path, architecture: str) -> PreTrainedModel:
    """Write the file, and return the model that it stands for, in float32."""
    model = tiny_model(architecture)
    w = gguf.GGUFWriter(path, architecture)
    _write_metadata(w, architecture, model.config)
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture.replace("mistral", "llama"))
    names = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    state = model.state_dict()
    for full in state:
        if full == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        state[full].copy_(_write_tensor(w, architecture, model, names, full, state[full].clone()))
    finish(w)
    return model


def _write_metadata(w: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    values: dict[str, Any] = {
        "context_length": 256, "embedding_length": 64, "block_count": config.num_hidden_layers,
        "feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2,
    }  # fmt: skip
    if architecture == "gpt2":
        del values["attention.head_count_kv"]
    else:
        values["rope.freq_base"] = 5e4
    epsilon = {"stablelm": "layer_norm_eps", "starcoder2": "norm_epsilon", "nemotron": "norm_eps",
               "gpt2": "layer_norm_epsilon", "lfm2": "norm_eps"}.get(architecture, "rms_norm_eps")  # fmt: skip
    plain = architecture in ("stablelm", "starcoder2", "nemotron", "gpt2")
    values["attention.layer_norm_epsilon" if plain else "attention.layer_norm_rms_epsilon"] = getattr(config, epsilon)
    for key, value in (values | CASES[architecture].metadata).items():
        w.add_key_value(f"{architecture}.{key}", value, gguf.GGUFValueType.get_type(value))
    add_tokenizer(w, config.vocab_size, "gpt-2")


def _write_tensor(
    w: gguf.GGUFWriter, architecture: str, model: Any, names: Any, full: str, value: torch.Tensor
) -> torch.Tensor:
    """Write a parameter as one tensor or several, and return it as the file has it."""
    name, _, suffix = full.rpartition(".")
    if suffix not in ("weight", "bias"):
        name, suffix = full, "weight"
    layer = next((part for part in name.split(".") if part.isdigit()), None)
    if ".experts." in full:
        return _write_experts(w, architecture, f"blk.{layer}.ffn", full, value)
    short = names.get_name(name)
    if full.endswith("e_score_correction_bias"):
        short, suffix = f"blk.{layer}.exp_probs_b", "bias"
    if full.endswith("dt_bias"):
        short, suffix = f"blk.{layer}.ssm_dt", "bias"
    if full.endswith("A_log"):
        short = f"blk.{layer}.ssm_a"
    assert short is not None, full
    to_file, back = _conversion(architecture, model, short, value)
    if suffix == "bias" and architecture == "nemotron":
        to_file = back = lambda x: x
    title = short if short.endswith("ssm_a") else f"{short}.{suffix}"
    keeps_floats = any(part in title for part in ("ffn_gate_inp", "conv", "ssm_alpha", "ssm_beta", "position_embd"))
    return back(add(w, title, to_file(value), Kind.F32 if keeps_floats else Kind.Q8_0))


def _write_experts(w: gguf.GGUFWriter, architecture: str, prefix: str, full: str, value: torch.Tensor) -> torch.Tensor:
    """Experts: the first two matrices apart, of gpt-oss transposed and alternating."""
    kind, is_alternating = "bias" if full.endswith("_bias") else "weight", architecture == "gpt-oss"
    is_turned = is_alternating and kind == "weight"
    value = value.transpose(1, 2) if is_turned else value
    if "down_proj" in full:
        result = add(w, f"{prefix}_down_exps.{kind}", value, Kind.Q4_0)
    else:
        parts = (value[:, 0::2], value[:, 1::2]) if is_alternating else value.chunk(2, 1)
        halves = zip(("gate", "up"), parts, strict=True)
        gate, up = (add(w, f"{prefix}_{part}_exps.{kind}", half, Kind.Q4_0) for part, half in halves)
        result = torch.stack([gate, up], 2).flatten(1, 2) if is_alternating else torch.cat([gate, up], 1)
    return result.transpose(1, 2) if is_turned else result


Step = Callable[[torch.Tensor], torch.Tensor]


def _conversion(architecture: str, model: Any, short: str, value: torch.Tensor) -> tuple[Step, Step]:
    """What llama.cpp's converter does to a tensor, and the way back."""
    config, last = model.config, short.rpartition(".")[2]
    if architecture in ("llama", "mistral") and last in ("attn_q", "attn_k"):
        heads = config.num_attention_heads if last == "attn_q" else config.num_key_value_heads
        order = order_of_heads(len(value), heads)
        return lambda x: x[order], lambda x: x[order.argsort()]
    if architecture in OFFSET and "norm" in last and last != "ssm_norm":
        return lambda x: x + 1, lambda x: x - 1
    if architecture == "gpt2" and value.ndim == 2 and last in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
        return lambda x: x.T, lambda x: x.T
    if value.ndim == 3 and last == "conv":
        return lambda x: x[:, 0], lambda x: x[:, None]
    if last == "ffn_gate_inp_shexp":
        return lambda x: x[0], lambda x: x[None]
    if not architecture.startswith("qwen35"):
        return lambda x: x, lambda x: x
    return _of_linear_attention(config, last, value)


def _of_linear_attention(config: Any, last: str, value: torch.Tensor) -> tuple[Step, Step]:
    """Qwen3.5: heads of values are written tile by tile, not in groups of a key's head."""
    keys, per_key = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    D = config.linear_value_head_dim
    first = 2 * keys * config.linear_key_head_dim  # queries and keys stand before the values

    def tiled(size: int, start: int = 0) -> torch.Tensor:
        """The order in the file: head i of every key before head i + 1."""
        n = keys * per_key * size
        order = torch.arange(n).view(keys, per_key, size).transpose(0, 1).flatten()
        return torch.cat([torch.arange(start), order + start])

    rows = {"attn_qkv": tiled(D, first), "ssm_conv1d": tiled(D, first), "attn_gate": tiled(D), "ssm_alpha": tiled(1),
            "ssm_beta": tiled(1), "ssm_a": tiled(1), "ssm_dt": tiled(1)}  # fmt: skip
    if last == "ssm_out":
        order = tiled(D)
        return lambda x: x[:, order], lambda x: x[:, order.argsort()]
    if last not in rows:
        return lambda x: x, lambda x: x
    order = rows[last]
    if last == "ssm_conv1d":
        return lambda x: x[order][:, 0], lambda x: x[order.argsort()][:, None]
    if last == "ssm_a":
        return lambda x: -torch.exp(x[order]), lambda x: torch.log(-x)[order.argsort()]
    return lambda x: x[order], lambda x: x[order.argsort()]


# What is to be said of an architecture beside its name.
REMARKS = {
    "mistral": "as llama; llama.cpp itself writes llama for it",
    "gemma2": "layers slide by the file's window and pattern; soft caps",
    "gemma3": "layers slide by the file's window and pattern, with a base of the rotation of their own",
    "phi3": "with factors for long contexts; as in llama.cpp, no layer slides",
    "gpt-oss": "every other layer slides",
    "lfm2": "layers of attention; the others are convolutions",
    "qwen35": "layers of full attention; the others are linear attention",
    "qwen35moe": "layers of full attention; the others are linear attention",
}


def table() -> str:
    """The table of docs/models.md."""
    lines = ["| architecture | model | experts | remarks |", "|---|---|---|---|"]
    for name in ARCHITECTURES:
        model = type(tiny_model(name)).__name__
        experts = "in their blocks" if "expert_count" in CASES[name].metadata else ""
        lines.append(f"| {name} | `{model}` | {experts} | {REMARKS.get(name, '')} |")
    lines += [f"| {name} | | | refused: {reason} |" for name, reason in REFUSED.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
