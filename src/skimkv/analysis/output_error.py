"""The error of single attention outputs against dense attention: on a model's heads, and on heads that are made up.

A method decodes the last tokens of a text with the queries, keys and values that dense attention had there, so that
errors do not add up from layer to layer. The error of one query head at one step is |y - dense| / mean |v|, where the
mean is over the cached tokens of its KV head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..eval.shared_prompt import record_prompt
from ..methods import Dense
from ..methods.base import Method
from ..methods.skim import Skim, estimated_logits
from ..methods.sparq import top_channels
from ..stores.base import Shape
from ..stores.quantise import GROUP, quantise_channels
from . import statistics

CACHE_DTYPE = torch.bfloat16  # of the measured stores: bytes count as of a cache in 16 bits
SYNTHETIC_HEADS = 12  # KV heads, from the sharpest to the most diffuse
SYNTHETIC_TOKENS = 32768
# Codes of 4 bits divide a channel's range over a group into 15 steps. 256 Gaussian numbers have a range of 5.65
# standard deviations on average: a channel which is not read has a variance of (15 / 5.65)^2 steps around its mean.
READ_VARIANCE, UNREAD_VARIANCE = 1 / 12, (15 / 5.65) ** 2
LEAST_EFFECTIVE = 4  # effective tokens of the sharpest synthetic head; every next head has twice as many


class Heads(NamedTuple):
    """The heads of one layer and one text of n tokens: k, v (H,n,D), and q (H,G,m,D) of the last m tokens.

    m is n for the heads of a model. source: "captured" or "synthetic". text: the number of the text; the layers that
    read one text have the same.
    """

    source: str
    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    text: int = 0


class Reference(NamedTuple):
    """What dense attention gives at the measured steps of some heads.

    y (steps,H,G,D) · bytes of all steps · effective (H,G): exp of the weights' entropy, the mean over the steps ·
    norm (H,): mean |v|.
    """

    y: Tensor
    bytes: int
    effective: Tensor
    norm: Tensor


@dataclass(frozen=True)
class OutputError:
    """The errors of one method over all heads of one source.

    error (heads, steps): one row for each query head. sharp (heads,) bool: whether the head attends to fewer effective
    tokens than the square root of the cached tokens. bytes and dense_bytes are of all heads and steps, as the stores'
    accessors count them. predicted (heads, steps): for Skim, the closed form of its scores' error over the measured.
    texts: how many texts the heads are of, each of which has all steps.
    """

    source: str
    method: str
    error: Tensor
    sharp: Tensor
    bytes: int
    dense_bytes: int
    predicted: Tensor | None = None
    texts: int = 1

    @property
    def share(self) -> float:
        """The counted bytes as a share of dense attention's."""
        return self.bytes / self.dense_bytes

    def json(self) -> dict[str, Any]:
        """Return the figures for --json; `sharp` and `diffuse` are None where there is no such head.

        bytes_per_step: what one step of one text reads in all layers, the mean over the steps of all texts.
        predicted_score_error: the 5th, 50th and 95th percentile of predicted over measured, for Skim only.
        """
        of_scores: dict[str, Any] = {}
        if self.predicted is not None:
            of_scores["predicted_score_error"] = [percentile(self.predicted, p) for p in (0.05, 0.5, 0.95)]
        return {
            "heads": self.source,
            "method": self.method,
            "bytes_per_step": self.bytes // (self.texts * self.error.shape[1]),
            "share_of_dense": self.share,
            **_summary(self.error),
            "sharp": _summary(self.error[self.sharp]) if self.sharp.any() else None,
            "diffuse": _summary(self.error[~self.sharp]) if not self.sharp.all() else None,
            **of_scores,
        }


def _summary(error: Tensor) -> dict[str, Any]:
    flat = error.flatten().double()
    return {
        "query_heads": len(error),
        "mean": float(flat.mean()),
        "p95": percentile(flat, 0.95),
        "p99": percentile(flat, 0.99),
        "max": float(flat.max()),
    }


def percentile(x: Tensor, p: float) -> float:
    """Return the least entry of x that a share p of the entries does not exceed. torch.quantile has a limit of size."""
    return float(x.flatten().sort().values[max(0, math.ceil(p * x.numel()) - 1)])


