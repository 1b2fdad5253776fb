"""The bundled architecture for training: a Llama with the parameter names of its Hugging Face form.

Written out because one head size, no masks and no cache make a step several times as fast as the general code.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BACK = (1, 2, 3, 4), (4, 8, 12, 16)  # tokens that the heads of the first layers look back by from the start: twenty
BORN = 7.0, 28.0  # A of these heads, by layer: the second hears u faintly, under what the first has added


class Layer(nn.Module):
    """x (B,N,C) -> (B,N,C): causal attention with rotary positions, then a gated unit, each on a normalised x."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        c, d, self.heads, self.kv_heads = (
            config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads,
        )  # fmt: skip
        wide = config.intermediate_size
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(c, d * heads, bias=False)
             for name, heads in (("q_proj", self.heads), ("k_proj", self.kv_heads), ("v_proj", self.kv_heads))}
            | {"o_proj": nn.Linear(d * self.heads, c, bias=False)}
        )  # fmt: skip
        self.mlp = nn.ModuleDict(
            {"gate_proj": nn.Linear(c, wide, bias=False), "up_proj": nn.Linear(c, wide, bias=False)}
            | {"down_proj": nn.Linear(wide, c, bias=False)}
        )
        self.input_layernorm = nn.RMSNorm(c, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(c, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, N, _ = x.shape
        a, m, h = self.self_attn, self.mlp, self.input_layernorm(x)
        q = _turn(a["q_proj"](h).view(B, N, self.heads, -1), cos, sin)
        k = _turn(a["k_proj"](h).view(B, N, self.kv_heads, -1), cos, sin)
        v = a["v_proj"](h).view(B, N, self.kv_heads, -1)
        q, k, v = (t.repeat_interleave(self.heads // t.shape[2], 2).transpose(1, 2) for t in (q, k, v))  # (B,H,N,D)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a["o_proj"](y.transpose(1, 2).reshape(B, N, -1))
        h = self.post_attention_layernorm(x)
        out: Tensor = x + m["down_proj"](F.silu(m["gate_proj"](h)) * m["up_proj"](h))
        return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: x (B,N,H,D) with cos, sin (N,1,D/2)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Network(nn.Module):
    """ids (B,N) -> hidden states (B,N,C); `logits` makes (.., V) of them with the tied embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        c = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, c)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(c, eps=config.rms_norm_eps)
        d = config.head_dim
        self.theta, self.turns = config.rope_parameters["rope_theta"], d // 2
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * config.num_hidden_layers) if last else 1))
        self._look_back()

    @torch.no_grad()
    def _look_back(self) -> None:
        """Begin with heads that attend to the tokens BACK before: what induction is built on, of keys of many tokens.

        All embeddings share a direction u, of which a head makes q and k with a phase of `back` positions between
        them, so that rotary positions give the logit sum_i A^2 cos(theta^(-2i/d) (Delta - back)) / sqrt(d). In the
        second layer that is a leaning, not a rule: with sharper heads there `pairs` stay unlearnt for long.
        """
        u = torch.randn_like(self.embed_tokens.weight[0]).sign()
        self.embed_tokens.weight += 0.02 * u
        half, d = self.turns, 2 * self.turns
        rate = self._rate()[:8]  # of the pairs that turn far enough from one position to the next
        for i, backs in enumerate(BACK[: len(self.layers)]):
            q, k, v = (self.get_parameter(f"layers.{i}.self_attn.{name}_proj.weight") for name in "qkv")
            for head, back in enumerate(backs[: len(q) // d]):
                kv = head * len(k) // len(q)
                for w, at, phase in ((q, head, rate * back), (k, kv, rate * 0)):
                    x = torch.zeros(d)
                    x[: len(rate)], x[half : half + len(rate)] = BORN[i] * phase.cos(), -BORN[i] * phase.sin()
                    # a normalised embedding holds u / sqrt(2)
                    w[at * d : (at + 1) * d] = torch.outer(x, u) * math.sqrt(2) / len(u)
                nn.init.normal_(v[kv * d : (kv + 1) * d], std=len(u) ** -0.5)

    def _rate(self, device: torch.device | None = None) -> Tensor:
        """Radians that each pair turns by from one position to the next."""
        rate: Tensor = self.theta ** (-torch.arange(self.turns, device=device) / self.turns)
        return rate

    def forward(self, ids: Tensor) -> Tensor:
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None, None] * self._rate(ids.device)
        cos, sin = angle.cos(), angle.sin()
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.embed_tokens.weight)
