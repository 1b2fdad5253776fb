"""What the host does for a step on the GPU, apart from launching it: `prepare` before, `advance` after.

Between the two only kernels run, with addresses and sizes that stay the same while `footing` does. So a CUDA graph can
hold a step, and be replayed with `prepare` and `advance` around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...stores.base import Store
from ...stores.full import Full
from ...stores.slots import Slots
from .tables import PageView, SlotView, View

# Tensors of a store whose addresses a kernel is given; chunks are found through the view's table.
STORE_TENSORS = ("tail", "v_mean", "projection", "k", "v", "score", "pos")


def page_view(store: Full) -> PageView:
    """Return the view of a Full store, up to date."""
    view = store.view
    if not isinstance(view, PageView) or not view.fits(store):
        view = store.view = PageView(store)
    view.update(store)
    return view


def slot_view(store: Slots, recent: Sequence[int] | None) -> SlotView:
    """Return the view of a Slots store, up to date. recent: the recent window of every row; None: as it was."""
    view = store.view
    if not isinstance(view, SlotView) or not view.fits(store):
        view = store.view = SlotView(store)
    view.update(store, recent)
    return view


def prepare(store: Store) -> None:
    """Make room for one more token, and tell the device all that it does not know. A second call does nothing."""
    store.reserve()
    if isinstance(store, Full):
        page_view(store)
    else:
        assert isinstance(store, Slots)
        slot_view(store, None)


def advance(store: Store) -> None:
    """Advance the host's numbers, after a token that kernels have put into the store and counted on the device."""
    store.advance()
    view: View = store.view
    view.advance(store)


def rewind(store: Store) -> Callable[[], None]:
    """Return a function that takes the store's numbers back to what they are now, so that a step can be taken again."""
    prepare(store)
    view: View = store.view
    mark = store.mark()
    before = [(numbers, numbers.known, numbers.tensor.clone()) for numbers in view.counts()]

    def back() -> None:
        """Take the numbers back."""
        store.rewind(mark)
        for numbers, known, tensor in before:
            numbers.known = known
            numbers.tensor.copy_(tensor)

    return back


def footing(stores: Sequence[Store]) -> tuple[int, ...]:
    """Return the addresses and sizes that a step of these stores gives its kernels.

    A captured step is valid while they stay the same.
    """
    batch = [store.shape.B for store in stores]
    tensors: list[Tensor | None] = []
    workspaces = {}
    for store in stores:
        tensors += [getattr(store, name, None) for name in STORE_TENSORS]
        if store.view is not None:
            tensors += store.view.device_tensors()
        workspaces[id(store.workspace)] = store.workspace
    for workspace in workspaces.values():
        tensors += workspace.buffers.values()
    return (*batch, *(number for t in tensors if t is not None for number in (t.data_ptr(), t.numel())))
