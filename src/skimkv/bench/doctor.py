"""Whether this processor, this PyTorch and a model will decode fast here, and what to change: `skimkv doctor`.

Each check is a function that returns one Finding. Nothing is compiled, and no weights are read.
"""

from __future__ import annotations

import copy
import importlib.metadata
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from .. import ops
from ..hf.attach import attach
from ..hf.decode_step import step_forward
from ..hf.gguf import GGUFFile
from ..hf.gguf_model import becomes_int8
from ..hf.gguf_names import EXPERTS
from ..hf.load import check_formats, check_source
from ..hf.structure import empty_model
from ..hf.supported import decoder_of, describe_layers, max_positions, model_layers
from ..hf.tiny_sizes import SIZES
from ..methods import Dense
from ..methods.base import Method
from ..ops.cpu import library
from ..stores.base import Shape
from .machine import Cpu
from .shapes import WEIGHT_BYTES, contents_of_gguf, elements_read, heads_of_layers, lookup_tables, share_of_experts

GOOD, SLOW, BAD = "good", "slow", "bad"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FLAGS = "avx2", "f16c", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "asimddp", "bf16"
SLOW_MEMORY = 10e9  # bytes per second: less than one channel of DDR4


class Finding(NamedTuple):
    """One line of the report. status: GOOD, SLOW or BAD; advice: what to change, or empty."""

    check: str
    status: str
    found: str
    advice: str = ""


class Subject(NamedTuple):
    """A model without its weights. weights: their format.

    weight_bytes: what a token reads of them, of a mixture of experts those that are chosen. held_bytes: what all of
    them take in memory.
    """

    name: str
    model: PreTrainedModel
    weights: str
    weight_bytes: int
    held_bytes: int


def machine_findings(bandwidth: float) -> Iterator[Finding]:
    """What holds for every model. bandwidth: bytes per second that were measured."""
    yield processor()
    yield kernels()
    yield threads()
    yield other_work()
    yield pytorch()
    yield memory(bandwidth)


def processor(path: Path = Path("/proc/cpuinfo")) -> Finding:
    """The processor, and the instruction sets that matter here as Linux names them."""
    words = path.read_text() if path.exists() else ""
    named = set(words.split())
    found = [flag for flag in FLAGS if flag in named]
    name = Cpu().name.rpartition(",")[0]
    if not words or "avx512f" in named or "asimd" in named:
        return Finding("processor", GOOD, f"{name}: {', '.join(found) or 'instruction sets not told'}")
    if "avx2" in named and "fma" in named:
        return Finding("processor", GOOD, f"{name}: {', '.join(found)}, no AVX-512")
    return Finding("processor", SLOW, f"{name} has no AVX2", "use a processor with AVX2 and FMA, of 2015 or later")


def kernels() -> Finding:
    """The backend of the CPU, and the instruction set that our library uses."""
    try:
        name, why = ops.select_backend("cpu")
    except ValueError as error:
        return Finding("kernels", BAD, str(error), "unset SKIMKV_ISA and SKIMKV_BACKEND")
    if name != "cpu":
        forced = "SKIMKV_BACKEND" in os.environ
        advice = "unset SKIMKV_BACKEND" if forced else "install a wheel, or build with a C++ compiler at hand"
        return Finding("kernels", BAD, f"backend {name}, the slow reference ({why})", advice)
    used, best = library.isa(), library.isas()[0]
    if os.environ.get("SKIMKV_ISA") and used != best:  # else the library has chosen it
        return Finding("kernels", SLOW, f"C++ library with {used}; {best} is there", "unset SKIMKV_ISA")
    status, advice = (SLOW, "kernels without vectors are many times as slow") if used == "scalar" else (GOOD, "")
    return Finding("kernels", status, f"C++ library with {used}", advice)


def usable_processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads() -> Finding:
    """PyTorch's threads, which ours are too, beside the processors that this process may use."""
    count, room = torch.get_num_threads(), usable_processors()
    found = f"{count} of {room} processors" if room > 1 else f"{count} on one processor"
    if count > room:
        return Finding("threads", SLOW, f"{found}: they wait for one another", f"set OMP_NUM_THREADS={room}")
    if 2 * count < room:
        return Finding("threads", SLOW, found, f"set OMP_NUM_THREADS to up to {room}")
    if count > 1 and library.thread_pool() is None:
        return Finding("threads", SLOW, f"{found}, but our kernels use one", "use PyTorch's own build for Linux")
    return Finding("threads", GOOD, found)


