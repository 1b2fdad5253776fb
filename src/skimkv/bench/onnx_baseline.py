"""ONNX Runtime's dense attention for one decode step: its operator GroupQueryAttention, with its cache in place."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .machine import Call

PACKAGES = ("onnxruntime", "onnx")  # the second one makes the graph
CACHES = (torch.float32, torch.float16, torch.int8)
SPIN = (
    0.03  # seconds after which OpenMP's threads, which read memory between two calls, sleep; they would be in its way
)


def check_installed() -> None:
    """Raise ValueError, in one line, unless the packages are installed."""
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ValueError(f"onnxruntime: it needs {' and '.join(missing)}: pip install {' '.join(PACKAGES)}")


def dense_calls(
    q: Tensor, k: Tensor, v: Tensor, token: Sequence[Tensor], threads: int
) -> dict[str, tuple[Call, Call, Tensor]]:
    """Return for each kind of cache a step, what writes its query anew from q, and its result (B,1,H*G*D).

    q (B,H,G,D) · k, v (B,H,N,D) · token: the current key and value (B,H,D), which a step writes to the end of its own
    cache, always to the same place. Names are onnxruntime:DTYPE, by the cache. Codes of int8 have one scale for all
    keys and one for all values, and the query is float32 then.
    """
    calls: dict[str, tuple[Call, Call, Tensor]] = {}
    for cache in CACHES:
        numbers = torch.float32 if cache == torch.int8 else cache
        query = q.to(numbers).flatten(1).unsqueeze(1).contiguous()
        new = [x.to(numbers).flatten(1).unsqueeze(1).contiguous() for x in token]
        scales = [float(x.abs().max()) / 127 for x in (k, v)]
        stored = [_stored(x, cache, scale) for x, scale in zip((k, v), scales, strict=True)]
        result = torch.empty_like(query)
        step = _step(query, new, stored, scales, result, k.shape[1], q.shape[1] * q.shape[2], threads)
        refresh = partial(_refresh, query, q)
        calls[f"onnxruntime:{str(cache).removeprefix('torch.')}"] = step, refresh, result
    return calls


def _refresh(query: Tensor, q: Tensor) -> None:
    """Write the query, and wait until a thread of its own has a processor to itself: OpenMP's threads spin on."""
    query.copy_(q.flatten(1).unsqueeze(1))
    time.sleep(SPIN)


def _stored(x: Tensor, cache: torch.dtype, scale: float) -> Tensor:
    """All rows in the cache's type, with room for one more: (B,H,N+1,D)."""
    B, H, N, D = x.shape
    stored = torch.zeros(B, H, N + 1, D, dtype=cache)
    stored[:, :, :N] = (x.float() / scale).round() if cache == torch.int8 else x
    return stored


def _step(
    query: Tensor,
    new: Sequence[Tensor],
    stored: Sequence[Tensor],
    scales: Sequence[float],
    result: Tensor,
    kv_heads: int,
    heads: int,
    threads: int,
) -> Call:
    """A call of the operator on these tensors, whose memory it reads and writes itself."""
    import onnxruntime  # type: ignore[import-not-found, unused-ignore]
    from onnx import TensorProto, helper  # type: ignore[import-not-found, unused-ignore]

    B, (total, D) = query.shape[0], stored[0].shape[2:]
    quantised = stored[0].dtype == torch.int8
    inputs = {
        "query": query, "key": new[0], "value": new[1], "past_key": stored[0], "past_value": stored[1],
        "seqlens_k": torch.full((B,), total - 1, dtype=torch.int32),
        "total_sequence_length": torch.tensor(total, dtype=torch.int32),
    }  # fmt: skip
    if quantised:
        inputs |= {name: torch.tensor([x]) for name, x in zip(("k_scale", "v_scale"), scales, strict=True)}
    outputs = {"output": result, "present_key": stored[0], "present_value": stored[1]}
    types = {
        torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16, torch.int8: TensorProto.INT8,
        torch.int32: TensorProto.INT32,
    }  # fmt: skip
    quantisation = {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
    # between the lengths and the scales stand five optional inputs
    names = [*list(inputs)[:7], *([""] * 5), *list(inputs)[7:]] if quantised else list(inputs)
    node = helper.make_node(
        "GroupQueryAttention", names, list(outputs), domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads,
        scale=D**-0.5, **(quantisation if quantised else {}),
    )  # fmt: skip
    declared = [
        [helper.make_tensor_value_info(name, types[x.dtype], list(x.shape)) for name, x in tensors.items()]
        for tensors in (inputs, outputs)
    ]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "step", *declared), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.force_spinning_stop", "1")  # so that its threads disturb nobody else
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding: Any = session.io_binding()
    for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
        for name, x in tensors.items():
            bind(name, "cpu", 0, x.numpy().dtype, list(x.shape), x.data_ptr())
    return partial(_run, session, binding, [inputs, outputs])


def _run(session: Any, binding: Any, tensors: object) -> None:
    """Run the operator; the tensors are held because only their addresses are bound."""
    session.run_with_iobinding(binding)
