"""skimkv doctor: what it finds on machines and models that are made up, and on this one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
import torch

from skimkv import Dense, SparQ
from skimkv.bench import doctor, models
from skimkv.bench.doctor import BAD, GOOD, SLOW, Subject
from skimkv.bench.machine import Cpu
from skimkv.hf.gguf_model import load_gguf_model
from skimkv.ops.cpu import library
from support import gguf_architectures, gguf_files
from support.command_line import answer, run
from support.kernels import NATIVE
from support.random_models import random_model, tiny_configuration

NAMES = ["processor", "kernels", "threads", "other work", "PyTorch", "memory"]
OF_MODEL = ["model", "decode step", "fits", "speed"]


def meta_model(family: str):
    with torch.device("meta"):
        return random_model(tiny_configuration(family))


@pytest.mark.parametrize(("flags", "status", "words"), [
    ("fma f16c avx2 avx512f avx512_vnni amx_tile", GOOD, "avx512f, avx512_vnni, amx_tile"),
    ("fma f16c avx2", GOOD, "no AVX-512"),
    ("sse4_2", SLOW, "no AVX2"),
    ("asimd asimddp", GOOD, "asimd, asimddp"),
])  # fmt: skip
def test_processors(tmp_path: Path, flags: str, status: str, words: str) -> None:
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"flags\t\t: fpu {flags}\n")
    found = doctor.processor(facts)
    assert found.status == status and words in found.found and bool(found.advice) == (status == SLOW)


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    assert "not told" in doctor.processor(tmp_path / "none").found
    assert doctor.memory(50e9, tmp_path / "none").status == GOOD


@pytest.mark.parametrize(("count", "room", "advice"), [
    (4, 2, "OMP_NUM_THREADS=2"), (1, 4, "OMP_NUM_THREADS to up to 4"), (1, 1, ""), (1, 2, ""),
])  # fmt: skip
def test_threads(monkeypatch: pytest.MonkeyPatch, count: int, room: int, advice: str) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    monkeypatch.setattr(doctor, "usable_processors", lambda: room)
    found = doctor.threads()
    assert advice in found.advice and (found.status == GOOD) == (not advice)


def test_threads_that_kernels_cannot_borrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(doctor, "usable_processors", lambda: 2)
    monkeypatch.setattr(library, "thread_pool", lambda: None)
    assert "our kernels use one" in doctor.threads().found


def test_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_processors", lambda: 4)
    monkeypatch.setattr("os.getloadavg", lambda: (3.0, 0.0, 0.0))
    assert doctor.other_work().status == SLOW
    monkeypatch.setattr("os.getloadavg", lambda: (1.0, 9.0, 9.0))
    assert doctor.other_work().status == GOOD


def test_memory(tmp_path: Path) -> None:
    pages = tmp_path / "enabled"
    pages.write_text("always madvise [never]\n")
    assert "madvise" in doctor.memory(50e9, pages).advice
    pages.write_text("always [madvise] never\n")
    assert doctor.memory(50e9, pages).status == GOOD
    assert "50 GB/s; huge pages: madvise" in doctor.memory(50e9, pages).found
    assert doctor.memory(2e9, pages).status == SLOW


def test_kernels_that_are_missing_or_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skimkv.ops.select_backend", lambda device: ("ref", "no library"))
    assert doctor.kernels().status == BAD and "C++ compiler" in doctor.kernels().advice
    monkeypatch.setattr("skimkv.ops.select_backend", lambda device: ("cpu", "native"))
    monkeypatch.setattr(doctor, "library", SimpleNamespace(isa=lambda: "avx2", isas=lambda: ["vnni", "avx2", "scalar"]))
    monkeypatch.delenv("SKIMKV_ISA", raising=False)
    assert doctor.kernels().status == GOOD  # the library has chosen it
    monkeypatch.setenv("SKIMKV_ISA", "avx2")
    assert doctor.kernels().advice == "unset SKIMKV_ISA"
    monkeypatch.setattr(doctor, "library", SimpleNamespace(isa=lambda: "scalar", isas=lambda: ["scalar"]))
    assert doctor.kernels().status == SLOW
    monkeypatch.setattr(doctor, "library", SimpleNamespace(isa=lambda: "vnni", isas=lambda: ["vnni", "scalar"]))
    assert doctor.kernels() == ("kernels", GOOD, "C++ library with vnni", "")


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
@pytest.mark.parametrize(("family", "whole"), [("llama", True), ("gemma3_text", True), ("gpt_neox", False)])
def test_whole_steps(family: str, whole: bool) -> None:
    """Llama's and Gemma 3's layers are one operation of the library; those of GPT-NeoX are not."""
    found = doctor.whole_step(Subject(family, meta_model(family), "bfloat16", 1, 1))
    assert found.status == (GOOD if whole else SLOW)


def test_a_model_that_cannot_be_small() -> None:
    assert doctor.small_copy(meta_model("jamba")) is None
    assert doctor.whole_step(Subject("", meta_model("jamba"), "bfloat16", 1, 1)).status == SLOW


def test_bytes_of_a_cache() -> None:
    """A Llama of 2 layers with 2 KV heads of 16 numbers: 2 x 2 x 2 x 16 numbers of 2 bytes a token."""
    model = meta_model("llama")
    held, read = doctor.cache_bytes(model, Dense(), 1024)
    assert held == 1024 * 256 and 1024 * 256 <= read <= 1026 * 256
    assert doctor.cache_bytes(model, SparQ(r=4, k=16), 1024)[1] < read / 3
    held, read = doctor.cache_bytes(meta_model("gemma3_text"), Dense(), 1024)
    assert held == 2 * 2 * 16 * 2 * (1024 + 5 * 8)  # one full layer, and five that see 8 tokens
    assert read == 2 * 2 * 16 * 2 * (1025 + 5 * 8)  # of which the current one is written
    assert doctor.cache_bytes(meta_model("gemma3_text"), Dense(), 7)[1] == 2 * 2 * 16 * 2 * 6 * 8
    with pytest.raises(ValueError, match="r = 17 must be at most 16"):
        doctor.cache_bytes(model, SparQ(r=17, k=16), 1024)


def test_what_fits_and_how_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Subject("", meta_model("llama"), "bfloat16", 10**6, 10**6)
    monkeypatch.setattr("skimkv.bench.machine.Cpu.free_bytes", lambda self: 2 * 10**6)
    assert doctor.fits(model, Dense(), 1024).status == GOOD
    assert doctor.fits(model, Dense(), 4096).status == BAD
    found = doctor.speed(model, Dense(), 8, 1e9)
    assert found.status == SLOW and "weights are most of the bytes" in found.advice
    found = doctor.speed(model, SparQ(r=4, k=16), 65536, 1e9)
    assert found.status == SLOW and found.advice.startswith("the model was made for ")
    monkeypatch.setattr(model.model.config, "max_position_embeddings", 65536)
    assert doctor.speed(model, SparQ(r=4, k=16), 65536, 1e9).status == GOOD


@pytest.mark.parametrize("kind", ["folder", "GGUF file"])
def test_a_token_reads_only_the_experts_that_it_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Two of four experts are read; all of them take memory."""
    path = tmp_path / "m.gguf"
    whole: Any = gguf_architectures.write(path, "qwen3moe")
    whole.save_pretrained(tmp_path)
    model = doctor.subject(str(path if kind == "GGUF file" else tmp_path), None)
    if kind == "folder":
        sizes = {name: tensor.nbytes for name, tensor in whole.named_parameters()}
        experts = sum(nbytes for name, nbytes in sizes.items() if ".experts." in name)
        table = "model.embed_tokens.weight"
    else:
        sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors}
        experts = sum(nbytes for name, nbytes in sizes.items() if "_exps" in name)
        table = "token_embd.weight"
    held = sum(sizes.values())
    assert experts > 0 and model.held_bytes == held
    assert model.weight_bytes == pytest.approx(held - sizes[table] - experts / 2, rel=0.001)
    monkeypatch.setattr("skimkv.bench.machine.Cpu.free_bytes", lambda self: held - 1)
    assert doctor.fits(model, Dense(), 1).status == BAD
    cache = doctor.cache_bytes(model.model, Dense(), 8)[1]
    assert f"at most {1e9 / (model.weight_bytes + cache):,.3g} tokens" in doctor.speed(model, Dense(), 8, 1e9).found


