"""What bytes exist: growth without copies, memory that is freed, counts by hand, and the batch operations."""

from __future__ import annotations

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from skimkv.methods import H2O, Dense, LMInfinite, LowRank, SparQ, StreamingLLM, SubGen, SubGenStream, TopK
from skimkv.stores.base import Shape
from skimkv.stores.full import Full
from skimkv.stores.slots import Slots
from skimkv.stores.text_positions import runs
from skimkv.testing import Sequences, decode, empty_store, prompt
from support import steps
from support.specs import EACH

pytestmark = pytest.mark.usefixtures("backend")


class Memory:
    """Bytes that PyTorch holds for the CPU while the block runs, against those at its start: `peak` and `made`."""

    def __enter__(self):
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return self

    def __exit__(self, *error):
        self.profile.__exit__(*error)
        self.peak = self.made = self.live = 0
        events = list(self.profile.profiler.kineto_results.experimental_event_tree())
        found = []
        while events:
            event = events.pop()
            events += event.children
            if event.tag == _EventType.Allocation:
                found.append((event.start_time_ns, event.extra_fields.alloc_size))
        for _, size in sorted(found, key=lambda x: x[0]):
            self.live += size
            self.made += max(size, 0)
            self.peak = max(self.peak, self.live)


def tensors(value):
    """Every tensor of a store, each storage once; not the results that a backend has allocated for its next steps."""
    found, queue = {}, list(vars(value).values())
    while queue:
        item = queue.pop()
        if isinstance(item, torch.Tensor):
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, list) or item is getattr(value, "chunks", ()):
            queue += item
        elif hasattr(item, "__dict__"):
            queue += vars(item).values()
    return found


def test_the_meter_sees_what_is_made_and_freed():
    with Memory() as memory:
        x = torch.empty(1000)
        y = torch.empty(3000)
        del y
        z = x + x
    assert (memory.made, memory.peak, memory.live) == (20000, 16000, 8000) and z.numel() == 1000


@pytest.mark.parametrize("channels", ["copy", "int4"])
def test_growing_to_3000_tokens_costs_no_more_than_it_holds(channels):
    """Peak <= 1.15 x what is held at the end and one chunk of 256 tokens; nothing is ever copied to grow."""
    B, H, D, N = 1, 2, 16, 3000
    k, v = torch.randn(B, H, N, D), torch.randn(B, H, N, D)
    parts = list(zip(k.unbind(2), v.unbind(2), strict=True))
    store = Full(Shape(B, H, 1, D), torch.float32, "cpu", channels, mean=True)
    chunk = 256 * B * H * D * (3 * 4 + 1)  # k, v, the copy or the open tail; codes and scales
    with Memory() as memory:
        for i, part in enumerate(parts):
            steps.append(store, *part)
            if i % 61 == 0:  # and so at every length on the way
                assert store.allocated <= 1.15 * store.nbytes + chunk
    assert store.nbytes <= store.allocated == sum(tensors(store).values())
    assert memory.peak <= 1.15 * store.nbytes + chunk
    assert store.nbytes > 0.85 * B * H * N * D * 4 * 2


@pytest.mark.parametrize("method", [m for m in EACH if not isinstance(m, SubGenStream)], ids=repr)
def test_a_token_copies_no_cache(method):
    """After 2600 tokens a decode step's append moves nothing and makes no tensor of the cache's size."""
    shape, n = Shape(1, 2, 1, 16), 2600
    store, block = empty_store(method, shape, torch.float32), torch.randn(1, 2, n, 16)
    method.prefill(store, block[:, :, None], block, block, scale=0.25)
    one = torch.randn(1, 2, 1, 16)
    held = tensors(store)
    with Memory() as memory:
        for _ in range(3):
            if isinstance(store, Slots):
                method.decode(store, one, one[:, :, 0], one[:, :, 0], scale=0.25)
            else:
                steps.append(store, one[:, :, 0], one[:, :, 0])
    assert held.items() <= tensors(store).items()  # every storage is where it was
    if not isinstance(store, Slots):
        one_chunk = sum(tensors(store).values()) - sum(held.values())
        assert memory.made - one_chunk < 0.02 * store.nbytes


