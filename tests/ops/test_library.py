"""The library from outside Python: its headers, the instructions of each object, a plain C caller, and threads."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import skimkv
from skimkv.ops.cpu import library as native
from skimkv.ops.cpu.structs import STRUCTURES, CChunk, COp, check_structures, fields
from skimkv.stores.base import Shape
from support import steps
from support.kernels import ISAS, NATIVE, compare, filled, on

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "csrc"
INCLUDE = SOURCE / "include"
HEADERS = sorted(SOURCE.rglob("*.h"))
EXAMPLE = ROOT / "examples/decode.c"
SETS = ROOT / "tests/support/sets.cpp"
FOLDERS = ("-I", SOURCE, "-I", INCLUDE)
COMMON = "-std=c++17 -fPIC -fno-math-errno -fno-trapping-math -fno-exceptions -fno-rtti -Wno-psabi".split()
CROSS, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
native_only = pytest.mark.skipif(not NATIVE, reason="the native library is not built")


def run(*command, **kwargs):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(native._path() is None, reason="the native library is not built")
def test_a_library_that_was_built_is_that_of_this_source():
    """Where it is another version's, the reference computes, and the tests of kernels are skipped."""
    assert native.library().skimkv_version() == native.VERSION, "build it again: make .venv/.dev"


def flags(isa: str) -> list[str]:
    """An instruction set's flags as CMakeLists.txt has them."""
    sets = dict(re.findall(r"set\((\w+)_FLAGS (.*?)\)", (ROOT / "CMakeLists.txt").read_text()))
    text = sets.get(isa, "")
    while match := re.search(r"\$\{(\w+)_FLAGS\}", text):
        text = text.replace(match[0], sets[match[1]])
    return text.split()


def isa_of(header: Path) -> str:
    """The instruction set that a header of csrc/isa is for; every other header compiles with the scalar set."""
    if header.parent.name != "isa":
        return "scalar"
    if header.stem.endswith(("_vnni", "_bf16")):
        return "vnni"
    return next((x for x in ("avx2", "avx512", "neon") if header.stem.endswith(x)), "scalar")


@pytest.mark.slow
@pytest.mark.parametrize("header", HEADERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_header_compiles_alone(header):
    """A header includes what it uses. It is compiled with its own instruction set, or as an editor opens it: scalar."""
    isa = isa_of(header)
    compiler = CROSS if isa == "neon" else shutil.which("g++")
    if not compiler:
        pytest.skip(f"no compiler for {isa} is installed")
    if isa in ("avx2", "avx512", "vnni") and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("x86 only")
    strict = ("-Wall", "-Wextra", "-Wno-unused-function", "-Werror", "-fsyntax-only")
    run(compiler, *COMMON, *flags(isa), *FOLDERS, *strict, "-include", header, "-x", "c++", os.devnull)


@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
@pytest.mark.parametrize("standard", ["c99", "c11"])
def test_the_public_header_is_plain_c(standard):
    strict = ("-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    run("gcc", f"-std={standard}", *strict, "-include", INCLUDE / "skimkv.h", "-x", "c", os.devnull)


def compiled(source: str, flags: list[str], folder: Path) -> Path:
    """The object of a source of the library: that of the installation, or a new one where that is older."""
    newest = max(
        path.stat().st_mtime for path in (ROOT / "CMakeLists.txt", *SOURCE.rglob("*.h"), *SOURCE.rglob("*.cpp"))
    )
    for found in ROOT.glob(f"build/py3-*/CMakeFiles/skimkv.dir/csrc/{source}.o"):
        if found.stat().st_mtime > newest:
            return found
    if not shutil.which("g++"):
        pytest.skip("g++ is not installed")
    run("g++", "-O1", *COMMON, *flags, *FOLDERS, "-c", SOURCE / source, "-o", folder / "a.o")
    return folder / "a.o"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "never", "some"),
    [
        ("scalar", r"%[yz]mm|%k[0-7]\b|^v|^\{", r"%xmm"),
        ("avx2", r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])|\{%?[xy]?mm?\d|^vpdp", r"%ymm"),
        ("avx512", r"^vpdp|^vdpbf16|%tmm", r"%zmm"),
        ("vnni", r"^vdpbf16|%tmm", r"^vpdpbusd"),  # but in functions that only avx512bf16 calls
    ],
)
def test_no_instruction_outside_the_set(isa, never, some, tmp_path):
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("x86 only")
    if not shutil.which("objdump"):
        pytest.skip("objdump is not installed")
    listing = run("objdump", "-d", "--no-show-raw-insn", compiled(f"isa/{isa}.cpp", flags(isa), tmp_path))
    needs_more = re.compile(
        r".*((dot_row|dot_block|dot_block_of_four|multiply_rows|multiply_prompt_tile|weigh_keys)_bf16|RoundedPairs)"
    )
    functions = [text for text in re.split(r"\n(?=[0-9a-f]+ <)", listing) if not needs_more.match(text)]
    lines = "\n".join(functions).splitlines()
    found = [line.split("\t", 1)[1] for line in lines if line.startswith(" ") and "\t" in line]
    assert (isa == "vnni") == ("vdpbf16ps" in listing)
    assert len(found) > 1000 and any(re.search(some, line) for line in found)
    assert [line for line in found if re.search(never, line)][:5] == []