@pytest.mark.parametrize(("family", "share"), [("dbrx", 1 / 4), ("aria_text", 2 / 4), ("llama4_text", 2 / 4)])
def test_experts_by_the_names_of_other_families(tmp_path: Path, family: str, share: float) -> None:
    whole: Any = random_model(tiny_configuration(family))
    whole.save_pretrained(tmp_path)
    model = doctor.subject(str(tmp_path), None)
    experts = sum(tensor.nbytes for name, tensor in whole.named_parameters() if ".experts." in name)
    table = whole.get_input_embeddings().weight.nbytes
    assert model.held_bytes == 4 * sum(p.numel() for p in whole.parameters())
    assert model.weight_bytes == model.held_bytes - table - experts * (1 - share)


def test_a_gguf_file_is_counted_as_it_is_loaded(tmp_path: Path) -> None:
    """Of the table of positions a step reads one row; of types without a kernel 8-bit weights are made."""
    gguf_architectures.write(tmp_path / "m.gguf", "gpt2")
    model = doctor.subject(str(tmp_path / "m.gguf"), None)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    tables = {"position_embd.weight"} | ({"token_embd.weight"} if "output.weight" in sizes else set())
    assert model.held_bytes == sum(sizes.values())
    assert model.weight_bytes == model.held_bytes - sum(sizes[name] for name in tables)
    gguf_files.write(tmp_path / "t.gguf", gguf_files.of_family("llama"), dict.fromkeys(LARGE, gguf_files.Kind.TQ2_0))
    model = doctor.subject(str(tmp_path / "t.gguf"), None)
    with pytest.warns(UserWarning, match="held in 8 bits"):
        loaded: Any = load_gguf_model(tmp_path / "t.gguf", torch.float32)
    assert model.held_bytes == pytest.approx(sum(p.nbytes for p in loaded.parameters()), rel=0.01)
    assert model.weight_bytes == pytest.approx(models.weight_bytes(loaded), rel=0.01)


