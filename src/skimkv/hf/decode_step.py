"""A decode step of a model as one operation of the library, from the embedding to the last normalisation.

It takes the place of the forward of a model whose layers compute what Llama's do, by whatever class: the model's own
forward says so on random numbers, before the first step and after each change of what its code reads. A step of one
token in every row, with a cache of ours, then runs without transformers' code between the layers, and so does a short
block of tokens, whose attention is that of the cache's layers. All else goes to the model's own forward, as do layers
with a hook, an adapter or a gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as LibraryCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typing_extensions import Unpack

from .. import ops
from ..ops import SoftmaxOptions, matrices
from .angles import angles, kinds_of_angles
from .attention_interface import attention
from .cache_step import attend_as_model
from .layer import AttentionLayer, LayerAttention
from .linear_forward import LinearForward, mixes_types, replace_linear
from .matrix_modules import MatrixModule
from .norms import NormForward, adds_one_of, eps_of, is_close, replace_norms
from .watch import NotesChanges, Watch, has_hooks, is_of_libraries

MOST_TOKENS = 15  # with more rows a call for each product costs little beside the product
MOST_BLOCK_TOKENS = 512  # of all rows, where each has several: the memory for their states stays allocated
MODEL_PARTS = "embed_tokens", "layers", "norm", "rotary_emb"
# The normalisations of a layer, besides which it has attention and a feed-forward part: as Llama has them, before these
# two, or as Gemma 2 and 3, before and after each.
BEFORE = "input_layernorm", "post_attention_layernorm"
AROUND = "input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm", "post_feedforward_layernorm"
PARTS = [{"self_attn", "mlp", *norms} for norms in (BEFORE, AROUND)]
# By how much results may differ, of the largest: by another order of sums, or where products round their inputs.
ROUNDED, QUANTISED = 1e-4, 4e-3
PROJECTIONS, PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
# What a decode step is made of, or what changes nothing in one.
PLAIN_ARGUMENTS = {
    "input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict",
    "cache_position",
}  # fmt: skip


T = TypeVar("T", covariant=True)


class Operation(Protocol[T]):
    """All layers of a model as one operation: ops.Layers, or ops.Decoder."""

    def __call__(self, tokens: Tensor, cos: Tensor, sin: Tensor, steps: Any, attend: Any, /) -> T:
        """What the layers make of tokens."""


class Prepared(NamedTuple):
    """The layers of a model as one operation, for steps of one kind, as long as `watch` sees no change.

    operation: None where the model's own forward computes. attention: of every layer.
    """

    form: tuple[object, ...]
    watch: Watch
    operation: ops.Layers | None = None
    attention: Sequence[LayerAttention] = ()


class TakenStep(NamedTuple):
    """A decode step that was one operation: what the decoder was asked for, and the tokens (B,1,size) it returned."""

    forward: StepForward
    prepared: Prepared
    kwargs: dict[str, Any]
    y: Tensor


taken_steps: ContextVar[list[TakenStep] | None] = ContextVar("taken_steps", default=None)  # a list notes them


class StepForward:
    """The forward of a model of decoder layers, whose decode steps are one operation."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self._prepared: Prepared | None = None
        self._takes_blocks: tuple[Sequence[LayerAttention], bool] | None = None  # whether layers that attend so do

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the model's own forward does, whose arguments and errors these are."""
        if not args and not torch.compiler.is_compiling():
            y = self._step(kwargs)
            if y is not None:
                return BaseModelOutputWithPast(last_hidden_state=y, past_key_values=kwargs["past_key_values"])
        return type(self.model).forward(self.model, *args, **kwargs)

    def __getstate__(self) -> dict[str, object]:
        """A copy is of other modules: it looks for them anew."""
        return {"model": self.model}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"])  # type: ignore[misc]

    def _step(self, kwargs: dict[str, Any]) -> Tensor | None:
        """The tokens (B,n,size) after the last normalisation; None where the model's own forward computes them."""
        cache: Any = kwargs.get("past_key_values")
        ids, x = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        tokens = cast(Tensor, ids if x is None else x)
        if not hasattr(cache, "begin_step") or (ids is None) == (x is None) or tokens.ndim < 2:
            return None
        rows, n = tokens.shape[:2]
        if n != 1 and not (rows * n <= MOST_BLOCK_TOKENS and hasattr(cache, "takes_block")):
            return None
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if not (mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)) or not self._is_plain(kwargs):
            return None
        # Who wants to see a part called sees it in the model's own forward alone, and not when a step is prepared.
        if rows > (MOST_TOKENS if n == 1 else MOST_BLOCK_TOKENS) or has_hooks(self._first_parts()):
            return None
        x = self.model.embed_tokens(ids) if x is None else x
        windows = [_window(layer) for layer in cache.layers]
        prepared = self.prepared(x if n == 1 else x[:1, :1], windows)
        if prepared is None or prepared.operation is None:
            return None
        if n != 1:
            return self._take_block(prepared, x, cache, mask, positions, windows)
        y = self.take(prepared, x, cache, mask, positions)
        taken = taken_steps.get()
        if taken is not None and y is not None:
            taken.append(TakenStep(self, prepared, kwargs, y))
        return y

    def take(
        self, prepared: Prepared, x: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None
    ) -> Tensor | None:
        """Take embedded tokens x (B,1,size) through the layers -> (B,1,size); None where the model's own forward does.

        prepared: for x and its like, with an operation. mask (B,tokens), positions (B,1): as a model's forward takes
        them. Warns and raises ValueError as `Cache.update` does.
        """
        operation = cast(ops.Layers, prepared.operation)
        if positions is None:
            positions = torch.tensor([[cache.get_seq_length()]], device="cpu")
        cos, sin = angles(self.model, x, positions)
        if not operation.fits(len(x), cos, sin):
            return None
        step = cache.begin_step(mask, x.shape[0], x.dtype, prepared.attention)
        return None if step is None else self.take_in(step, operation, x, cos, sin)

    def _take_block(
        self, prepared: Prepared, x: Tensor, cache: Any, mask: Tensor | None, positions: Tensor | None,
        windows: list[int | None],
    ) -> Tensor | None:  # fmt: skip
        """Take a block of embedded tokens x (B,n,size) through the layers, as `take` does one: a row for each token."""
        operation, (B, n, size) = cast(ops.Layers, prepared.operation), x.shape
        if not all(ops.library_multiplies(B * n, kind, x.dtype) for kind in operation.kinds):
            return None
        if self._takes_blocks is None or self._takes_blocks[0] is not prepared.attention:
            self._takes_blocks = prepared.attention, _compare(self.model, size, windows, 2) is not None
        counts = cache.takes_block(mask, B, n, prepared.attention) if self._takes_blocks[1] else None
        if counts is None:
            return None
        if positions is None:
            positions = torch.arange(n, device="cpu")[None] + cache.get_seq_length()
        x = x.reshape(B * n, 1, size)
        cos, sin = angles(self.model, x, positions)
        if cos.shape != sin.shape or cos.ndim != 4 or cos.shape[1:3] not in ((1, n), (B, n)):
            return None
        cos, sin = (one.expand(-1, B, n, -1).reshape(len(one), B * n, 1, -1) for one in (cos, sin))
        if not operation.fits(len(x), cos, sin):
            return None
        modules = self.model.layers
        by_block = attend_as_model(cache, prepared.attention, counts, self.model.config._attn_implementation, modules)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Let layer i attend with the rows as a block."""
            y = by_block(i, *(rows.view(B, n, -1, operation.D).transpose(1, 2) for rows in (q, k, v)))
            return y.reshape(B * n, 1, -1, operation.D)

        return operation(x, cos, sin, [None] * operation.count, attend).view(B, n, size)

    def take_in(self, step: Any, operation: Operation[T], tokens: Tensor, cos: Tensor, sin: Tensor) -> T:
        """What an operation of all layers returns for tokens, in a step of a cache that has begun."""
        try:
            attend = step.attend_by(self.model.config._attn_implementation, self.model.layers)
            y: T = step.take(lambda addresses: operation(tokens, cos, sin, addresses, attend))
            return y
        finally:
            step.release()

    def _is_plain(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call asks for the last tokens only, of a model that decodes with our attention function."""
        if torch.is_grad_enabled():
            return False
        for name, value in kwargs.items():
            if name not in PLAIN_ARGUMENTS and value is not None and value is not False:
                return False
        config = self.model.config
        if not (config.use_cache if kwargs.get("use_cache") is None else kwargs["use_cache"]):
            return False
        if not kwargs.get("return_dict", True) or not config.return_dict:
            return False
        if config.output_attentions or config.output_hidden_states or getattr(config, "is_causal", None) is False:
            return False
        function = ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation)
        return getattr(function, "func", None) is attention

    def prepared(self, x: Tensor, windows: list[int | None]) -> Prepared | None:
        """All layers as one operation for x (B,1,size) and its like, with a cache whose layers have these windows.

        None, or without an operation, where the model's own forward computes them.
        """
        size = x.shape[-1]
        if not x.is_cpu or not 0 < x.numel() <= MOST_TOKENS * size or torch.is_autocast_enabled("cpu"):
            return None
        form, prepared = (size, x.dtype, ops.forced_backend.get(), windows), self._prepared
        if prepared is None or prepared.form != form or not prepared.watch.is_unchanged():
            if has_hooks(part for part in self.model.modules() if part is not self.model):
                return None
            prepared = self._prepared = self._prepare(form, x, windows)
        return None if prepared.watch.has_hooks() else prepared

    def _first_parts(self) -> Iterator[nn.Module]:
        """What a model calls before its first layer."""
        for name in ("embed_tokens", "rotary_emb"):
            yield from getattr(self.model, name).modules()

    def _prepare(self, form: tuple[object, ...], x: Tensor, windows: list[int | None]) -> Prepared:
        model, before = self.model, self._prepared
        watch = Watch([model.layers, *(part for layer in model.layers for part in layer.modules()), model.norm], model)
        count = model.config.num_hidden_layers
        operation = None
        are_known = all(is_of_libraries(type(one)) for one in [model, *self._first_parts(), *watch.modules])
        if are_known and count == len(model.layers) == len(windows) and not _is_changed(watch.modules):
            operation = layers_operation(model, x)
        if operation is None:
            return Prepared(form, watch)
        is_known = before is not None and before.operation is not None and before.form[-1] == windows
        if before is not None and is_known and before.watch.computes_as(watch):  # only tensors changed
            return Prepared(form, watch, operation, before.attention)
        attention = _compare(model, x.shape[-1], windows, 1)
        return Prepared(form, watch) if attention is None else Prepared(form, watch, operation, attention)


