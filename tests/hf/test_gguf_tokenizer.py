"""The tokenizer of a GGUF file is the one that its metadata describe."""

from __future__ import annotations

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from skimkv.hf.gguf_tokenizer import tokenizer_of

BYTES = list(bytes_to_unicode().values())
SPACE = "\u2581"


def byte_pairs(**more):
    tokens = ["<s>", "</s>", *BYTES, "th", "the", "Ġthe", "12", "[x]"]
    values = {"model": "gpt2", "tokens": tokens, "merges": ["t h", "th e", "Ġ the", "1 2"]}
    values["token_type"] = [3, 3] + [1] * (len(tokens) - 3) + [4]
    values |= {"bos_token_id": 0, "eos_token_id": 1} | more
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def pieces(**more):
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        SPACE,
        *"abn",
        "an",
        "ab",
        SPACE + "a",
        "<t>",
    ]
    scores = [0.0] * (len(tokens) - 4) + [-1.0, -2.0, -3.0, 0.0]
    types = [2, 3, 3] + [6] * 256 + [1] * 7 + [3]
    values = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | more
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def split(metadata, text, special=False):
    tokenizer = tokenizer_of(metadata)
    return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=special).input_ids)


def test_pieces_merge_by_score_and_unknown_characters_become_bytes():
    assert split(pieces(), "banab") == [SPACE, "b", "an", "ab"]
    assert split(pieces(), "aé") == [SPACE + "a", "<0xC3>", "<0xA9>"]
    assert split(pieces(), "ab") == [SPACE, "ab"], "the score of ab is above that of a space with a"
    assert (
        tokenizer_of(pieces()).decode(tokenizer_of(pieces())("banab é ", add_special_tokens=False).input_ids)
        == "banab é "
    )


@pytest.mark.parametrize("flag", [True, False])
def test_a_space_before_the_text_and_after_special_tokens(flag):
    start = [SPACE] if flag else []
    assert split(pieces(add_space_prefix=flag), "b") == [*start, "b"]
    assert split(pieces(add_space_prefix=flag), "b<t>b") == [*start, "b", "<t>", *start, "b"]
    assert split(pieces(), "") == []


@pytest.mark.parametrize(
    ("metadata", "tokens"),
    [
        (pieces(), ["<s>", SPACE, "b"]),
        (pieces(add_bos_token=False), [SPACE, "b"]),
        (pieces(add_eos_token=True), ["<s>", SPACE, "b", "</s>"]),
        (byte_pairs(), ["b"]),
        (byte_pairs(add_bos_token=True, add_eos_token=True), ["<s>", "b", "</s>"]),
        (byte_pairs(pre="llama-bpe"), ["<s>", "b"]),
        (byte_pairs(pre="llama-bpe", add_bos_token=False), ["b"]),
    ],
)
def test_first_and_last_tokens(metadata, tokens):
    assert split(metadata, "b", special=True) == tokens


def test_the_expressions_are_those_of_the_model():
    assert split(byte_pairs(pre="gpt-2"), "the 12") == ["the", "Ġ", "12"]
    assert split(byte_pairs(pre="smollm"), "the 12") == ["the", "Ġ", "1", "2"], "digits one by one"
    assert split(byte_pairs(pre="qwen2"), "x\n\nthe the") == ["x", "Ċ", "Ċ", "the", "Ġthe"]


def test_special_tokens_and_those_of_the_user_stay_whole():
    assert split(byte_pairs(), "a<s>[x]the") == ["a", "<s>", "[x]", "the"]
    tokenizer = tokenizer_of(byte_pairs() | {"tokenizer.chat_template": "{{ messages[0]['content'] }}!"})
    assert tokenizer.decode(tokenizer("a<s>[x]the").input_ids, skip_special_tokens=True) == "a[x]the"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "the!"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1, None)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (byte_pairs(pre="unheard-of"), "tokenizer.ggml.pre = 'unheard-of' is not supported; a.x-4.0, "),
        (byte_pairs(model="t5"), "tokenizer.ggml.model = 't5' is not supported; only gpt2 and llama are"),
        (byte_pairs(bos_token_id=1000), "bos_token_id = 1000 is no token; there are 263"),
    ],
)
def test_what_is_unknown_is_refused(metadata, reason):
    with pytest.raises(ValueError, match=reason):
        tokenizer_of(metadata)
