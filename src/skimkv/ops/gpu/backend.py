"""The Triton backend: the kernels of methods' steps on a GPU. All is checked here, before a kernel is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from ...stores.base import Store
from ...stores.clusters import Clusters
from ...stores.full import Full
from ...stores.slots import Slots
from ..blocks import check_sinks
from ..protocol import SoftmaxOptions, Token
from . import device, launch
from .launch import (
    APPEND_WARPS,
    LARGEST_HEAD,
    LAYOUTS,
    LEAST_RUN,
    MOST_CHANNELS_OF_WARP,
    MOST_HEADS_OF_WARP,
    SETTINGS,
    TEMPERATURES,
    CachedClusters,
    CachedPages,
    CachedSlots,
    Candidates,
    Query,
    Scores,
    Splits,
    TokenRows,
    dot_type,
    fit_block,
    pad,
    types,
    validate,
)
from .occupancy import SplitKernel, count_splits
from .tables import INT4_BLOCK, PAGE_TOKENS, Cached, CachedKeys, ClusterView, PageView, scratch

try:
    from .kernels.append import append_kernel
    from .kernels.channels import channel_scores_kernel, choose_channels_kernel
    from .kernels.choose import choose_kernel
    from .kernels.clusters import clusters_append_kernel, clusters_kernel
    from .kernels.dense import dense_kernel
    from .kernels.slots import slots_kernel
    from .kernels.sparq import scores_kernel
except ImportError:  # launch.missing says why
    pass


class Selection(NamedTuple):
    """Which positions a step attends to, besides the current one, and how they are scored."""

    k: int
    local: int = 0  # of the k positions, the last ones that are always among them
    r: int = 0  # channels that score; 0: all of them, as they are
    layout: int = LAYOUTS["none"]
    temperature: int = TEMPERATURES["coverage"]
    projected: Tensor | None = None  # (B,H,G,R): what scores in the place of q
    renormalise: bool = True  # the softmax is taken anew over the chosen positions
    mean: bool = False  # v_mean takes the weight of the others


def unavailable() -> str | None:
    """Return why this backend cannot run here, or None if it can."""
    if launch.missing is None and not torch.cuda.is_available() and not launch.interpreted():
        return "PyTorch sees no CUDA device; TRITON_INTERPRET=1 runs the kernels on the CPU, slowly"
    return launch.missing


class GpuKernels:
    """The methods' steps as Triton kernels.

    Every step takes q (B,H,G,D) and the current token, k and v (B,H,D) each, which it puts into the store first; None:
    the store has it already. It returns y (B,H,G,D) in q's type, and raises ValueError where there is no kernel for the
    store, or arguments do not fit it.
    """

    name = "gpu"
    max_head_size = LARGEST_HEAD

    def again(self, store: Store) -> None:
        """None: every step is prepared anew."""
        return None

    def append(self, store: Store, k: Tensor, v: Tensor) -> None:
        """Put one token per row into the store: k, v (B,H,D)."""
        B, H, _, D = store.shape
        validate(store, k=(k, (B, H, D)), v=(v, (B, H, D)))
        if isinstance(store, Full) and store.pages is None and not store.group_means:
            self._append_to_pages(store, k, v)
        elif isinstance(store, Clusters):
            self._append_to_clusters(store, k, v)
        else:
            store.append_token(k, v)

    def _append_to_pages(self, store: Full, k: Tensor, v: Tensor) -> None:
        (B, H, _, D), token = store.shape, _token_rows(k, v)
        store.reserve()
        view = device.page_view(store)
        x = token.k
        if store.projection is not None:
            x = (x.to(store.projection.dtype)[:, :, None] @ store.projection)[:, :, 0].to(x.dtype)
        append_kernel[B * H,](
            token, x, *x.stride()[:2], _cached_pages(store, view), H,
            D=D, DP=pad(D), TYPE=types()[store.dtype], LAYOUT=LAYOUTS[store.channels], MEAN=store.v_mean is not None,
            num_warps=APPEND_WARPS,
        )  # fmt: skip
        device.advance(store)

    def _append_to_clusters(self, store: Clusters, k: Tensor, v: Tensor) -> None:
        (B, H, _, D), view = store.shape, device.cluster_view(store, more=True)
        clusters_append_kernel[B * H,](
            _token_rows(k, v), _cached_clusters(store, view), view.seed, store.delta, H,
            D=D, DP=pad(D), TP=pad(store.t, 1), TYPE=types()[store.dtype], num_warps=APPEND_WARPS,
        )  # fmt: skip
        device.advance(store)

    def dense(self, store: Full, q: Tensor, token: Token | None, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attend to all positions: equation 2 of SparQ. It reads 2ND elements per KV head."""
        query = self._start(store, q, token, **softmax)
        view = device.page_view(store)
        return attend_all(store, query, _cached_pages(store, view), view.room)

    def sparq(
        self, store: Full, q: Tensor, token: Token | None, *, r: int, k: int,
        local: int, temperature: str, mean_value: bool, **softmax: Unpack[SoftmaxOptions],
    ) -> Tensor:  # fmt: skip
        """Run algorithm 1 of SparQ, grouped as in section 4. It reads Nr + 2kD elements per KV head, and v_mean.

        r channels score, and k positions besides the current one are attended to, of which `local` are the last ones.
        temperature: how scores are scaled ("coverage" is equation 9). mean_value: v_mean takes the rest of the weight.
        """
        selection = sparq_selection(store, store.channels, r, k, local, temperature, mean_value)
        return self._attend_selected(store, self._start(store, q, token, **softmax), selection)

    def top_k(
        self, store: Full, q: Tensor, token: Token | None, *, k: int, oracle: bool, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Run FlexGen's step: score all positions exactly, and sum the k best values and the current one by the scores.

        oracle: the softmax is taken anew over the chosen positions (figure 7a of SparQ).
        """
        return self._attend_selected(store, self._start(store, q, token, **softmax), Selection(k, renormalise=oracle))

    def low_rank(
        self, store: Full, q: Tensor, token: Token | None, *, k: int, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Score in a fixed random projection of K, then attend to the k best rows and the current one (figure 7a)."""
        if store.projection is None:
            raise ValueError("the store has no projection of K; LowRank makes one that has")
        query = self._start(store, q, token, **softmax)
        selection = Selection(k, layout=LAYOUTS["copy"], projected=q.float() @ store.projection)
        return self._attend_selected(store, query, selection)

    def _attend_selected(self, store: Full, query: Query, selection: Selection) -> Tensor:
        view = device.page_view(store)
        return attend_selected(store, query, selection, _cached_pages(store, view), view.room)

    def ring_slots(self, store: Slots, q: Tensor, token: Token, **softmax: Unpack[SoftmaxOptions]) -> Tensor:
        """Attend to the slots in use and to the current token, then put it into its slot. It reads 2CD per KV head.

        For stores without scores: rings, stores with an order, and stores that grow.
        """
        if store.score is not None:
            raise ValueError("the store has scores; a ring has none")
        return self._slots(store, q, token, [0] * store.shape.B, **softmax)

    def scored_slots(
        self, store: Slots, q: Tensor, token: Token, *, recent: Sequence[int], **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Run algorithm 1 of H2O: attend as in ring_slots, add the weights to the scores, and replace the lowest score.

        The weights are averaged over the group. The recent[b] latest positions of row b are not replaced.
        """
        if store.score is None:
            raise ValueError("the store has no scores")
        if len(recent) != store.shape.B:
            raise ValueError(f"recent = {recent} must be {store.shape.B} numbers where slots are scored")
        return self._slots(store, q, token, recent, **softmax)

    def _slots(
        self, store: Slots, q: Tensor, token: Token, recent: Sequence[int], **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        (B, H, G, D), (k, v), settings = store.shape, token, SETTINGS.slots
        query = self._start(store, q, None, **softmax)
        validate(store, k=(k, (B, H, D)), v=(v, (B, H, D)))
        store.reserve()
        view = device.slot_view(store, recent)
        C, block = store.capacity, fit_block(settings.block, _row_bytes(store))
        width = -(-C // block) * block
        unused = view.lengths
        slots = CachedSlots(
            k=store.k, v=store.v, score=unused if store.score is None else store.score,
            pos=unused if store.pos is None else store.pos, lengths=view.lengths, filled=view.filled,
            limits=view.limits, order=unused if store.order is None else view.order,
            logits=scratch(store, "logits", 1 if store.score is None else B * H * G * width),
            width=width, B=B, H=H, C=C, fixed=store.fixed,
        )  # fmt: skip
        constants = {
            **_sizes(store, q), **_variants(query), "SCORED": store.score is not None,
            "ORDERED": store.order is not None, "GROWS": store.grows, "BLOCK": block, "TILE": settings.tile,
            "STAGES": settings.stages, "num_warps": settings.warps,
        }  # fmt: skip
        rows = _token_rows(k, v)
        split = SplitKernel(
            slots_kernel, settings.programs, constants, lambda count: (query, slots, rows, _splits(store, count)),
            merges=True,
        )  # fmt: skip
        split.launch(store, count_splits(store, -(-C // settings.block), split))
        device.advance(store)
        return query.y

    def clusters(
        self, store: Clusters, q: Tensor, token: Token | None, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Run QueryStreamAttn of SubGen's algorithm 1: y = z / tau. It reads O(D (mt + s)) elements per KV head.

        Where no sample stands for the keys that dominate z, y has no bound; it stops at +-2^63 (float16: 65504).
        """
        query = self._start(store, q, token, scale=scale, sinks=sinks)
        view, settings = device.cluster_view(store), SETTINGS.clusters
        block = fit_block(settings.block, _row_bytes(store))
        constants = {
            **_sizes(store, q), "TYPE": types()[store.dtype], "BLOCK": block, "TINY": torch.finfo(torch.float32).tiny,
            "LIMIT": min(2.0**63, torch.finfo(q.dtype).max), "SINKS": query.sinks is not query.q,
            "num_warps": settings.warps,
        }  # fmt: skip
        cached = _cached_clusters(store, view)
        split = SplitKernel(
            clusters_kernel, settings.programs, constants, lambda count: (query, cached, _splits(store, count)),
            merges=True,
        )  # fmt: skip
        split.launch(store, count_splits(store, -(-(view.room * store.t + store.s) // block), split))
        return query.y

    def _start(
        self,
        store: Store,
        q: Tensor,
        token: Token | None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Query:
        """Check what all steps are given, put the token into the store, and return what a kernel is asked."""
        query = make_query(store, q, scale, softcap, sinks)
        if token is not None:
            self.append(store, *token)
        return query


def make_query(store: Cached, q: Tensor, scale: float, softcap: float | None, sinks: Tensor | None) -> Query:
    """Check what all steps are given, and return what a kernel is asked. Raises ValueError if it does not fit."""
    validate(store, q=(q, tuple(store.shape)))
    check_sinks(sinks, store.shape.H, store.shape.G, store.device)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap = {softcap} must be positive")
    q = q.contiguous()
    sinks = q if sinks is None else sinks.contiguous()
    return Query(q, torch.empty_like(q), sinks, store.shape.H, store.shape.G, scale, softcap or 0.0)


def sparq_selection(
    store: CachedKeys, channels: str, r: int, k: int, local: int, temperature: str, mean_value: bool
) -> Selection:
    """Return what SparQ's step chooses, for an index `channels`. Raises ValueError if a number is out of its bounds."""
    if temperature not in TEMPERATURES:
        raise ValueError(f"temperature = {temperature!r} must be one of {', '.join(TEMPERATURES)}")
    if not 1 <= r <= store.R or not 0 <= local <= k:
        raise ValueError(f"r = {r} must be from 1 to {store.R}, and local = {local} from 0 to k = {k}")
    return Selection(k, local, r, LAYOUTS[channels], TEMPERATURES[temperature], mean=mean_value)


def _variants(query: Query) -> dict[str, bool]:
    """Return which parts of a softmax the kernels are compiled with."""
    return {"CAPPED": query.softcap > 0, "SINKS": query.sinks is not query.q}


def _token_rows(k: Tensor, v: Tensor) -> TokenRows:
    k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (k, v))
    return TokenRows(k, v, *k.stride()[:2], *v.stride()[:2])


def _cached_pages(store: Full, view: PageView) -> CachedPages:
    tail, v_mean = (view.lengths if t is None else t for t in (store.tail, store.v_mean))
    return CachedPages(view.table, view.lengths, tail, v_mean, store.R)


def _cached_clusters(store: Clusters, view: ClusterView) -> CachedClusters:
    return CachedClusters(view.table, view.lengths, store.m, store.mu, store.k, store.v, store.t, store.s)


def _splits(store: Cached, count: int) -> Splits:
    """Return scratch memory for so many splits."""
    B, H, G, D = store.shape
    parts = scratch(store, "parts", B * H * count * G * (D + 2))
    return Splits(parts, scratch(store, "counter", B * H, torch.int32), count)


def _sizes(store: Cached, q: Tensor) -> dict[str, Any]:
    """Return what is constant in all kernels of attention: the sizes, padded, and the type of products."""
    D = q.shape[-1]
    return {"D": D, "GP": pad(q.shape[2]), "DP": pad(D), "DOT": dot_type(store, q)}


def attend_all(store: Cached, query: Query, pages: CachedPages, room: int) -> Tensor:
    """Attend to all positions. room: tokens that a row has place for, which stays the same while a graph is used."""
    settings = SETTINGS.dense
    constants = {
        **_sizes(store, query.q), **_variants(query), "TYPE": types()[store.dtype], "STAGES": settings.stages,
        "BLOCK": fit_block(settings.block, _row_bytes(store)), "num_warps": settings.warps,
    }  # fmt: skip
    split = SplitKernel(
        dense_kernel, settings.programs, constants, lambda count: (query, pages, _splits(store, count)), merges=True
    )
    split.launch(store, count_splits(store, room // PAGE_TOKENS, split))
    return query.y


def attend_selected(store: CachedKeys, query: Query, selection: Selection, pages: CachedPages, room: int) -> Tensor:
    """Run steps 1 to 3 of SparQ: score all positions, choose among them, and attend to the chosen ones.

    room: as in attend_all.
    """
    G, settings = store.shape.G, SETTINGS.choose
    scoring = query if selection.projected is None else query._replace(q=selection.projected.contiguous())
    if _one_warp_scores(store, selection):
        scores = _score_by_channels(store, scoring, pages, selection, room)
    else:
        scores = _score_by_products(store, scoring, pages, selection, room)
    constants = {
        **_sizes(store, query.q), **_variants(query), "TYPE": types()[store.dtype], "SP": pad(scores.splits, 2),
        "RENORMALISE": selection.renormalise, "MEAN": selection.mean, "ALONE": G == 1, "TILE": settings.tile,
        "CHOSEN_BLOCK": fit_block(settings.block, _row_bytes(store)), "STAGES": settings.stages,
        "num_warps": settings.warps,
    }  # fmt: skip
    split = SplitKernel(
        choose_kernel, settings.programs, constants,
        lambda programs: (query, pages, scores, _candidates(store, selection, room, settings.tile, programs)),
    )  # fmt: skip
    split.launch(store, count_splits(store, -(-room // settings.tile), split))
    return query.y


def _scoring_channels(store: CachedKeys, selection: Selection) -> int:
    """Return how many channels score."""
    return selection.r or store.R


def _one_warp_scores(store: CachedKeys, selection: Selection) -> bool:
    """Return whether step 1 multiplies without matrix units: few heads, few channels, and an index of channels."""
    few = store.shape.G <= MOST_HEADS_OF_WARP and _scoring_channels(store, selection) <= MOST_CHANNELS_OF_WARP
    return few and selection.layout != LAYOUTS["none"]


def _score_by_channels(store: CachedKeys, query: Query, pages: CachedPages, selection: Selection, width: int) -> Scores:
    """Run step 1 with one warp for a page, and return where its logits are."""
    (B, H, G, _), channels, settings = store.shape, _scoring_channels(store, selection), SETTINGS.channel_scores
    constants = {
        "G": G, "CHANNELS": channels, "PADDED": pad(channels), "TYPE": types()[store.dtype],
        "LAYOUT": selection.layout, "CAPPED": query.softcap > 0, "num_warps": 1,
    }  # fmt: skip
    split = SplitKernel(
        channel_scores_kernel, settings.programs, constants,
        lambda splits: (query, pages, _scores(store, width, splits, selection.r, channels)),
    )  # fmt: skip
    splits = count_splits(store, width // PAGE_TOKENS, split)
    R = query.q.shape[-1]
    choose_channels_kernel[B * H,](
        query, _scores(store, width, splits, selection.r, channels), G=G, D=R, DP=pad(R), CHANNELS=channels,
        TEMPERATURE=selection.temperature, num_warps=1,
    )  # fmt: skip
    scores: Scores = split.launch(store, splits)[-1]
    return scores


def _score_by_products(store: CachedKeys, query: Query, pages: CachedPages, selection: Selection, width: int) -> Scores:
    """Run step 1 on matrix units, and return where its logits are."""
    settings = SETTINGS.quantised_scores if store.bits else SETTINGS.scores
    constants = {
        **_sizes(store, query.q), "RP": pad(_scoring_channels(store, selection)), "TYPE": types()[store.dtype],
        "LAYOUT": selection.layout, "TEMPERATURE": selection.temperature, "CAPPED": query.softcap > 0,
        "BLOCK": _score_block(store, selection, settings.block), "STAGES": settings.stages, "num_warps": settings.warps,
    }  # fmt: skip
    split = SplitKernel(
        scores_kernel, settings.programs, constants,
        lambda splits: (query, pages, _scores(store, width, splits, selection.r, 1)),
    )  # fmt: skip
    scores: Scores = split.launch(store, count_splits(store, width // PAGE_TOKENS, split))[-1]
    return scores


def _scores(store: Cached, width: int, splits: int, r: int, channels: int) -> Scores:
    """Return scratch memory for the scores of `width` positions; a tile of the choice may be read past their end."""
    B, H, G, _ = store.shape
    return Scores(
        logits=scratch(store, "logits", B * H * G * width + SETTINGS.choose.tile),
        stats=scratch(store, "stats", B * H * splits * G * 2),
        channels=scratch(store, "channels", B * H * channels, torch.int32),
        weights=scratch(store, "channel weights", B * H * G * channels), width=width, splits=splits, r=r,
    )  # fmt: skip


def _candidates(store: Cached, selection: Selection, width: int, tile: int, programs: int) -> Candidates:
    """Return scratch memory for the best positions of every tile."""
    heads, k = store.shape.B * store.shape.H, min(selection.k - selection.local, width)
    room = -(-width // tile) * min(k, tile)
    return Candidates(
        weights=scratch(store, "weights", heads * room, torch.int32),
        positions=scratch(store, "positions", heads * room, torch.int32),
        chosen=scratch(store, "chosen", heads * k, torch.int32),
        counter=scratch(store, "counter", heads, torch.int32),
        room=room, programs=programs, k=k, local=selection.local,
    )  # fmt: skip


def _score_block(store: CachedKeys, selection: Selection, block: int) -> int:
    """Return the positions that step 1 takes at a time; the settings are meant for a quarter of the channels."""
    if selection.layout == LAYOUTS["none"]:
        return fit_block(block, 4 * _row_bytes(store))
    least = INT4_BLOCK if selection.layout == LAYOUTS["int4"] else LEAST_RUN
    return fit_block(block, 4 * pad(selection.r or store.R) * store.dtype.itemsize, least)


def _row_bytes(store: Cached) -> int:
    """Return the bytes of a row of K, padded as the kernels do."""
    return pad(store.shape.D) * store.dtype.itemsize