def _window(layer: Any) -> int | None:
    """How many tokens a layer of a cache sees; None: all."""
    window: int | None = layer.window if getattr(layer, "attends", False) else getattr(layer, "sliding_window", None)
    return window


def _is_changed(modules: Sequence[nn.Module]) -> bool:
    """Whether a module of others is in training, or one has a forward of its own that is not ours."""
    return any(
        (one.training and not isinstance(one, nn.ModuleList | NotesChanges))
        or not isinstance(forward, NormForward | LinearForward | None)
        for one in modules
        for forward in [vars(one).get("forward")]
    )


def layers_operation(model: Any, x: Tensor, *, converts: bool = False) -> ops.Layers | None:
    """The layers and the last normalisation of a model for x (B,1,size) and its like.

    converts: copies of small weights, in x's type, may take their places. None if a module has no place in it.
    """
    layers = [layer for module in model.layers if (layer := _layer(module, x, converts)) is not None]
    norm, kinds = _norm(model.norm, x, converts), kinds_of_angles(model)
    if not layers or len(layers) < len(model.layers) or norm is None:
        return None
    if kinds:
        types = model.config.layer_types[: len(layers)]
        layers = [layer._replace(angles=kinds.index(kind)) for layer, kind in zip(layers, types, strict=True)]
    return ops.Layers(layers, norm)


