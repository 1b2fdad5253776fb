"""Text in tokens, and in pieces of them; a chat's template and logits that are not numbers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skimkv.eval.generate import encode, encode_pieces, run
from skimkv.methods import Skim
from support.refusals import refuses
from support.tiny_models import new_family, prompt, tokenizer


class Letters:
    """A tokenizer with a token for each character; bos begins every text if there is one."""

    def __init__(self, bos: int | None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, add_special_tokens: bool, verbose: bool) -> Any:
        return SimpleNamespace(input_ids=[ord(character) for character in text])


def test_pieces_of_a_text() -> None:
    assert encode_pieces(Letters(1), "abcdefghijk", 4, 9) == [
        [1, *b"abc"],
        [1, *b"def"],
        [1, *b"ghi"],
    ]
    assert encode_pieces(Letters(None), "abcde", 2, 1) == [[*b"ab"]]
    assert encode_pieces(Letters(1), "a", 3, 1) == []


def test_an_empty_text() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        encode(Letters(1), " \n", chat=False)


def test_a_chat_template_that_refuses_a_prompt() -> None:
    words: Any = tokenizer()
    words.chat_template = "{{ raise_exception('Only system\\nturns are allowed.') }}"
    reason = "^--chat: the model's chat template does not take this prompt: Only system turns are allowed"
    refuses(lambda: encode(words, "w3", chat=True), reason)
    words.chat_template = "{{ messages[0].content.nothing.at_all }}"
    refuses(lambda: encode(words, "w3", chat=True), "^--chat: the model's chat template does not take this prompt: ")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("dtype", "advice"), [(torch.float32, "$"), (torch.float16, ": choose another number format")])
def test_logits_that_are_not_numbers(tmp_path: Path, temperature: float, dtype: torch.dtype, advice: str) -> None:
    model: Any = new_family("llama").to(dtype)
    model.model.norm.weight.data[3] = float("nan")
    ids, name = prompt(1, 9)[0].tolist(), str(dtype).removeprefix("torch.")
    written: list[str] = []
    for file in (None, tmp_path / "cache"):
        call = partial(run, model, tokenizer(), ids, Skim(k=4), 5, temperature, write=written.append, prompt_cache=file)
        refuses(call, f"^the model's logits exceed the range of {name} or are not numbers{advice}")
    assert not written and not (tmp_path / "cache").exists() and not model._forward_hooks


def test_logits_that_are_not_numbers_later() -> None:
    """Token 5 is no number, and it is the first answer to a prompt that is."""
    model: Any = new_family("llama")
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.zeros_like(model.lm_head.weight))
        model.model.embed_tokens.weight[5] = float("nan")
        rows = model.model(torch.tensor([[7, 8]])).last_hidden_state[0, -1]
        model.lm_head.weight[5] = 1e3 * rows
    refuses(lambda: run(model, tokenizer(), [7, 8], Skim(k=4), 5, 1.0), "^the model's logits .* are not numbers$")
