"""The Triton kernels against the reference in float64 over the same rounded cache: on a GPU where there is one, else
in Triton's interpreter, on small shapes. Unused memory is NaN; where a method chooses, the data leave a margin.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from skimkv import ops
from skimkv.methods import parse
from skimkv.ops.gpu import device, launch, run
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from skimkv.stores.slots import Slots
from skimkv.testing import empty_store
from support import steps
from support.gpu import DEVICE, NAN_MEMORY, NEEDS_TRITON, compare, filled_on_device, on_device, random_token
from support.kernels import TYPES, close, exact, held

pytestmark = [NEEDS_TRITON, NAN_MEMORY]


@pytest.fixture(params=["warp", "products", "tiles", "tile"])
def launched(request, monkeypatch):
    """Step 1 by one warp a page where a group is small, and always on matrix units; and the choice in other tiles.

    "tiles": there are more than programs. "tile": there may be one, which is too small for groups of neighbours.
    """
    if request.param == "products":
        monkeypatch.setattr(run, "MOST_HEADS_OF_WARP", dict.fromkeys(run.MOST_HEADS_OF_WARP, 0))
    if request.param.startswith("tile"):
        size = 128 if request.param == "tiles" else 512
        monkeypatch.setattr(launch.SETTINGS, "choose", replace(launch.SETTINGS.choose, tile=size, programs=2, list=64))


@pytest.mark.parametrize(
    ("D", "lengths", "dtype", "G"),
    [
        (16, [1], "float32", 1),
        (80, [300, 256, 1], "bfloat16", 3),
        (256, [257], "float16", 17),
        (128, [513], "bfloat16", 1),
    ],
)
def test_dense(D, lengths, dtype, G):
    q, store = filled_on_device(D, lengths, TYPES[dtype], G, "none", H=1)
    for cap in (None, 5.0):
        compare("dense", q, store, D**-0.5, cap)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("D", "lengths", "dtype", "G", "channels", "r", "k", "local", "temperature", "mean", "cap"),
    [
        (16, [300, 1], "float32", 1, "copy", 5, 24, 6, "coverage", True, None),
        (80, [511, 256], "bfloat16", 3, "int8", 12, 16, 0, "sqrt_d", False, 8.0),
        (128, [513, 40], "float16", 8, "int4", 8, 9, 9, "sqrt_r", True, None),
        (256, [257], "bfloat16", 1, "none", 17, 130, 7, "coverage", True, None),
    ],
)
def test_sparq(D, lengths, dtype, G, channels, r, k, local, temperature, mean, cap, launched):
    q, store = filled_on_device(D, lengths, TYPES[dtype], G, channels, r, k, local, H=1)
    compare("sparq", q, store, D**-0.5, cap, r, k, local, temperature, mean)


def test_step_1_by_one_warp_of_4_bit_codes():
    """Channels that are no multiple of a load, two closed pages in two chunks, an open group, and a group of three."""
    q, store = filled_on_device(32, [600], torch.float16, 3, "int4", 5, 24, 6, H=1)
    compare("sparq", q, store, 32**-0.5, None, 5, 24, 6, "coverage", True)


@pytest.mark.slow
@pytest.mark.parametrize("channels", ["copy", "int8"])
def test_choosing_everything_is_dense(channels, launched):
    q, store = filled_on_device(64, [300, 17], torch.float32, 2, channels, H=1)
    with ops.backend("gpu"):
        y = steps.sparq(store, q, 0.125, None, 8, 1000, 10, "coverage", True)
    close(y, steps.dense(exact(store), q.double(), 0.125, None, reference=True), store, q, 0.125)


def test_ties_go_to_the_lower_positions(launched):
    """Equal keys: every weight is 1/n, and the chosen are the first k - local and the last local + 1.

    The numbers of q have few bits, so that sums in any order are equal.
    """
    q, store = filled_on_device(16, [400], torch.float32, 1, "copy", H=1)
    q = (8 * q).round() / 8
    for chunk in store.chunks:
        chunk.k[:], chunk.index[:] = 1.0, 1.0
    k, local, n = 150, 7, 400
    with ops.backend("gpu"):
        y = steps.sparq(store, q, 0.25, None, 4, k, local, "coverage", True)
    v = store.uncounted("v")
    mean = torch.cat([v[:, :, : k - local], v[:, :, n - 1 - local : n]], 2).mean(2)
    want = (k + 1) / n * mean + (1 - (k + 1) / n) * store.v_mean
    torch.testing.assert_close(y[:, :, 0], want, rtol=1e-5, atol=1e-6)


def test_a_nan_spoils_its_head_and_no_other():
    q, store = filled_on_device(32, [300, 280], torch.float32, 2, "copy", 6, 12, 4)
    q[0, 1, 0, 3] = store.chunks[0].k[1, 0, 5, :] = store.chunks[0].index[1, 0, :, 5] = torch.nan
    for name, args in {"dense": (), "sparq": (6, 12, 4, "coverage", True), "topk": (9, True)}.items():
        want = getattr(steps, name)(store, q, 0.2, None, *args, reference=True)
        with ops.backend("gpu"):
            got = getattr(steps, name)(store, q, 0.2, None, *args)
        assert torch.equal(got[..., 0].isnan(), want[..., 0].isnan()), name
        assert 0 < want.isnan().sum() < want.numel(), name


@pytest.mark.parametrize(("D", "dtype", "G"), [(32, "float32", 3), (128, "float16", 1)])
def test_exact_scores_and_low_rank(D, dtype, G):
    k, scale, lengths = 16, D**-0.5, [400, 30]
    q, store = filled_on_device(D, lengths, TYPES[dtype], G, "none", k=k, H=1)
    for oracle in (False, True):
        compare("topk", q, store, scale, None, k, oracle)
    P = torch.linalg.qr(torch.randn(1, D, D)).Q[..., : D - 8].contiguous()
    q, store = filled_on_device(D, lengths, TYPES[dtype], G, "copy", k=k, mean=False, projection=P, H=1)
    compare("lowrank", q, store, scale, None, k)


@pytest.mark.slow
@pytest.mark.parametrize("gap", [1, 110])
def test_a_group_whose_choice_misses_the_mass_of_one_query(gap, launched):
    """Query 0 of a group has its mass on eight positions, and the sum over the group chooses those of queries 1 and 2.

    So the largest logit of query 0 over the chosen positions is `gap` below its largest logit over all positions.
    """
    D, n = 16, 200
    k, q = torch.zeros(1, 1, n, D), torch.zeros(1, 1, 3, D)
    k[..., 3], q[..., 3] = torch.randn(n), 0.3
    k[0, 0, 20:28, 0], q[0, 0, 0, 0] = gap * 4.0, 1.0
    k[0, 0, 40, 1], q[0, 0, 1, 1] = 400.0, 1.0
    k[0, 0, 50, 2], q[0, 0, 2, 2] = 400.0, 1.0
    store = Full(Shape(1, 1, 3, D), torch.float32, "cpu", "copy", True)
    store.append(k, torch.randn(1, 1, n, D))
    q, store = q.to(DEVICE), on_device(store)
    for oracle in (True, False):
        compare("topk", q, store, 0.25, None, 2, oracle)
    for mean in (True, False):
        compare("sparq", q, store, 0.25, None, D, 2, 0, "coverage", mean)


@pytest.mark.parametrize(
    ("dtype", "channels"),
    [("float32", "int8"), ("bfloat16", "int4"), ("float16", "copy"), ("bfloat16", "none"), ("float16", "int8")],
)
def test_append_writes_what_the_reference_writes(dtype, channels):
    q, one = filled_on_device(
        32, [254, 510, 3], TYPES[dtype], 2, channels, H=1
    )  # a group fills, then a chunk; a short row
    two = one.fork()
    with ops.backend("gpu"):
        for _ in range(4):
            new = random_token(one)
            one.append_token(*new)
            steps.append(two, *new)
        held(one, two)
        twin = exact(two)
        y = steps.dense(two, q, 0.2, None, new)
        close(y, steps.dense(twin, q.double(), 0.2, None, tuple(x.double() for x in new), reference=True), two, q, 0.2)


def test_a_cache_grows_and_nothing_is_replaced():
    """Chunks are added; the table that kernels read is filled in place until it has to double."""
    _, store = filled_on_device(16, [250], torch.float32, 1, "copy", H=1)
    with ops.backend("gpu"):
        steps.append(store, *random_token(store))
        table, before = device.page_view(store).table, device.footing([store])
        for n in (300, 500):
            store.append(*torch.randn(2, 1, 1, n, 16, device=DEVICE))
        steps.append(store, *random_token(store))
    assert device.page_view(store).table is table and device.footing([store]) == before
    assert len(store.chunks) > 2 and device.page_view(store).lengths.tensor.tolist() == store.lengths == [1052]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("D", "G", "dtype", "scored"), [(16, 1, "float32", True), (80, 3, "bfloat16", True), (128, 17, "float16", False)]
)
def test_slots(D, G, dtype, scored):
    for capacity, seen in ((100, [100, 7]), (40, [95, 12]), (1, [1, 1])):
        shape, type_ = Shape(2, 1, G, D), TYPES[dtype]
        store = Slots(shape, type_, DEVICE, capacity, scored=scored)
        k, v = torch.randn(2, 2, 1, max(seen), D, device=DEVICE).to(type_)
        store.append(k, v, [max(seen) - n for n in seen])
        for b, n in enumerate(store.filled):
            store.k[b, :, n:] = store.v[b, :, n:] = torch.nan
            if scored:
                store.score[b, :, :n].uniform_()
                store.pos[b, :, :n] = torch.arange(n)
        twin = exact(store)
        for _ in range(2):
            q, new = torch.randn(2, 1, G, D, device=DEVICE).to(type_), random_token(store)
            want = steps.slots(twin, q.double(), *(x.double() for x in new), D**-0.5, 9.0, [3, 0], reference=True)
            with ops.backend("gpu"):
                got = steps.slots(store, q, *new, D**-0.5, 9.0, [3, 0])
            close(got, want, store, q, D**-0.5)
            assert (twin.filled, twin.lengths) == (store.filled, store.lengths)
            for b, n in enumerate(store.filled):
                for name in ("k", "v", "pos", "score"):
                    x, y = getattr(store, name), getattr(twin, name)
                    if x is not None:
                        atol, rtol = (1e-6, 1e-4) if name == "score" else (0, 0)
                        torch.testing.assert_close(x[b, :, :n].double(), y[b, :, :n].double(), atol=atol, rtol=rtol)


@pytest.mark.parametrize("tile", [16, 1024])
def test_of_equal_scores_the_older_token_goes(tile, monkeypatch):
    """Slots are in no order, and a query of zeros gives all of them the same weight: the oldest token goes each time.

    The scores lie in one tile or in several.
    """
    monkeypatch.setattr(launch.SETTINGS, "slots", replace(launch.SETTINGS.slots, tile=tile))
    store = Slots(Shape(1, 2, 1, 16), torch.float32, DEVICE, 40, scored=True)
    store.append(*torch.randn(2, 1, 2, 40, 16, device=DEVICE))
    store.pos[0] = torch.stack([torch.randperm(40) for _ in range(2)])
    q = torch.zeros(1, 2, 1, 16, device=DEVICE)
    for step in range(40, 46):
        store.score.fill_(1.0)
        with ops.backend("gpu"):
            steps.slots(store, q, *random_token(store), 1.0, None, [3])
        assert store.pos[0].sort(-1).values.tolist() == [list(range(step - 39, step + 1))] * 2


METHODS = ["Dense()", "SparQ(r=8, k=20, channels='int8', mean_value=True)", "H2O(k=24)", "LMInfinite(k=20, initial=3)"]
METHODS += ["SnapKV(k=24)", "LMInfinite(k=20, initial=3, positions='cache')"]
SAME_KERNELS = ["SubGen(k=10, recent=8)", "LowRank(r=8, k=20)", "TopK(k=12)", "Strided(k=20)", "Fixed(k=20)"]


@pytest.mark.parametrize("spec", [*METHODS, *(pytest.param(spec, marks=pytest.mark.slow) for spec in SAME_KERNELS)])
def test_a_prompt_and_steps_of_every_method(spec):
    """Left padding, steps, and rows that change places between them, as the reference has it."""
    compare_a_prompt_and_steps(spec)


# One sink of ordinary size and none; one far above all logits, and one far below them.
@pytest.mark.slow
@pytest.mark.parametrize("sinks", [[2.0, -torch.inf], [1000.0, -1000.0]], ids=str)
@pytest.mark.parametrize("spec", [*METHODS, "TopK(k=12)"])
def test_every_method_with_sinks(spec, sinks):
    compare_a_prompt_and_steps(spec, torch.tensor([sinks], device=DEVICE))


@pytest.mark.slow
def test_sinks_with_both_forms_of_step_1(launched):
    compare_a_prompt_and_steps("SparQ(r=8, k=20, mean_value=True)", torch.tensor([[2.0, 1000.0]], device=DEVICE))


def compare_a_prompt_and_steps(spec, sinks=None):
    method, scale, D = parse(spec), 0.25, 16
    options = {"scale": scale} if sinks is None else {"scale": scale, "sinks": sinks}
    q, k, v = torch.randn(3, 2, 1, 44, D, device=DEVICE).double().float()
    stores, outputs = [], []
    for name in ("ref", "gpu"):
        with ops.backend(name):
            store = empty_store(method, Shape(2, 1, 2, D), torch.float32, DEVICE)
            queries = torch.stack([q, -q], 2)  # (B,H,G,n,D)
            method.prefill(store, queries[..., :40, :], k[:, :, :40], v[:, :, :40], pad=[0, 5], **options)
            y = []
            for i in range(40, 44):
                if i == 42:
                    store.select(torch.tensor([1, 0]))
                y.append(method.decode(store, queries[..., i, :], k[:, :, i], v[:, :, i], **options))
            stores.append(store), outputs.append(torch.stack(y))
    assert stores[0].lengths == stores[1].lengths == [39, 44]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=2e-5)


def test_a_graph_holds_no_step_that_turns_keys_or_grows(monkeypatch):
    """How far keys are turned is the host's number, and slots that grow move: such a step is launched each time."""
    monkeypatch.setattr("skimkv.ops.backends.backend_for", lambda device, head_size: SimpleNamespace(name="gpu"))
    specs = "LMInfinite(k=20)", "LMInfinite(k=20, positions='cache')", "SnapKV(k=20)"
    store, turning, growing = (parse(spec).store(Shape(1, 1, 1, 16), torch.float32) for spec in specs)
    store.device = turning.device = growing.device = torch.device("cuda")
    assert ops.graphable(store) and not ops.graphable(turning) and not ops.graphable(growing)