def test_a_stream_copies_no_samples():
    method, shape, n = SubGenStream(0.0, 4, 8), Shape(1, 2, 1, 16), 1000
    store, block = empty_store(method, shape, torch.float32), torch.randn(1, 2, n, 16)
    store.append(block, block)
    held = {t.data_ptr(): t.nbytes for b in store.blocks for t in (b.rep, b.samples, b.size)}
    new = block[:, :, 0] + 9
    with Memory() as memory:
        steps.append(store, new, new)
    after = {t.data_ptr(): t.nbytes for b in store.blocks for t in (b.rep, b.samples, b.size)}
    assert held.items() <= after.items()
    assert memory.peak - sum(after.values()) + sum(held.values()) < 0.15 * store.nbytes  # distances, counts: O(m)


@pytest.mark.parametrize(
    ("method", "per_token", "fixed"),
    [
        # D = 16, per KV head: k and v are 2 D elements; a row has n = 600 tokens, 512 of them in closed groups
        (Dense(), {"f": 32}, 0),
        (TopK(3), {"f": 32}, 0),
        (SparQ(2, 4, channels="none"), {"f": 32}, 16 * 4),  # v_mean, float32
        (SparQ(2, 4, mean_value=False), {"f": 48}, 0),
        (SparQ(2, 4, channels="int8"), {"f": 32, "closed": 16, "open": 16}, 16 * 4 + 2 * 2 * 16 * 4),  # two scale rows
        (SparQ(2, 4, channels="int4"), {"f": 32, "closed": 8, "open": 16}, 16 * 4 + 2 * 2 * 16 * 4),
        (LowRank(4, 4), {"f": 36}, None),  # and one projection of D r float32 per head, whatever the batch
        (LMInfinite(20), {"held": (20, 32, 0)}, 0),
        (SubGen(12, recent=8), {"held": (20, 32, 0)}, 0),
        (H2O(20), {"held": (20, 32, 8)}, 0),  # float32 score and int32 position
        (H2O(0.05), {"held": (30, 32, 8)}, 0),
    ],
    ids=lambda x: repr(x)[:40],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_by_hand(method, per_token, fixed, dtype):
    B, H, D, n, size = 2, 3, 16, 600, dtype.itemsize
    store, x = empty_store(method, Shape(B, H, 1, D), dtype), torch.randn(B, H, n, D).to(dtype)
    method.prefill(store, x[:, :, None], x, x, scale=0.25)
    if "held" in per_token:
        tokens, elements, extra = per_token["held"]
        expected = B * H * tokens * (elements * size + extra)
    else:
        cache = n * per_token["f"] * size + 512 * per_token.get("closed", 0) + 88 * per_token.get("open", 0) * size
        expected = B * H * (cache + (fixed or 0)) + (H * D * 4 * 4 if fixed is None else 0)
    assert store.nbytes == expected


def test_a_stream_s_bytes_by_hand():
    # one head of one row: 5 distinct clusters of t = 3: 5 (1 + 3) D and a count; M: s = 7 pairs; mu and m
    store = SubGenStream(0.0, 3, 7).store(Shape(1, 1, 1, 16), torch.float16)
    x = torch.arange(5.0).repeat(4)[None, None, :, None].expand(1, 1, 20, 16).half()
    store.append(x, x)
    assert store.nbytes == 5 * (4 * 16 * 2 + 4) + 2 * 7 * 16 * 2 + 8 + 8


@pytest.mark.parametrize("method", EACH, ids=repr)
def test_a_fork_is_independent(method):
    """Of a ragged batch of three, after a prompt and a step."""
    x = Sequences.random(Shape(3, 2, 2, 16), 304)
    store = prompt(method, x.tokens(0, 300), [0, 10, 30])
    decode(method, store, x.tokens(300, 301))
    fork = store.fork()
    before = (list(store.lengths), store.nbytes, store.elements)
    assert (list(fork.lengths), fork.nbytes, fork.elements) == before
    shared = {p for p in tensors(store) if p} & {p for p in tensors(fork) if p}
    has_rotation = getattr(store, "rotation", None) is not None
    assert len(shared) <= isinstance(method, LowRank) + has_rotation  # a projection and a rotation never change
    decode(method, fork, Sequences.random(x.shape, 3, seed=1))
    assert (list(store.lengths), store.nbytes, store.elements) == before
    again = store.fork()
    assert torch.equal(*(decode(method, each, x.tokens(301, 304)) for each in (store, again)))


@pytest.mark.slow
@pytest.mark.parametrize("rows", [[0, 0, 0], [0, 1], [1], [1, 0, 1]])
@pytest.mark.parametrize("channels", ["none", "copy", "int8", "int4"])
def test_a_shared_store_is_independent_and_shares_whole_groups(channels, rows, backend):
    """Ragged rows of 700 and 300 tokens, in two chunks; the view and the store each go their own way."""

    torch.manual_seed(1)
    store = Full(Shape(2, 2, 1, 16), torch.float32, "cpu", channels, mean=True)
    k, v = torch.randn(2, 2, 2, 700, 16)
    for a, b in ((0, 420), (420, 700)):
        store.append(k[:, :, a:b], v[:, :, a:b], [0, min(max(400 - a, 0), b - a)])
    copied, view = store.fork(), store.share(rows)
    copied.select(torch.tensor(rows))
    assert view.lengths == copied.lengths and view.nbytes == copied.nbytes and view.shape == copied.shape
    here = {c.k.untyped_storage().data_ptr() for c in store.chunks}
    shared = sum(c.cap for c in view.chunks if c.k.untyped_storage().data_ptr() in here)
    assert shared == (0 if rows == [1, 0, 1] else min(view.lengths) // 256 * 256)
    q, other = torch.randn(len(rows), 2, 1, 16), torch.randn(2, 2, 1, 16)
    for step in range(300):
        token = torch.randn(2, len(rows), 2, 16)
        for twin in (view, copied):
            steps.append(twin, *token)
        steps.append(store, *torch.randn(2, 2, 2, 16))
        if step == 200:  # below what is shared
            for twin in (view, copied, store):
                twin.crop(450)
            assert view.shared_tokens == 0
        if step % 50 == 0:
            y, want = (steps.sparq(x, q, 0.25, None, 4, 40, 8, "coverage", True) for x in (view, copied))
            torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)
            steps.sparq(store, other, 0.25, None, 4, 40, 8, "coverage", True)
    for x, y in zip((view.uncounted("k"), view.v_mean), (copied.uncounted("k"), copied.v_mean), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38, 1e12, 5.0])
