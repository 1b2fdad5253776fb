"""The bundled architecture for training: a Llama with the parameter names of its Hugging Face form.

It is written out because one head size, no masks and no cache make a step several times as fast as the general code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# How many tokens each head of the first two layers looks back by at the start of training: together up to twenty.
LOOK_BACK = (1, 2, 3, 4), (4, 8, 12, 16)
# A of these heads, for each layer: the second layer hears u faintly, below what the first has added.
AMPLITUDES = 7.0, 28.0


class Layer(nn.Module):
    """One decoder layer: causal attention with rotary positions, then a gated unit, each on a normalised input."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.self_attn = nn.ModuleDict({
            "q_proj": nn.Linear(hidden, head_dim * self.heads, bias=False),
            "k_proj": nn.Linear(hidden, head_dim * self.kv_heads, bias=False),
            "v_proj": nn.Linear(hidden, head_dim * self.kv_heads, bias=False),
            "o_proj": nn.Linear(head_dim * self.heads, hidden, bias=False),
        })  # fmt: skip
        self.mlp = nn.ModuleDict({
            "gate_proj": nn.Linear(hidden, inner, bias=False),
            "up_proj": nn.Linear(hidden, inner, bias=False),
            "down_proj": nn.Linear(inner, hidden, bias=False),
        })  # fmt: skip
        self.input_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Compute hidden states (B,N,C) from x (B,N,C); cos and sin (N,1,D/2) are those of the positions."""
        B, N, _ = x.shape
        a, m, h = self.self_attn, self.mlp, self.input_layernorm(x)
        q = rotate(a["q_proj"](h).view(B, N, self.heads, -1), cos, sin)
        k = rotate(a["k_proj"](h).view(B, N, self.kv_heads, -1), cos, sin)
        v = a["v_proj"](h).view(B, N, self.kv_heads, -1)
        q, k, v = (t.repeat_interleave(self.heads // t.shape[2], 2).transpose(1, 2) for t in (q, k, v))  # (B,H,N,D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a["o_proj"](y.transpose(1, 2).reshape(B, N, -1))
        h = self.post_attention_layernorm(x)
        out: Tensor = x + m["down_proj"](F.silu(m["gate_proj"](h)) * m["up_proj"](h))
        return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x (B,N,H,D); cos and sin (N,1,D/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Network(nn.Module):
    """A Llama with tied embeddings: ids (B,N) -> hidden states (B,N,C), and `logits` of them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.theta, self.half_dim = config.rope_parameters["rope_theta"], config.head_dim // 2
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * config.num_hidden_layers) if last else 1))
        self._look_back()

    @torch.no_grad()
    def _look_back(self) -> None:
        """Begin with heads that attend to the tokens LOOK_BACK before: induction on keys of many tokens needs them.

        All embeddings share a direction u, of which a head makes q and k with a phase of `back` positions between
        them, so that rotary positions give the logit sum_i A^2 cos(theta^(-2i/d) (Delta - back)) / sqrt(d). In the
        second layer that is a preference, not a rule: with sharper heads there, `pairs` stay unlearnt for long.
        """
        u = torch.randn_like(self.embed_tokens.weight[0]).sign()
        self.embed_tokens.weight += 0.02 * u
        half, d = self.half_dim, 2 * self.half_dim
        rate = self._rates()[:8]  # of the pairs that turn far enough from one position to the next
        for i, backs in enumerate(LOOK_BACK[: len(self.layers)]):
            q, k, v = (self.get_parameter(f"layers.{i}.self_attn.{name}_proj.weight") for name in "qkv")
            for head, back in enumerate(backs[: len(q) // d]):
                kv_head = head * len(k) // len(q)
                for weight, at, phase in ((q, head, rate * back), (k, kv_head, rate * 0)):
                    x, n, A = torch.zeros(d), len(rate), AMPLITUDES[i]
                    x[:n], x[half : half + n] = A * phase.cos(), -A * phase.sin()
                    # a normalised embedding holds u / sqrt(2)
                    weight[at * d : (at + 1) * d] = torch.outer(x, u) * math.sqrt(2) / len(u)
                nn.init.normal_(v[kv_head * d : (kv_head + 1) * d], std=len(u) ** -0.5)

    def _rates(self, device: torch.device | None = None) -> Tensor:
        """Radians that each pair of components turns by from one position to the next -> (D/2,)."""
        rates: Tensor = self.theta ** (-torch.arange(self.half_dim, device=device) / self.half_dim)
        return rates

    def forward(self, ids: Tensor) -> Tensor:
        """Compute the last hidden states (B,N,C) of ids (B,N)."""
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None, None] * self._rates(ids.device)
        cos, sin = angle.cos(), angle.sin()
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def logits(self, h: Tensor) -> Tensor:
        """Compute logits (..,V) of hidden states h (..,C) with the tied embedding."""
        return F.linear(h, self.embed_tokens.weight)