LARGE = [*(f"blk.{i}.ffn_{part}" for i in range(2) for part in ("up", "gate", "down")), "token_embd"]


def test_tables_keep_their_format_where_weights_get_another(tmp_path: Path) -> None:
    random_model(tiny_configuration("gpt2")).save_pretrained(tmp_path)
    model = doctor.subject(str(tmp_path), "int8")
    tables = 64 * (97 + 160)
    every = sum(parameter.numel() for parameter in model.model.parameters())
    assert model.weight_bytes == int((every - tables) * 34 / 32)
    assert model.held_bytes == int((every - tables) * 34 / 32 + 4 * tables)


def test_a_cache_of_layers_with_different_heads() -> None:
    """Gemma 4's sliding layers have other heads than its full ones."""
    config = tiny_configuration("gemma4_text", global_head_dim=32)
    model = random_model(config)
    with torch.no_grad():
        layers = model(input_ids=torch.arange(8)[None], use_cache=True).past_key_values.layers
    assert len({layer.keys.shape[1:] for layer in layers}) > 1
    tokens = [min(layer.keys.shape[2] + layer.is_sliding, 8) for layer in layers]  # the library's keep no more than 7
    true = sum(4 * layer.keys.numel() // layer.keys.shape[2] * n for layer, n in zip(layers, tokens, strict=True))
    assert doctor.cache_bytes(model, Dense(), 8)[0] == true


def test_experts_of_an_unknown_number_are_all_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skimkv.bench.shapes.CHOSEN", ("no_such_name",))
    random_model(tiny_configuration("dbrx")).save_pretrained(tmp_path)
    model = doctor.subject(str(tmp_path), None)
    assert model.weight_bytes == model.held_bytes == 4 * sum(p.numel() for p in model.model.parameters())


@pytest.mark.parametrize(
    ("weights", "free", "fits", "speed"),
    [
        ("bfloat16", 2.0, "--weights int8 or int4, or a shorter text", "longer texts or --weights int8 gain"),
        ("bfloat16", 1.4, "--weights int4, or a shorter text", "longer texts or --weights int8 gain"),
        ("bfloat16", 0.7, "--weights int8 and a shorter text", "longer texts or --weights int8 gain"),
        ("int8", 1.5, "a shorter text", "longer texts or --weights int4 gain"),
        ("int8", 1.9, "--weights int4, or a shorter text", "longer texts or --weights int4 gain"),
        ("int4", 1.9, "a shorter text", "longer texts gain"),
        ("Q4_1, Q6_K", 1.9, "a shorter text", "longer texts gain"),
        ("Q4_1, Q6_K", 0.9, "a smaller model", "longer texts gain"),
    ],
)
def test_weights_are_advised_only_where_they_help(
    monkeypatch: pytest.MonkeyPatch, weights: str, free: float, fits: str, speed: str
) -> None:
    """Weights of 1 MB and a cache of 1.05 MB; free is in MB."""
    model = Subject("", meta_model("llama"), weights, 10**6, 10**6)
    monkeypatch.setattr("skimkv.bench.machine.Cpu.free_bytes", lambda self: int(free * 1e6))
    assert doctor.fits(model, Dense(), 4096).advice == fits
    assert f": {speed} more" in doctor.speed(model, Dense(), 8, 1e9).advice


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "best_bandwidth", lambda self: 40e9)
    told = answer(capsys, "doctor", "--model", "builtin", "--weights", "int8", "--length", "4096")
    assert list(told) == ["model", "bytes_per_s", "checks"] and told["bytes_per_s"] == 40e9
    assert [one["check"] for one in told["checks"]] == NAMES + OF_MODEL
    assert list(told["checks"][0]) == ["check", "status", "found", "advice"]
    assert {one["status"] for one in told["checks"]} <= {GOOD, SLOW, BAD}
    status, out, _ = run(capsys, "doctor")
    lines = re.findall(r"^(?:ok|slow|bad) +([\w ]+): ", out, re.MULTILINE)  # a long one may be wrapped
    assert (status, lines) == (0, NAMES) and "40 GB/s" in out


def test_bandwidth_is_measured() -> None:
    assert Cpu().best_bandwidth(times=1) > 1e8
