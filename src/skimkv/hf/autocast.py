"""What torch.autocast does to the inputs of a product: the same for PyTorch's operations and for ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def is_autocast(x: Tensor) -> bool:
    """Whether autocast is on for the device of x. PyTorch knows none for tensors without memory."""
    return not x.is_meta and torch.is_autocast_enabled("cpu" if x.is_cpu else x.device.type)


def with_autocast(compute: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Call a function with its inputs in the type of autocast, as PyTorch calls its own product or attention.

    Floats become that type, but for those of 64 bits. What the function does is not changed by autocast again.
    """
    device = inputs[0].device.type
    dtype = torch.get_autocast_dtype(device)
    casts = (x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in inputs)
    with torch.autocast(device, enabled=False):
        return compute(*casts)