def other_work() -> Finding:
    """What else works on this machine, by the system's load of the last minute."""
    load, room = os.getloadavg()[0], usable_processors()
    if load > 0.5 * room:
        advice = "other programs take time from this one: end them, or use fewer threads"
        return Finding("other work", SLOW, f"load {load:.1f} on {room} processors", advice)
    return Finding("other work", GOOD, f"load {load:.1f} on {room} processors")


def pytorch() -> Finding:
    """PyTorch's version, and whether its library for prompts multiplies in bfloat16 and in AMX's tiles."""
    has_library = torch.backends.mkldnn.is_available()
    in_bfloat16 = has_library and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    tiles = bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
    words = f"{torch.__version__}, transformers {importlib.metadata.version('transformers')}"
    words += f"; oneDNN {'with' if in_bfloat16 else 'without'} bfloat16{', AMX' if tiles else ''}"
    if torch.cuda.is_available():
        words += f"; {torch.cuda.get_device_name(0)} is there: --device cuda"
    if in_bfloat16 or not has_library:
        return Finding("PyTorch", GOOD, words)
    return Finding("PyTorch", SLOW, words, "prompts are faster in float32 here: --dtype float32")


def memory(bandwidth: float, huge_pages: Path = HUGE_PAGES) -> Finding:
    """Free memory, how fast it is read, and whether caches get huge pages, whose addresses are looked up faster."""
    free = Cpu().free_bytes()
    pages = huge_pages.read_text().partition("[")[2].partition("]")[0] if huge_pages.exists() else "not told"
    found = f"{_gb(free)} free" if free < 1 << 62 else "free memory not told"
    found += f", read at {bandwidth / 1e9:.0f} GB/s; huge pages: {pages}"
    if bandwidth < SLOW_MEMORY:
        return Finding("memory", SLOW, found, "use more threads, or end what else reads memory")
    if pages == "never":
        return Finding("memory", SLOW, found, f"as root: echo madvise > {huge_pages}")
    return Finding("memory", GOOD, found)


def subject(name: str, weights: str | None) -> Subject:
    """The model of that name, as `skimkv.load` names it. Raises ValueError, in one line, if it cannot be read."""
    check_formats(name, None, weights)
    source, model = check_source(name), empty_model(name)
    if not any(layer.attends for layer in model_layers(model)):
        raise ValueError(f"{type(model).__name__} is not supported: it has no layer of attention")
    if source.kind == "gguf":
        contents, _ = contents_of_gguf(source.location)
        of_step, of_all = grown_bytes(Path(source.location), share_of_experts(model))
        return Subject(name, model, contents.weights, contents.nbytes + int(of_step), contents.held_bytes + int(of_all))
    own = str(model.config.dtype or torch.float32).removeprefix("torch.")
    format = weights or own
    held, tables = (sum(t.numel() for t in tensors) for tensors in (model.parameters(), lookup_tables(model)))
    try:
        read = elements_read(model)
    except AttributeError:  # its configuration does not say how many experts a token reads
        read = held
    held_bytes = (held - tables) * WEIGHT_BYTES[format] + tables * getattr(torch, own).itemsize  # as they are
    return Subject(name, model, format, int(read * WEIGHT_BYTES[format]), int(held_bytes))


def grown_bytes(path: Path, share: float) -> tuple[float, float]:
    """Return how many bytes a GGUF file's weights grow by when they are loaded: those that a step reads, and all.

    Matrices of types that no kernel reads become 8-bit weights. share: that of its experts that a token chooses.
    """
    of_step = of_all = 0.0
    with GGUFFile(path) as file:
        entries = file.tensors
    tables = {"position_embd.weight"} | ({"token_embd.weight"} if "output.weight" in entries else set())
    for name, entry in entries.items():
        if becomes_int8(entry):
            growth = math.prod(entry.shape) * WEIGHT_BYTES["int8"] - entry.nbytes
            of_all += growth
            if name not in tables:
                of_step += growth * (share if EXPERTS.fullmatch(name) else 1)
    return of_step, of_all


def model_findings(model: Subject, method: Method, length: int, bandwidth: float) -> Iterator[Finding]:
    """What holds for one model, decoded by a method after `length` tokens."""
    yield layers(model)
    yield whole_step(model)
    yield fits(model, method, length)
    yield speed(model, method, length, bandwidth)


def layers(model: Subject) -> Finding:
    """The format of the weights, and how many layers the method decodes."""
    found = f"{type(model.model).__name__}, weights {model.weights}: {describe_layers(model_layers(model.model))}"
    if model.weights == "float32":
        return Finding("model", SLOW, found, "--weights bfloat16 reads half of the bytes, int8 a quarter")
    return Finding("model", GOOD, found)


