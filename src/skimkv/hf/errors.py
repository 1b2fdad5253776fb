"""The one place where exceptions of the libraries that read models become a ValueError of one line.

transformers, safetensors, tokenizers, huggingface_hub and gguf raise many classes for a damaged file, among them
TypeError, AttributeError and a class of Rust's panics that is no Exception. To a user they all say the same: this file
cannot be read, for this reason.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

LONGEST_REASON = 400  # characters


@contextlib.contextmanager
def as_value_error(what: str, find_reason: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Raise ValueError(f"{what}: reason") for whatever is raised inside the `with`, in one line.

    what: names the path, and what could not be read. find_reason: a function whose result, if it is one, replaces the
    exception's own message. KeyboardInterrupt and SystemExit pass.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {find_reason() or first_sentence(error)}") from error


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error message that may be a page long, in one line."""
    text = " ".join(str(error).split()).split(". ")[0]
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]} ..."
    if isinstance(error, KeyError):
        return f"{text} was not found" if " " not in text else text.strip("\"'")
    return text or type(error).__name__