@torch.inference_mode()
def measure(
    methods: Sequence[Method], layers: Sequence[Heads], steps: int, dtype: torch.dtype = CACHE_DTYPE
) -> Iterator[OutputError]:
    """Decode the last `steps` tokens of every layer's heads by each method, and compare with dense attention.

    layers: heads of one source, all with more than `steps` tokens. dtype: of keys and values in the stores. The errors
    of a method come as soon as it has decoded all layers.
    Raises ValueError if a text is too short, or if a method needs the prompt's queries and these heads have none.
    """
    for heads in layers:
        if not 0 < steps < heads.k.shape[1] or heads.q.shape[2] < steps:
            raise ValueError(f"steps = {steps} must be at least 1 and below the {heads.k.shape[1]} tokens of the heads")
    references = [reference(heads, steps, dtype) for heads in layers]
    for method in methods:
        errors, sharp, bytes_read, predicted = [], [], 0, list[Tensor]()
        for heads, dense in zip(layers, references, strict=True):
            y, count = decode(method, heads, steps, dtype)
            error = (y - dense.y).norm(dim=-1) / dense.norm[:, None]  # (steps,H,G)
            errors.append(error.flatten(1).T)
            sharp.append(dense.effective.flatten() < heads.k.shape[1] ** 0.5)
            bytes_read += count
            if isinstance(method, Skim) and heads.k.shape[1] >= GROUP:
                of_scores = index_score_error(method, heads, steps)
                predicted.append((of_scores.predicted / of_scores.measured).flatten(0, 1))
        yield OutputError(
            layers[0].source,
            repr(method),
            torch.cat(errors),
            torch.cat(sharp),
            bytes_read,
            sum(dense.bytes for dense in references),
            torch.cat(predicted) if predicted else None,
            len({heads.text for heads in layers}),
        )