def whole_step(model: Subject) -> Finding:
    """Whether a decode step of all layers is one operation, found with random numbers in a small copy of the model."""
    copied = small_copy(model.model)
    if copied is not None and takes_whole_steps(copied):
        return Finding("decode step", GOOD, "one operation of the library for all layers")
    return Finding("decode step", SLOW, "layer by layer in Python", "its layers differ from Llama's; nothing to change")


def small_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """The same model with two small layers and random weights; None where its sizes depend on one another."""
    config: Any = copy.deepcopy(model.config.get_text_config(decoder=True))
    auto_model: Any = AutoModelForCausalLM
    try:
        for name, size in SIZES.items():
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, size)
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None):
                setattr(config, name, getattr(config, name)[:2])
        config.num_hidden_layers, config.pad_token_id, config.dtype = 2, None, torch.float32
        small: PreTrainedModel = auto_model.from_config(config).eval().requires_grad_(False)
        return small
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None


def takes_whole_steps(model: PreTrainedModel) -> bool:
    """Whether a model's decode steps are one operation, which its own forward is compared with here."""
    decoder: Any = decoder_of(model)
    windows = [layer.window for layer in model_layers(model)]
    with torch.inference_mode(), attach(model, Dense()):
        forward = step_forward(decoder)
        prepared = None if forward is None else forward.prepared(decoder.embed_tokens(torch.tensor([[1]])), windows)
    return prepared is not None and prepared.operation is not None


def cache_bytes(model: PreTrainedModel, method: Method, length: int) -> tuple[int, int]:
    """The bytes of a cache of one sequence of `length` tokens, and what a decode step reads of it.

    Layers that the method does not decode count as dense attention over their window, of which the current token is
    one; states count as nothing. Of a method whose bytes depend on the data, the most that are expected count.
    Raises ValueError if the method does not fit the model's heads.
    """
    held, read, dtype = 0, 0, torch.bfloat16
    for layer, heads in zip(model_layers(model), heads_of_layers(model), strict=True):
        if layer.attends:
            shape = Shape(1, *heads)
            one, window = (method, length + 1) if layer.supported else (Dense(), layer.window or length + 1)
            one.store(shape, dtype)
            held += one.bound(min(length, window), shape, dtype)
            read += one.traffic(min(length, window - 1), shape, dtype).bytes
    return held, read


def fits(model: Subject, method: Method, length: int) -> Finding:
    """Whether weights and cache fit into the free memory."""
    held, _ = cache_bytes(model.model, method, length)
    free = Cpu().free_bytes()
    found = f"weights {_gb(model.held_bytes)} and a cache of {length:,} tokens {_gb(held)}"
    if model.held_bytes + held <= free:
        return Finding("fits", GOOD, found)
    smaller = smaller_formats(model)
    fitting = [name for name, nbytes in smaller.items() if nbytes + held <= free]
    advice = [f"--weights {' or '.join(fitting)}"] if fitting else []
    if model.held_bytes < free:
        advice.append("a shorter text")
    if not advice:
        with_less = next((name for name, nbytes in smaller.items() if nbytes < free), None)
        advice.append("a smaller model" if with_less is None else f"--weights {with_less} and a shorter text")
    return Finding("fits", BAD, f"{found}: more than {_gb(free)} free", ", or ".join(advice))


def smaller_formats(model: Subject) -> dict[str, int]:
    """The formats that --weights can give the model in fewer bytes, with what it takes then; none for a GGUF file."""
    if model.weights not in WEIGHT_BYTES:
        return {}
    share = {name: WEIGHT_BYTES[name] / WEIGHT_BYTES[model.weights] for name in ("int8", "int4")}
    return {name: int(model.held_bytes * part) for name, part in share.items() if part < 1}


def speed(model: Subject, method: Method, length: int, bandwidth: float) -> Finding:
    """The most tokens per second that this memory allows, with the method and with dense attention."""
    rates = []
    for one in (method, Dense()):
        read = model.weight_bytes + cache_bytes(model.model, one, length)[1]
        rates.append(bandwidth / read)
    found = (
        f"at {length:,} tokens at most {rates[0]:,.3g} tokens per second with {method}, {rates[1]:,.3g} with Dense()"
    )
    positions = max_positions(model.model)
    if positions is not None and length > positions:
        return Finding("speed", SLOW, found, f"the model was made for {positions:,} positions: a shorter --length")
    if rates[0] < 1.1 * rates[1]:
        smaller = next((f" or --weights {name}" for name in smaller_formats(model)), "")
        return Finding("speed", SLOW, found, f"weights are most of the bytes: longer texts{smaller} gain more")
    return Finding("speed", GOOD, found)


def _gb(number: int) -> str:
    return f"{number / 1e9:.3g} GB"