def _layer(layer: nn.Module, x: Tensor, converts: bool) -> ops.Layer | None:
    parts: Any = layer._modules
    if parts.keys() not in PARTS or not all(isinstance(part, nn.Module) for part in parts.values()):
        return None
    attention, mlp = parts["self_attn"], parts["mlp"]
    linear = [attention._modules.get(name) for name in PROJECTIONS] + [mlp._modules.get(name) for name in PRODUCTS]
    matrices = [matrix for one in linear if (matrix := matrix_of(one, x, converts)) is not None]
    names = AROUND if AROUND[-1] in parts else BEFORE
    before, after, *of_sums = [_norm(parts[name], x, converts) for name in names]
    head_norms = [attention._modules[name] for name in ("q_norm", "k_norm") if name in attention._modules]
    of_heads = [_norm(norm, x, converts) for norm in head_norms]
    activation = _activation(mlp)
    if len(matrices) < len(linear) or None in (before, after, *of_sums, *of_heads, activation) or len(of_heads) == 1:
        return None
    D, sums = getattr(attention, "head_dim", 0), tuple(of_sums) or None
    everything: Any = *matrices, before, after, D, tuple(of_heads) or None, sums, activation
    return ops.Layer(*everything)


def _activation(mlp: Any) -> str | None:
    """What is between the products of a feed-forward part, as ops.Layer names it; None if it is something else."""
    function, x = getattr(mlp, "act_fn", None), torch.linspace(-4, 4, 64, dtype=torch.float32, device="cpu")
    if function is None:
        return "silu"
    formulas = {"silu": nn.functional.silu(x), "gelu_tanh": nn.functional.gelu(x, approximate="tanh")}
    with torch.no_grad():
        y = function(x)
    return next((name for name, expected in formulas.items() if is_close(y, expected)), None)


