"""A Llama and a text that are small enough to train on in a test."""

from __future__ import annotations

import json
import random

from training.data import KINDS
from training.train import CONFIG

SHAPE = {
    **json.loads(CONFIG.read_text()), "hidden_size": 32, "head_dim": 16, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300,
}  # fmt: skip
ALL_KINDS = (1.0,) * len(KINDS)


def random_text() -> str:
    """Return 6000 words of random letters; the same ones in every call."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8))) for _ in range(400)]
    return " ".join(rng.choice(words) + rng.choice(("", "", "", ",", ".")) for _ in range(6000))
