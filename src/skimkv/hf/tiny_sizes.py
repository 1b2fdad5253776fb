"""What every size of a configuration of transformers becomes in a tiny model of its family."""

from __future__ import annotations

from typing import Any

VOCABULARY = 97
POSITIONS = 160

# What a configuration calls a size -> the size in a tiny model.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions"), POSITIONS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "emb_dim", "embedding_size", "input_embedding_size"), 64),
    **dict.fromkeys(("output_embedding_size", "attention_hidden_size", "lru_width", "hidden_size_per_layer_input"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "dim_ff"), 96),
    **dict.fromkeys(("ffn_hidden_size", "expert_ffn_hidden_size", "dff", "d_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "d_kv", "dim_head"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "state_size"), 16),
    **dict.fromkeys(("ssm_state_size", "mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 32),
    "linear_num_key_heads": 2, "mamba_dt_rank": 4, "mamba_d_ssm": 128,
}  # fmt: skip