def matrix_of(layer: Any, x: Tensor, converts: bool) -> ops.Matrix | None:
    """The matrix of a linear layer with a product of ours for tokens of x's type; None where PyTorch computes."""
    attributes = {} if layer is None else vars(layer)
    product, forward = attributes.get("_product"), attributes.get("forward")
    if isinstance(forward, LinearForward):
        matrix = forward.matrix(x)
    elif isinstance(product, ops.Product) and "bias" in layer._parameters:
        size = x.new_empty(*x.shape[:-1], layer.in_features)
        matrix = product.matrix(size, layer._parameters["weight"], layer._parameters["bias"])
    else:
        return None
    return matrix if converts or matrix is None or matrix.bias is layer._parameters["bias"] else None


def _norm(norm: Any, x: Tensor, converts: bool) -> ops.Norm | None:
    eps, adds_one = eps_of(norm), adds_one_of(norm)
    if eps is None or adds_one is None or (norm.weight.dtype != x.dtype and not converts):
        return None
    return ops.Norm(norm.weight.to(x.dtype), eps, adds_one)


class _Given(AttentionLayer):  # type: ignore[no-untyped-call]
    """A layer of a cache without tokens: it keeps what attention is asked, and answers with random numbers.

    draw: where these come from; None: it raises _Asked instead.
    """

    cached_tokens, nbytes, allocated = None, 0, 0

    def __init__(self, draw: torch.Generator | None, seen: int, window: int | None) -> None:
        super().__init__()
        self.draw, self.seen, self.window = draw, seen, window
        self.asked: tuple[Tensor, Tensor, Tensor] | None = None
        self.attention = LayerAttention({"scale": 0.0}, 1)
        self.answer = torch.empty(0, dtype=torch.float32, device="cpu")

    def attend_block(
        self, q: Tensor, k: Tensor, v: Tensor, *, pad: list[int] | None, **softmax: Unpack[SoftmaxOptions]
    ) -> Tensor:
        """Keep what is asked: heads (B,heads,n,D). Returns random numbers of q's shape."""
        self.asked, self.attention = (q.flatten(1, 2), k, v), LayerAttention(softmax, q.shape[2])
        if self.draw is None:
            raise _Asked
        self.answer = torch.randn(q.shape, generator=self.draw, dtype=q.dtype, device="cpu")
        return self.answer


class _Asked(Exception):
    """The first layer of a model asked for attention."""


def _compare(model: Any, size: int, windows: Sequence[int | None], n: int) -> list[LayerAttention] | None:
    """How every layer attends, if a model's own forward computes what our operation does; else None.

    Both compute in float32, on n random tokens in each of two rows, and with random answers of attention.
    """
    before = mixes_types.set(True)
    try:
        return _compare_in_float32(model, size, windows, n)
    finally:
        mixes_types.reset(before)


