"""The roofline: SparQ's appendix C worked through, and decode steps of models at best."""

from __future__ import annotations

import pytest
import torch

from skimkv.bench import machine as machines
from skimkv.bench import roofline as roof
from skimkv.bench.shapes import HARDWARE, MODELS, ModelReads, reads_of_sizes
from skimkv.methods import Dense, SparQ

LLAMA = reads_of_sizes("llama-2-7b", MODELS["llama-2-7b"])


def test_a_step_of_llama_2_7b():
    """Its weights are nearly 12 d_m^2 a layer: of the transfers, attention's share is rho / (rho + 6/B) (eq. 1)."""
    a100 = HARDWARE["a100"]
    dense = roof.decode_step(a100, LLAMA, Dense(), 4096, 1, "float16", torch.float16)
    assert dense.share == pytest.approx(1 / (1 + 6), rel=0.03)
    assert dense.seconds == pytest.approx((2 * LLAMA.weights + 2 * 32 * 32 * (2 * 4096 + 2) * 128) / a100.bandwidth)
    assert dense.memory_bound


@pytest.mark.parametrize(("n", "batch", "times"), [(4096, 64, 6.4), (16384, 1, 7.53)])
def test_the_papers_theoretical_speedups(n, batch, times):
    """Table 4 and section 6.1: r = 32, k = 128 at Llama 2 7B's shape, attention alone."""
    ours, dense = (
        roof.decode_step(HARDWARE["ipu"], LLAMA, m, n, batch, "float16", torch.float16)
        for m in (SparQ(r=32, k=128, mean_value=False), Dense())
    )
    assert dense.attention / ours.attention == pytest.approx(times, rel=0.004)


@pytest.mark.parametrize(("weights", "method", "times"), [
    ("bfloat16", SparQ(r=32, k=128), 1.12), ("int8", SparQ(r=32, k=128, channels="int8"), 1.25),
])  # fmt: skip
def test_what_the_readme_says_of_a_whole_step(weights, method, times):
    """Llama 3 8B at batch 1 and 16k tokens: most of a step is weights, whatever the machine's bandwidth."""
    model = reads_of_sizes("llama-3-8b", MODELS["llama-3-8b"])
    for machine in HARDWARE.values():
        ours, dense = (
            roof.decode_step(machine, model, m, 16384, 1, weights, torch.bfloat16) for m in (method, Dense())
        )
        assert round(dense.seconds / ours.seconds, 2) == times


def test_arithmetic_limits_a_large_batch():
    """Weights are read once for all rows; eight query heads share what is read of the cache."""
    model = reads_of_sizes("grouped", (8192, 28672, 64, 8, 80, 32000))
    h100 = HARDWARE["h100"]
    one, many = (roof.decode_step(h100, model, Dense(), 64, B, "bfloat16", torch.bfloat16) for B in (1, 4096))
    assert one.memory_bound and not many.memory_bound
    assert many.intensity > h100.ridge(2) / 2 > one.intensity
    assert many.seconds - many.attention == pytest.approx(4096 * model.weights / h100.peak[2])
    g, rho, B = 8, 4096 / (8 * 8192), 64  # rho = S / (g d_m)
    step = roof.decode_step(h100, model, Dense(), 4096, B, "bfloat16", torch.bfloat16)
    eq_c2 = (6 + rho * g) / (6 / B + rho)
    assert step.intensity * 2 == pytest.approx(eq_c2, rel=0.25), "a real layer is no 12 d_m^2"


def test_sliding_layers_stop_growing_at_their_window():
    model = ModelReads("half sliding", 1000, 2, 2, 2, 16, sliding=1, window=8)
    short, long = (
        roof.decode_step(HARDWARE["a10"], model, Dense(), n, 1, "bfloat16", torch.bfloat16) for n in (8, 108)
    )
    # after 8 tokens, as after 108, the current one and 7 cached ones are a window
    assert long.attention / short.attention == pytest.approx((2 * 108 + 2 + 16) / (2 * 8 + 2 + 16))
    within = roof.decode_step(HARDWARE["a10"], model, Dense(), 5, 1, "bfloat16", torch.bfloat16)
    assert within.attention / short.attention == pytest.approx(2 * 12 / (18 + 16))
    assert long.held_bytes == 2000 + 2 * 2 * 16 * 2 * (108 + 8)


def test_a_table_of_embeddings_is_held_but_not_read():
    """Llama 3 8B has 8,030,261,248 parameters; the output layer of SmolLM is its table."""
    for name, parameters in (("llama-3-8b", 8030261248), ("smollm-135m", 134515008)):
        model = reads_of_sizes(name, MODELS[name])
        step = roof.decode_step(HARDWARE["a10"], model, Dense(), 100, 1, "bfloat16", torch.bfloat16)
        assert step.held_bytes == 2 * parameters + 2 * 2 * model.layers * model.H * model.D * 100


def test_dense_attention_is_half_of_a_step_where_its_bytes_are_those_of_the_weights():
    assert roof.crossing(HARDWARE["a10"], LLAMA, 1, "bfloat16", torch.bfloat16) == 32768
    assert roof.crossing(HARDWARE["a10"], LLAMA._replace(layers=0), 1, "bfloat16", torch.bfloat16) is None


def test_this_processor_can_be_measured(monkeypatch):
    monkeypatch.setattr(machines, "flush_bytes", lambda: 1 << 20)
    here = roof.measure_cpu(times=1)
    assert here.source == "measured" and here.name.startswith("here: ") and here.memory is None
    assert 0 < here.peak[4] <= here.peak[2] and here.bandwidth > 0
