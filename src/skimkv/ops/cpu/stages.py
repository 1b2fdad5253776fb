"""Where the time of a decode step goes in the C++ kernels."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from ...stores.base import Store
from . import library
from .views import CacheView

# The stages in the order of skimkv.h: the query is loaded and its channels are chosen; positions are scored; some are
# chosen; their rows are requested from memory; they are attended to; the current token is put into the cache.
STAGES = ("prepare", "score", "choose", "fetch", "attend", "append")


@contextlib.contextmanager
def stage_times(store: Store) -> Iterator[dict[str, float]]:
    """Time the stages of the steps that this store takes inside the `with`, after it has taken one before.

    Yields a dictionary, which has the seconds of all threads together in every stage when the `with` ends. Raises
    ValueError if the last step of the store was not taken by an attention kernel of the C++ backend.
    """
    view = store.view
    if not isinstance(view, CacheView) or view.op.q is None:  # a prompt makes a view, and no step
        raise ValueError(f"the stages of a step are known in the C++ attention kernels only; {store} had no step there")
    nanoseconds, seconds = (ctypes.c_int64 * len(STAGES))(), dict.fromkeys(STAGES, 0.0)
    timed, plain = library.library().skimkv_step_timed, view.take_step
    timed.argtypes, timed.restype = [*plain.argtypes, ctypes.POINTER(ctypes.c_int64)], ctypes.c_char_p
    view.take_step = lambda *arguments: timed(*arguments, nanoseconds)
    view.tensor_step.stage_ns = ctypes.addressof(nanoseconds)
    try:
        yield seconds
    finally:
        view.take_step, view.tensor_step.stage_ns = plain, None
        seconds.update((stage, ns / 1e9) for stage, ns in zip(STAGES, nanoseconds, strict=True))
