"""OpenAI's formula for logit_bias, frequency_penalty and presence_penalty."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LogitsProcessor


class BiasAndPenalties(LogitsProcessor):
    """Changes the logits of the next token, before temperature and sampling.

        logits[t] += bias[t] - frequency * count[t] - presence * (count[t] > 0)

    count: how often a token stands among the generated ones, which begin after `prompt` tokens; the prompt's own tokens
    do not count. bias: from token numbers to numbers.
    """

    def __init__(self, prompt: int, bias: Mapping[int, float], frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence
        self.tokens, self.biases = list(bias), torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the changed logits (B,V) for the tokens so far, input_ids (B,n)."""
        changed = scores.clone()
        if self.frequency or self.presence:
            for row, generated in enumerate(input_ids[:, self.prompt :]):
                tokens, counts = generated.unique(return_counts=True)
                changed[row, tokens] -= self.frequency * counts.to(scores.dtype) + self.presence
        changed[:, self.tokens] += self.biases.to(changed)
        return changed