def decode(method: Method, heads: Heads, steps: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Decode the last `steps` tokens of these heads by the method's reference: (steps,H,G,D) and the bytes it counted.

    Raises ValueError if the method chooses what it keeps by the prompt's queries, and the heads have none.
    """
    H, G, m, D = heads.q.shape
    n = heads.k.shape[1]
    keys, values = (x[None].to(dtype) for x in (heads.k, heads.v))
    store = method.store(Shape(1, H, G, D), dtype, keys.device)
    options: dict[str, Any] = {"scale": heads.scale, "softcap": heads.softcap, "sinks": heads.sinks}
    with ops.backend("ref"):
        if m == n:
            prompt = slice(0, n - steps)
            method.take(
                store, heads.q[None, ..., prompt, :].to(dtype), keys[:, :, prompt], values[:, :, prompt], **options
            )
        elif type(method).take is not Method.take:
            raise ValueError(f"{method} chooses what it keeps of a prompt, and synthetic heads are no prompt")
        else:
            store.append(keys[:, :, : n - steps], values[:, :, : n - steps])
        before, outputs = store.bytes, []
        for i in range(-steps, 0):
            y = method.decode(store, heads.q[None, ..., i, :], keys[:, :, i], values[:, :, i], **options)
            outputs.append(y[0].float())
    return torch.stack(outputs), store.bytes - before


class ScoreError(NamedTuple):
    """The root mean square error of the logits that Skim's index gives to tokens of closed groups: (H,G,steps) each.

    predicted: its closed form, from the queries and the steps of the codes alone.
    """

    predicted: Tensor
    measured: Tensor


@torch.inference_mode()
def index_score_error(method: Skim, heads: Heads, steps: int) -> ScoreError:
    """Measure the error of Skim's estimated logits for the last `steps` queries, beside its closed form.

    sigma^2 = scale^2 sum over channels of q^2 step^2 w, the mean over groups, where w is 1/12 for a channel that is
    read (an even rounding error) and 7.0 for one whose mean is taken (the variance of Gaussian keys of that range).
    Raises ValueError if the heads have no closed group of 256 tokens.
    """
    H, G, _, D = heads.q.shape
    n = heads.k.shape[1] // GROUP * GROUP
    if not n:
        raise ValueError(f"{heads.k.shape[1]} tokens must be at least {GROUP}, the tokens of one group of the index")
    k, v = (x[None, :, :n].float() for x in (heads.k, heads.v))
    store = method.store(Shape(1, H, G, D), torch.float32, k.device)
    store.append(k, v)
    r = method.channels(D)
    step = quantise_channels(k.transpose(-1, -2), 4)[1][0, :, :, 0]  # (H,groups,D)
    last, predicted, measured = store.read_last_steps(), [], []
    for i in range(-steps, 0):
        q = heads.q[None, :, :, i].float()  # (1,H,G,D)
        i1 = top_channels(q * last[:, :, None], r)
        error = estimated_logits(q, store, r, heads.scale) - q @ k.transpose(-1, -2) * heads.scale
        measured.append(error[0].square().mean(-1).sqrt())
        weight = torch.full_like(last, UNREAD_VARIANCE).scatter(-1, i1, READ_VARIANCE)[0]  # (H,D)
        variance = (step.square().mean(1) * weight)[:, None] * q[0].square()
        predicted.append(variance.sum(-1).sqrt() * heads.scale)
    return ScoreError(torch.stack(predicted, -1), torch.stack(measured, -1))


def reference(heads: Heads, steps: int, dtype: torch.dtype) -> Reference:
    """Dense attention at the last `steps` tokens of these heads."""
    y, count = decode(Dense(), heads, steps, dtype)
    n = heads.k.shape[1]
    at = torch.arange(n - steps, n, device=heads.k.device)
    logits = statistics.logits(
        heads.q[:, :, -steps:].float(), heads.k.to(dtype).float(), at, heads.scale, heads.softcap
    )
    norm = heads.v.to(dtype).float().norm(dim=-1).mean(-1)
    return Reference(y, count, effective_tokens(logits).mean(-1), norm)


def effective_tokens(logits: Tensor) -> Tensor:
    """Compute exp of the entropy of softmax(logits): how many equal weights would be as spread. (...,n) -> (...)."""
    log_weights = logits.log_softmax(-1)
    weights = log_weights.exp()
    return (-(weights * log_weights.clamp_min(torch.finfo(log_weights.dtype).min)).sum(-1)).exp()


def captured_heads(model: Any, pieces: Sequence[Sequence[int]]) -> Iterator[Heads]:
    """Let a model read pieces of a text, and yield the heads of each layer of full attention."""
    for text, piece in enumerate(pieces):
        with torch.inference_mode():
            prompt = record_prompt(model, torch.tensor([piece], device=model.device))
        for layer in prompt.recorded.values():
            yield Heads("captured", layer.q[0].float(), layer.k[0], layer.v[0], **layer.softmax, text=text)


def synthetic_heads(steps: int, tokens: int = SYNTHETIC_TOKENS, seed: int = 0, D: int = 128, G: int = 4) -> Heads:
    """Make up 12 KV heads of a long text, from sharp to diffuse, with the traits of trained heads.

    A token's content is a topic, which lasts for 30 to 300 tokens, and a word of a vocabulary in which few words are
    frequent (Zipf's law). Keys are a projection of the content with channels of unequal size, noise, and two pairs of
    channels with a large constant, rotated by their position as in Llama 3 (RoPE, theta 500000); values are another
    projection. The first token is a sink: its key is the constant alone and its value is small. A query looks for the
    content of a few tokens, the G queries of a group for nearly the same ones; its length is chosen so that the
    softmax has 4 effective tokens in the first head and twice as many in every next one (at most half of all tokens).
    The same seed gives the same heads.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(*size, generator=generator)

    rank, words = 64, 4000
    lasting = torch.randint(30, 301, (tokens // 30 + 1,), generator=generator)
    topic = normal(len(lasting), rank)[torch.arange(len(lasting)).repeat_interleave(lasting)[:tokens]]
    frequency = 1 / torch.arange(1, words + 1)
    word = normal(words, rank)[torch.multinomial(frequency, tokens, replacement=True, generator=generator)]
    content = 0.6 * topic + 0.8 * word
    q, k, v = [], [], []
    for head in range(SYNTHETIC_HEADS):
        half = D // 2
        size = (0.5 * normal(half)).exp() * torch.linspace(0.5, 1.5, half)  # fast pairs carry less of the content
        constant = torch.zeros(D)
        for pair, angle in zip(
            (half - 1 - torch.randperm(half // 6, generator=generator)[:2]).tolist(), normal(2), strict=True
        ):
            constant[pair], constant[pair + half] = 10 * math.cos(3 * angle), 10 * math.sin(3 * angle)
        to_keys = normal(rank, D) / rank**0.5 * size.repeat(2)
        unrotated = content @ to_keys + 0.3 * normal(tokens, D) * size.repeat(2) + constant
        unrotated[0] = 2 * constant
        k.append(rotate(unrotated, torch.arange(tokens)))
        values = content @ (normal(rank, D) / rank**0.5) + 0.5 * normal(tokens, D)
        values[0] *= 0.05
        v.append(values)
        wanted = min(LEAST_EFFECTIVE * 2.0**head, tokens / 2)
        targets = torch.randint(0, tokens - steps, (steps, 3), generator=generator)
        looks_for = content[targets].mean(1)[:, None] + 0.3 * normal(steps, G, rank)
        unscaled = looks_for @ (to_keys / size.repeat(2)) + 0.25 * constant + 0.15 * normal(steps, G, D)
        at = torch.arange(tokens - steps, tokens)
        queries = rotate(unscaled.transpose(0, 1), at)  # (G,steps,D)
        logits = statistics.logits(queries[None], k[-1][None], at, D**-0.5)[0]
        q.append(queries * length_for_effective_tokens(logits, wanted)[..., None])
    return Heads("synthetic", torch.stack(q), torch.stack(k), torch.stack(v), D**-0.5)


def rotate(x: Tensor, position: Tensor, theta: float = 5e5) -> Tensor:
    """Rotate channels i and i + D/2 by position / theta^(2i/D), the rotary embedding: x (...,n,D), position (n,)."""
    half = x.shape[-1] // 2
    angle = position.double()[:, None] * theta ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def length_for_effective_tokens(logits: Tensor, wanted: float) -> Tensor:
    """Find the factor c > 0 for which softmax(c * logits) has the wanted effective tokens: (...,n) -> (...)."""
    low, high = (torch.full(logits.shape[:-1], end) for end in (1e-3, 1e3))
    for _ in range(24):
        middle = (low * high).sqrt()
        spread = effective_tokens(logits * middle[..., None]) > wanted
        low, high = torch.where(spread, middle, low), torch.where(spread, high, middle)
    return (low * high).sqrt()