def _compare_in_float32(model: Any, size: int, windows: Sequence[int | None], n: int) -> list[LayerAttention] | None:
    draw, B = torch.Generator().manual_seed(0), 2
    x = 0.01 * torch.randn(B, n, size, generator=draw, dtype=torch.float32, device="cpu")  # so small that eps counts
    rows = x.reshape(B * n, 1, size)
    operation = layers_operation(model, rows, converts=True)
    if operation is None:
        return None
    seen = min([37, *(window - n for window in windows if window is not None)])
    given, same = [_Given(draw, seen, window) for window in windows], list[bool]()
    is_quantised = any(isinstance(one, MatrixModule) and one.kind != matrices.FLOATS for one in model.modules())
    close = partial(is_close, tolerance=QUANTISED if is_quantised else ROUNDED)

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Answer as the given layer did, and note whether its question was the same."""
        asked = given[i].asked
        same.append(asked is not None and all(map(close, (q, k, v), map(rows_of, asked))))
        return rows_of(given[i].answer.flatten(1, 2)).transpose(1, 2)

    def rows_of(heads: Tensor) -> Tensor:
        """Heads (B,heads,n,D) as those of rows of one token: (B*n,heads,1,D)."""
        return heads.transpose(1, 2).flatten(0, 1)[:, :, None]

    try:
        out = _own_forward(model, given, inputs_embeds=x)
        cos, sin = angles(model, rows, torch.arange(seen, seen + n, device="cpu").repeat(B)[:, None])
        if type(out) is not BaseModelOutputWithPast or not operation.fits(len(rows), cos, sin):
            return None
        y, expected = operation(rows, cos, sin, [None] * len(given), attend), cast(Tensor, out.last_hidden_state)
        is_same = all(same) and close(y.view_as(expected), expected)
        is_same = is_same and (n > 1 or _only_embeds(model, seen, windows))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return None  # one does not compute in float32, asks something else, or has layers without angles
    found = [layer.attention for layer in given]
    return found if is_same and all("sinks" not in one.softmax for one in found) else None


def _only_embeds(model: Any, seen: int, windows: Sequence[int | None]) -> bool:
    """Whether a model's own forward does with ids of tokens nothing but embed them, before its first layer attends."""
    ids, found = torch.tensor([[0], [1]], device="cpu"), list[Tensor]()
    for tokens in ({"input_ids": ids}, {"inputs_embeds": model.embed_tokens(ids)}):
        first, *others = [_Given(torch.Generator().manual_seed(0), seen, window) for window in windows]
        for layer in others:
            layer.draw = None
        with contextlib.suppress(_Asked):
            found.append(_own_forward(model, [first, *others], **tokens).last_hidden_state)
        found += [q for layer in others[:1] if layer.asked is not None for q in layer.asked]
    return len(found) % 2 == 0 and all(map(torch.equal, found[: len(found) // 2], found[len(found) // 2 :]))


def _own_forward(model: Any, layers: Sequence[_Given], **tokens: Tensor) -> Any:
    return type(model).forward(model, **tokens, past_key_values=LibraryCache(layers=list(layers)), use_cache=True)


def step_forward(model: nn.Module) -> StepForward | None:
    """The forward of ours that a model has; None if it has its own."""
    forward = model.__dict__.get("forward")
    return forward if isinstance(forward, StepForward) else None


def replace_modules(model: nn.Module) -> list[nn.Module]:
    """Give the parts of a model that have none of their own a forward of ours, and return these parts.

    Linear layers multiply a token by our kernels, normalisations are one operation each, and decode steps of all layers
    are one.
    """
    parts = [part for part in model.modules() if "forward" not in vars(part)]  # one walk, which takes most of the time
    return [*replace_linear(parts), *replace_norms(parts), *_replace_decoders(parts)]


def _replace_decoders(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Let every model of decoder layers among these parts take decode steps as one operation where it can."""
    found = []
    for part in parts:
        if not set(MODEL_PARTS) <= part._modules.keys():
            continue
        layers: Any = part._modules["layers"]
        if isinstance(layers, nn.ModuleList) and all(layer._modules.keys() in PARTS for layer in layers):
            part.forward = StepForward(part)
            found.append(part)
    return found


def restore_modules(parts: Iterable[nn.Module]) -> None:
    """Take our forward from those of these parts that still have it."""
    for part in parts:
        if isinstance(vars(part).get("forward"), StepForward | NormForward | LinearForward):
            del part.forward
