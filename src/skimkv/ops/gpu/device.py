"""What the host does for a step on the GPU, apart from launching it: `prepare` before, `advance` after.

Between the two only kernels run, with addresses and sizes that stay the same until `footing` changes. So a CUDA graph
can hold a step, and be replayed with `prepare` and `advance` around it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from ...stores.base import Store
from ...stores.clusters import Clusters
from ...stores.full import Full
from ...stores.slots import Slots
from .tables import COLUMNS, Held, Pages, Units, View, epoch, scratch

_views: weakref.WeakKeyDictionary[Store, View] = weakref.WeakKeyDictionary()


def pages(store: Full) -> Pages:
    """The view of a Full store, up to date."""
    found = _views.get(store)
    if not isinstance(found, Pages) or not found.fits(store):
        found = _views[store] = Pages(store)
    found.update(store)
    return found


def held(store: Slots, recent: list[int] | None) -> Held:
    """The view of a Slots store, up to date; recent None: as it was."""
    found = _views.get(store)
    if not isinstance(found, Held) or not found.fits(store):
        found = _views[store] = Held(store)
    found.update(store, recent)
    return found


def units(store: Clusters, more: bool = False) -> Units:
    """The view of a Clusters store, up to date; `more`: with room for what one token may found."""
    found = _views.get(store)
    if not isinstance(found, Units) or not found.fits(store):
        found = _views[store] = Units(store)
    if store.lengths != found.known or not store.blocks:
        found.counted = found.at = max(store.lengths)
        store._reserve(1)
    if more:
        found.make_room(store)
    found.update(store)
    return found


def prepare(store: Store) -> None:
    """Room for one more token, and the device told of all that it does not know; a second call does nothing."""
    if isinstance(store, Full):
        store._reserve(max(store.lengths) + 1)
        pages(store)
    elif isinstance(store, Slots):
        store.reserve(store.capacity)
        held(store, None)
    else:
        assert isinstance(store, Clusters)
        units(store, more=True)


def advance(store: Store) -> None:
    """The host's numbers, after a token that the device has put into the store and counted."""
    view = _views[store]
    if isinstance(store, Slots):
        assert isinstance(view, Held)
        store.filled = [min(c + 1, budget) for c, budget in zip(store.filled, store.budget, strict=True)]
        view.known_filled = [*store.filled]
    store.lengths = [n + 1 for n in store.lengths]
    view.known = [*store.lengths]


def rewind(store: Store) -> Callable[[], None]:
    """A function that takes the store's numbers back to what they are now, so that a step can be taken again."""
    prepare(store)
    view, filled = _views[store], [*getattr(store, "filled", [])]
    known = {name: [*getattr(view, name)] for name in ("known", "known_filled") if hasattr(view, name)}
    counts = [view.lengths, *(getattr(owner, name, None) for owner, name in ((view, "filled"), (store, "m")))]
    kept = [(t, t.clone()) for t in counts if t is not None]

    def back() -> None:
        store.lengths = [*known["known"]]
        if isinstance(store, Slots):
            store.filled = [*filled]
        for name, value in known.items():
            setattr(view, name, [*value])
        for t, was in kept:
            t.copy_(was)

    return back


def footing(store: Store) -> tuple[int, ...]:
    """Addresses that a step of this store has in its kernels: a captured step is valid while they stay."""
    names = ("tail", "v_mean", "projection", "k", "v", "score", "pos", "m", "mu")
    found = (getattr(store, name, None) for name in names)
    return (epoch(), store.shape.B, *(0 if t is None else t.data_ptr() for t in found))


__all__ = ["COLUMNS", "advance", "epoch", "footing", "held", "pages", "prepare", "rewind", "scratch", "units"]