def test_the_mean_forgets_values_of_any_size(value):
    store = Full(Shape(1, 2, 1, 16), torch.float32, mean=True)
    k, v, others = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16), torch.randn(1, 2, 3, 16)
    store.append(k, v)
    others[0, 1, 2, 4] = value
    store.append(others, others)
    store.crop(3)
    torch.testing.assert_close(store.v_mean, v.mean(2), rtol=1e-5, atol=1e-5)


def test_the_mean_forgets_values_that_cancel():
    store = Full(Shape(1, 2, 1, 16), torch.float32, mean=True)
    k, v, x = torch.randn(1, 2, 300, 16), torch.randn(1, 2, 300, 16), 1e8 * torch.randn(1, 2, 1, 16)
    store.append(k, v)
    for value in (x, -x, torch.ones_like(x)):
        store.append(value, value)
    store.crop(3)
    torch.testing.assert_close(store.v_mean, v.mean(2), rtol=1e-5, atol=1e-5)


def test_no_rows_are_shared():
    store = Full(Shape(2, 2, 1, 16), torch.float32)
    store.append(*torch.randn(2, 2, 2, 300, 16))
    empty = store.share([])
    assert (empty.shape.B, empty.lengths, empty.nbytes) == (0, [], 0)


def test_a_fork_has_positions_of_its_own():
    """A text that is told to go on elsewhere in one store goes on where it was in its fork."""
    method = StreamingLLM(k=4, sinks=1)
    store = method.store(Shape(2, 1, 1, 8), torch.float32)
    store.append(*torch.randn(2, 2, 1, 5, 8))
    fork = store.fork()
    store.places.place(0, 5, runs([100]), [])
    assert (store.places.of(0, 5), fork.places.of(0, 5), fork.places.of(1, 5)) == (100, 5, 5)


def test_a_store_that_adopts_another_allocates_no_rows():
    """K and V are the other's; for a benchmark they would be half of a device's memory."""
    source = Full(Shape(1, 2, 1, 64), torch.float32)
    source.append(*torch.randn(2, 1, 2, 1500, 64))
    store = Full(source.shape, torch.float32)
    with Memory() as memory:
        store.adopt(source, 1500)
    assert memory.peak < source.chunks[0].k.nbytes / 4
    assert store.chunks[0].k is source.chunks[0].k and store.chunks[0].cap == source.chunks[0].cap