@native_only
@pytest.mark.skipif(not shutil.which("gcc"), reason="gcc is not installed")
@pytest.mark.parametrize("isa", ISAS)
def test_a_c_program_calls_the_library(isa, tmp_path, monkeypatch):
    path, program = native._path(), tmp_path / "decode"
    strict = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-iquote", INCLUDE)
    run("gcc", *strict, EXAMPLE, path, "-lm", f"-Wl,-rpath,{Path(path).parent}", "-o", program)
    monkeypatch.setenv("SKIMKV_ISA", isa)
    out = run(program)
    assert len(re.findall(rf"^{isa} .*error", out, re.M)) == 6 and "refused: k must" in out


@pytest.mark.slow
@native_only
@pytest.mark.skipif(not shutil.which("g++"), reason="g++ is not installed")
def test_every_set_is_the_scalar_one_from_c(tmp_path):
    path, program = native._path(), tmp_path / "sets"
    strict = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-iquote", INCLUDE)
    run("g++", *strict, SETS, path, f"-Wl,-rpath,{Path(path).parent}", "-o", program)
    lines = run(program).splitlines()
    assert lines == [f"{isa}: 324 of 324 cases as scalar" for isa in ISAS if isa != "scalar"]


@pytest.mark.slow
@pytest.mark.skipif(not (CROSS and QEMU), reason="no cross compiler and emulator for aarch64")
@pytest.mark.timeout(600)
def test_neon_under_an_emulator(tmp_path, monkeypatch):
    for source in (*SOURCE.glob("*.cpp"), SOURCE / "isa/neon.cpp", SOURCE / "isa/scalar.cpp"):
        run(CROSS, "-O1", *COMMON, *FOLDERS, "-c", source, "-o", tmp_path / f"{source.stem}.o")
    run(CROSS.replace("g++", "gcc"), "-std=c11", "-iquote", INCLUDE, "-c", EXAMPLE, "-o", tmp_path / "decode.o")
    run(CROSS, "-static", *tmp_path.glob("*.o"), "-lm", "-o", tmp_path / "decode")
    for isa in ("neon", "scalar"):
        monkeypatch.setenv("SKIMKV_ISA", isa)
        assert len(re.findall(rf"^{isa} .*error", run(QEMU, tmp_path / "decode"), re.M)) == 6
    monkeypatch.delenv("SKIMKV_ISA")
    (tmp_path / "decode.o").unlink()
    run(CROSS, "-O1", "-std=c++17", "-iquote", INCLUDE, "-c", SETS, "-o", tmp_path / "sets.o")
    run(CROSS, "-static", *tmp_path.glob("*.o"), "-o", tmp_path / "sets")
    assert "neon: 324 of 324 cases as scalar" in run(QEMU, tmp_path / "sets")


LONG_ROWS = (
    "Dense()", "Dense(kv='int8')", "LMInfinite(k=1500)", "TopK(k=40)", "SparQ(r=8, k=40)",
    "SparQ(r=8, k=40, channels='int8')", "Skim(k=40, r=8)", "Quest(k=64, page=16)", "H2O(k=1500)", "TOVA(k=1500)",
)  # fmt: skip


