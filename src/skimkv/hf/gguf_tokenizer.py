"""The tokenizer of a GGUF file, built of its metadata: as llama.cpp splits text, with its defaults.

Two kinds are known: byte pairs with a list of merges ("gpt2"), whose text is split by the expressions of the model that
the file names, and pieces with scores ("llama", of SentencePiece), which merge the pair of the highest score first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from .errors import as_value_error
from .gguf import GGUFFile

CONTROL, USER_DEFINED = 3, 4  # types of tokens
SPACE = "\u2581"  # how pieces spell a space

# How models split text before pairs are merged, as their own tokenizers do.
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_START = r"[^\r\n\p{L}\p{N}]?"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH}|{_START}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
_QWEN2 = rf"{_ENGLISH}|{_START}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
_QWEN35 = rf"{_ENGLISH}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
_TEKKEN = rf"{_START}{_WORDS}|{_START}{_CAPITALS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
_GPT4O = (
    rf"{_START}{_WORDS}{_ENGLISH}?|{_START}{_CAPITALS}{_ENGLISH}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
)
# Expressions, one after another; each splits what the one before has left -> names of tokenizer.ggml.pre.
_SPLITS: dict[tuple[str, ...], str] = {
    (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"): "default",
    (_GPT2,): "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert mpt olmo jais "
    "exaone4 trillion granite-docling",
    (r"\p{N}", _GPT2): "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    (_LLAMA3,): "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe "
    "chatglm-bpe glm4 glm5",
    (_QWEN2,): "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 hunyuan megrez solar-open grok-2",
    (_QWEN35,): "qwen35",
    (_TEKKEN,): "tekken",
    (_GPT4O,): "gpt-4o llama4 kanana2 talkie minimax-m2",
}
SPLITS = {name: expressions for expressions, names in _SPLITS.items() for name in names.split()}
# Names whose tokenizers take a word that is a token as it is, without merging; those but glm's begin every text.
WHOLE_WORDS = set("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano tekken".split())
WHOLE_GLM = {"glm4", "glm5"}


class _Given(NamedTuple):
    """A tokenizer that nobody else has: the library's copy of one takes seconds, and of this it is the same."""

    tokenizer: Tokenizer

    def __deepcopy__(self, memo: object) -> Tokenizer:
        return self.tokenizer


def load_tokenizer(path: Path) -> Any:
    """The tokenizer that a file's metadata describe: a PreTrainedTokenizerFast.

    Raises ValueError, one line with the path and the reason, if the file has none, or one of an unknown kind.
    """
    lists = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
    with as_value_error(f"{path}: no tokenizer that can be read"), GGUFFile(path, lists) as file:
        return tokenizer_of(file.metadata)


def tokenizer_of(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer of metadata with all lists of strings. Raises ValueError if they describe none that is known."""
    prefix = "tokenizer.ggml."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    tokens: list[str] = values["tokens"]
    kind = values["model"]
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_pairs(tokens, values)
    elif kind == "llama":
        tokenizer, adds_bos = _pieces(tokens, values), True
    else:
        raise ValueError(f"tokenizer.ggml.model = {kind!r} is not supported; only gpt2 and llama are")
    types = values.get("token_type") or []
    named = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, type in named if type == CONTROL])
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=False) for token, type in named if type == USER_DEFINED]
    )
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = values.get(f"{key}_token_id")
        if number is not None and not 0 <= number < len(tokens):
            raise ValueError(f"{prefix}{key}_token_id = {number} is no token; there are {len(tokens)}")
        special[f"{name}_token"] = None if number is None else tokens[number]
    make: Any = PreTrainedTokenizerFast
    tokenizer_of_library: PreTrainedTokenizerFast = make(
        tokenizer_object=_Given(tokenizer),
        add_bos_token=bool(values.get("add_bos_token", adds_bos)) and special["bos_token"] is not None,
        add_eos_token=bool(values.get("add_eos_token", False)) and special["eos_token"] is not None,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )
    return tokenizer_of_library


def _byte_pairs(tokens: list[str], values: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Byte pairs with a list of merges, and whether a text begins with a token of its own by default."""
    name = values.get("pre", "default")
    if name not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre = {name!r} is not supported; {', '.join(sorted(SPLITS))} are")
    merges = []
    for merge in values["merges"]:
        at = merge.index(" ", 1)
        merges.append((merge[:at], merge[at + 1 :]))
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in WHOLE_WORDS | WHOLE_GLM))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[name]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in WHOLE_WORDS


def _pieces(tokens: list[str], values: Mapping[str, Any]) -> Tokenizer:
    """Pieces with scores: two neighbours merge to the piece of the highest score. Unknown characters become bytes."""
    vocabulary = {token: number for number, token in enumerate(tokens)}
    scores, number_of = values["scores"], vocabulary.get
    found = []
    for piece, number in vocabulary.items():
        for at in range(1, len(piece)):
            left = number_of(piece[:at])
            if left is not None and (right := number_of(piece[at:])) is not None:
                found.append((-scores[number], number, left, right))
    found.sort()
    merges = [(tokens[left], tokens[right]) for _, _, left, right in found]
    unknown = values.get("unknown_token_id", 0)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    decoding: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if values.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer
