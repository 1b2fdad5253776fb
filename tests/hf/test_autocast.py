"""Our layers under torch.autocast: they take and give the types that PyTorch's layers would."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import skimkv
from skimkv import ops
from skimkv.hf.gguf_model import load_gguf
from skimkv.hf.layer import Layer
from skimkv.hf.matrix_modules import MatrixEmbedding, MatrixLinear, MatrixModule
from skimkv.hf.norms import replace_norms
from skimkv.hf.weights import FORMATS, quantise
from skimkv.methods import parse
from skimkv.ops import matrices
from skimkv.stores.base import Workspace
from support.gguf_files import Kind, of_family, random_blocks, tiny, write
from support.kernels import EPS

TYPES = [torch.float16, torch.bfloat16]
INPUTS = [torch.float32, torch.bfloat16, torch.float16]
OUT, IN = 40, 256
BLOCKS = ["Q4_0", "Q8_0", "Q6_K", "IQ4_XS"]


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def layer(kind: str) -> tuple[MatrixLinear, nn.Linear]:
    """One of our layers, and PyTorch's with the numbers that its weights stand for."""
    bias = nn.Parameter(torch.randn(OUT), requires_grad=False)
    if kind in FORMATS:
        format = FORMATS[kind]
        ours = MatrixLinear(format.convert(torch.randn(OUT, IN) / 16), format.kind, OUT, IN, torch.float32, bias)
    else:
        ours = MatrixLinear(random_blocks(kind, OUT, IN), kind, OUT, IN, torch.float32, bias)
    theirs = nn.Linear(IN, OUT)
    theirs.weight.copy_(matrices.dequantise(ours.weight, ours.kind, torch.arange(OUT)))
    theirs.bias.copy_(bias)
    return ours, theirs


@pytest.mark.parametrize("kind", [*FORMATS, *BLOCKS])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_product_has_the_type_of_autocast(backend, kind, dtype):
    ours, theirs = layer(kind)
    for given in INPUTS:
        for tokens in (1, 3, 20):
            x = torch.randn(tokens, 1, IN).to(given)
            outside = ours(x)
            with torch.autocast("cpu", dtype):
                y, expected = ours(x), theirs(x)
                with torch.autocast("cpu", enabled=False):
                    assert torch.equal(ours(x), outside)
                assert torch.equal(ours(x), y)
            assert y.dtype == expected.dtype == dtype and outside.dtype == given
            rounded = x.to(dtype)
            size = rounded.double().abs() @ theirs.weight.double().abs().T + theirs.bias.abs()
            exact = rounded.double() @ theirs.weight.double().T + theirs.bias
            # activations of blocks may become integers of 8 bits; PyTorch rounds the weights
            assert ((y - exact).abs() <= (2.0**-7 if kind in BLOCKS else 2 * EPS[dtype]) * size).all()


def test_what_autocast_leaves_alone():
    """Floats of 64 bits, tensors without memory, ids of an embedding, and a type that it does not support."""
    ours, theirs = layer("float32")
    table = MatrixEmbedding(torch.randn(OUT, IN), matrices.FLOATS, OUT, IN, torch.bfloat16)
    x = torch.randn(3, IN)
    with torch.autocast("cpu", torch.bfloat16):
        for module in (ours, theirs):
            with pytest.raises((ValueError, RuntimeError), match=r"float64|Double"):
                module(x.double())
        assert table(torch.tensor([[1, 2]])).dtype == torch.bfloat16
        empty, weight = x.to("meta"), ours.weight.to("meta")
        assert MatrixLinear(weight, matrices.FLOATS, OUT, IN)(empty).dtype == torch.float32
    with pytest.warns(UserWarning, match="not supported"), torch.autocast("cpu", torch.float32):
        torch.testing.assert_close(ours(x), nn.functional.linear(x, ours.weight, ours.bias))
    with torch.autocast("cuda", torch.float16, enabled=torch.cuda.is_available()):
        assert ours(x).dtype == torch.float32, "autocast of another device"


@pytest.mark.parametrize("make", [LlamaRMSNorm, lambda size: nn.RMSNorm(size, eps=1e-6)], ids=["llama", "torch"])
@pytest.mark.parametrize("weights", INPUTS, ids=str)
def test_a_normalisation_gives_the_type_of_the_module(make, weights):
    """Also outside of autocast, where its input is of another type than its weights."""
    norm = make(64).to(weights).requires_grad_(False)
    own = [norm(torch.ones(2, 64, dtype=given)).dtype for given in INPUTS]
    replace_norms(norm.modules())
    assert [norm(torch.ones(2, 64, dtype=given)).dtype for given in INPUTS] == own
    for dtype in TYPES:
        with torch.autocast("cpu", dtype):
            for given in INPUTS:
                x = torch.randn(2, 64, dtype=given)
                y, expected = norm(x), type(norm).forward(norm, x)
                assert y.dtype == expected.dtype and torch.equal(y, expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_attention_takes_the_types_that_the_library_s_takes(dtype):
    """Queries and keys that were turned are of 32 bits, values of 16; those of 64 bits stay."""
    for given, expected in ((torch.float32, dtype), (torch.float64, torch.float64)):
        cache_layer = Layer(parse("Dense()"), Workspace())
        for n in (5, 1):
            q, k = (torch.randn(1, heads, n, 16, dtype=given) for heads in (4, 2))
            v = torch.randn(1, 2, n, 16, dtype=given if given == torch.float64 else torch.bfloat16)
            mask = torch.zeros(1, dtype=torch.int64)
            mask.pads, mask.error, mask.start = [0], None, cache_layer.seen
            with ops.backend("ref"), torch.autocast("cpu", dtype):
                y = cache_layer.attend(q, *cache_layer.update(k, v), mask, {"scale": 0.25})
            assert y.dtype == cache_layer.store.dtype == expected


def gguf(path) -> nn.Module:
    """A model of a file with blocks of several types."""
    kinds = {f"blk.{i}.{name}": Kind[type] for i in range(2) for name, type in (("attn_q", "Q4_0"), ("ffn_up", "Q6_K"))}
    write(path / "model.gguf", of_family("qwen3"), kinds)
    return load_gguf(path / "model.gguf", dtype=torch.bfloat16)[0].eval()


def stock(model: nn.Module) -> nn.Module:
    """The same model with PyTorch's layers, whose weights are what ours stand for."""
    twin = type(model)(model.config).to(torch.bfloat16).eval()
    twin.load_state_dict({**twin.state_dict(), **{n: p for n, p in model.state_dict().items() if "norm" in n}})
    for name, part in model.named_modules():
        if isinstance(part, MatrixModule):
            rows = matrices.dequantise(part.weight, part.kind, torch.arange(part.shape[0]))
            order = getattr(part, "order", None)
            if order is not None:
                rows = torch.empty_like(rows).index_copy_(0, order.long(), rows)
            twin.get_submodule(name).weight.data = rows if isinstance(part, MatrixLinear) else rows.bfloat16()
        elif isinstance(part, nn.Embedding):
            twin.get_submodule(name).weight.data = part.weight
    return twin


@pytest.mark.slow
@pytest.mark.parametrize("weights", [*FORMATS, "gguf"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_model_under_autocast(tmp_path, backend, weights, dtype):
    """A batch with padding: logits as those of PyTorch's layers, and the tokens that they choose."""
    model = gguf(tmp_path) if weights == "gguf" else quantise(tiny().bfloat16(), weights)
    reference = stock(model)
    ids = torch.randint(2, 200, (3, 24))
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    exact = copy.deepcopy(reference).float()(**inputs).logits
    with torch.autocast("cpu", dtype):
        expected = reference(**inputs).logits
        logits = model(**inputs).logits
        assert logits.dtype == expected.dtype == dtype
        # no closer than what rounding does to the library's own logits
        most = max(0.12 * expected[mask.bool()].float().std(), (expected - exact)[mask.bool()].abs().max())
        assert (logits - expected)[mask.bool()].abs().max() <= most
        with skimkv.attach(model, "SparQ(r=16, k=64)"):
            options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            text = model.generate(**inputs, **options)
        longer = torch.cat([mask, torch.ones(3, 8, dtype=mask.dtype)], 1)
        positions = (longer.cumsum(1) - 1).clamp(0)
        logits = reference(input_ids=text, attention_mask=longer, position_ids=positions).logits[:, 23:-1].float()
        logits[..., 1] = -torch.inf  # the end of a text, which generate() was told not to choose
        chosen = logits.gather(-1, text[:, 24:, None])[..., 0]
        assert (logits.amax(-1) - chosen <= 2 * most).all()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_positions_in_the_cache_under_autocast(dtype):
    """How keys turn is found in the model's own type; StreamingLLM that keeps all is dense attention."""
    model, ids = quantise(tiny().bfloat16(), "float32"), torch.randint(2, 200, (1, 24))
    with torch.autocast("cpu", dtype):
        expected = model(ids).logits[:, 20:]
        with skimkv.attach(model, "StreamingLLM(k=64)"):
            cache = skimkv.Cache(model, "StreamingLLM(k=64)")
            model(ids[:, :20], past_key_values=cache)
            steps = [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(20, 24)]
    assert (torch.cat(steps, 1) - expected).abs().max() <= 0.12 * expected.float().std()


def test_autocast_for_a_part_of_a_text():
    """A cache that was filled in one type refuses tokens of another in one line, and goes on with those of its own."""
    model = quantise(tiny().bfloat16(), "int8")
    with torch.autocast("cpu", torch.float16):
        cache = skimkv.Cache(model, "Dense()")
        with skimkv.attach(model, "Dense()"):
            model(torch.tensor([[3, 4, 5]]), past_key_values=cache)
    with skimkv.attach(model, "Dense()"), pytest.raises(ValueError, match=r"float16.*bfloat16|bfloat16.*float16"):
        model(torch.tensor([[6]]), past_key_values=cache)