@native_only
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("spec", LONG_ROWS)
def test_a_row_has_the_same_bits_on_any_threads_and_beside_any_rows(isa, spec):
    """Although threads share a row that is long, as much of it as the batch's rows leave to each."""
    torch.manual_seed(0)
    method, n = skimkv.parse(spec), 2600
    store = method.store(Shape(3, 1, 2, 64), torch.float32)
    with torch.inference_mode():
        k, v = torch.randn(2, 3, 1, n, 64)
        method.prefill(store, torch.randn(3, 1, 2, n, 64), k, v, scale=0.125, pad=[0, 1900, 900])
        q, k, v = torch.randn(3, 1, 2, 64), *torch.randn(2, 3, 1, 64)
        found = {}
        for rows in ([0, 1, 2], [0], [1], [2], [2, 0]):
            for threads in (1, 2, 3):
                twin, index = store.fork(), torch.tensor(rows)
                twin.select(index)
                with on(isa, threads):
                    y = method.decode(twin, q[index], k[index], v[index], scale=0.125)
                for b, row in zip(rows, y, strict=True):
                    assert torch.equal(found.setdefault(b, row), row), (rows, threads, b)


@native_only
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["dense", "sparq"])
def test_shares_run_in_order_from_one_thread(isa, name, monkeypatch):
    q, store = filled(64, [3000, 33], torch.float32, 3, "copy", 8, 32, 8)
    args = (8, 32, 8, "coverage", True) if name == "sparq" else ()
    lib = native.library()
    lib.skimkv_work.restype, lib.skimkv_share.restype = ctypes.c_size_t, None
    lib.skimkv_work.argtypes = [ctypes.c_void_p, ctypes.c_int]
    lib.skimkv_share.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int]

    def shares(address, q, y, k, v, threads, pool):
        op = COp.from_address(address)
        op.q, op.y, op.k_new, op.v_new = q, y, k, v
        assert lib.skimkv_check(address) is None
        work = torch.zeros(lib.skimkv_work(address, 3) + 64, dtype=torch.uint8)
        at = (work.data_ptr() + 63) // 64 * 64
        for _ in range(2):  # the work area is ready again after a step
            for i in range(3):
                lib.skimkv_share(address, at, i, 3)
        calls.append(name)

    with on(isa):
        want = getattr(steps, name)(store, q, 0.125, None, *args)
    calls = []
    monkeypatch.setattr(native.library(), "skimkv_step", shares)
    store.view = None  # it remembers the function of the step before
    got = compare(name, isa, q, store, 0.125, None, *args)
    assert calls == [name]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@native_only
def test_the_kernels_run_on_pytorchs_threads():
    """One pool: a loop of linear layers and attention has no thread that linear layers alone do not have."""
    q, store = filled(64, [5000], torch.bfloat16, 1, "copy", 8, 32, 8)
    x, w = torch.randn(8, 2048), torch.randn(2048, 2048)
    with on(ISAS[0], 3):
        for _ in range(3):
            x @ w
        before = len(os.listdir("/proc/self/task"))
        for _ in range(3):
            x @ w
            steps.sparq(store, q, 0.125, None, 8, 32, 8, "coverage", True)
        # OpenMP ends a thread that is left out while another process takes its core
        assert len(os.listdir("/proc/self/task")) <= before


@native_only
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([("cap", ctypes.c_int64), *CChunk._fields_[2:]], "skimkv_chunk has"),
        ([CChunk._fields_[1], CChunk._fields_[0], *CChunk._fields_[2:]], "skimkv_chunk.cap has"),
        ([*CChunk._fields_[:-1], ("e_g", ctypes.c_int32)], "skimkv_chunk.e_g has"),
        ([*CChunk._fields_[:-1], ("e_x", ctypes.c_int64)], "skimkv_chunk.e_g has"),
    ],
    ids=["missing", "order", "size", "name"],
)
def test_a_structure_that_is_not_that_of_c_is_refused(wrong, says):
    class Wrong(ctypes.Structure):
        _fields_ = wrong

    check_structures(native.library())
    with pytest.raises(ValueError, match=re.escape(says)):
        check_structures(native.library(), {**STRUCTURES, "skimkv_chunk": Wrong})


def test_every_structure_of_the_headers_is_written_down():
    headers = (INCLUDE / "skimkv.h").read_text() + (INCLUDE.parent / "steps.h").read_text()
    names = re.findall(r"^typedef struct (\w+)", headers, re.M)
    assert sorted(names) == sorted(STRUCTURES) and fields(("a b", int)) == [("a", int), ("b", int)]
