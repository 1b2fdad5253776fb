"""`bench token`: whole tokens of a small model, ours and transformers', in turn or one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from skimkv.bench import machine as machines
from skimkv.bench import models, rivals
from skimkv.bench import token as bench
from skimkv.bench.machine import Cpu
from skimkv.bench.rivals import KINDS
from skimkv.bench.rounds import SELDOM
from skimkv.bench.shapes import MODELS, reads_of_sizes
from skimkv.methods import parse
from skimkv.stores.base import Shape
from support.gguf_files import tiny, write
from support.random_models import random_model, tiny_configuration
from support.rival_programs import write_program
from support.stand_in_machine import StandInGpu
from support.tiny_models import FAMILIES, VOCAB, build, tokenizer

ROW = {
    "method", "shape", "layers", "weights", "length", "compiled", "interleaved", "ms", "ms_min", "ms_max",
    "calls", "kept", "ms_attention", "ms_weights", "ms_linear", "floor_ms", "cache_bytes", "bytes_read", "weight_bytes",
    "speedup_dense", "speedup_allowed", "speedup_transformers",
}  # fmt: skip
METHODS = ["Dense()", "SparQ(r=8, k=32)", "H2O(k=64)"]
MATRICES = 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 640) + 256 * 2048  # of two layers of `tiny`, and its head


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machines, "flush_bytes", lambda: 1 << 20)
    monkeypatch.setattr(bench, "COMPILE", "eager")


def time_random(machine, shape, layers, weights, lengths, *others, **more):
    """The rows of a model with random weights."""
    subject = models.random_subject(shape, layers, weights, max(lengths) + 1024, machine.device)
    return bench.time_tokens(machine, subject, lengths, *others, **more)


@pytest.mark.parametrize(("machine", "weights", "compile"), [
    (Cpu, "int8", False), (Cpu, "bfloat16", False), (StandInGpu, "float32", False),
    pytest.param(StandInGpu, "float32", True, marks=pytest.mark.slow),
])  # fmt: skip
def test_rows_keep_the_contract(machine, weights, compile):
    out = time_random(machine(), "tiny", 2, weights, [300, 600], METHODS, 2, compile=compile)
    assert set(out) == {"machine", "peak_gb_per_s", "peak", "rows", "waits_known"} and json.dumps(out)
    names = ["transformers", *METHODS]
    assert [(row["method"], row["length"]) for row in out["rows"]] == [(m, n) for n in (300, 600) for m in names]
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    size = {"int8": 34 / 32, "bfloat16": 2, "float32": 4}[weights]
    for row in out["rows"]:
        assert set(row) == ROW
        assert row["ms"] == pytest.approx(row["ms_attention"] + row["ms_weights"])
        assert row["interleaved"] is not compile
        assert row["compiled"] is (compile and row["method"] != "transformers")
        method = parse("Dense()" if row["method"] == "transformers" else row["method"])
        closed = method.traffic(row["length"] + bench.WARM_UP + 1, Shape(1, 2, 2, 64), dtype)
        assert row["cache_bytes"] == row["bytes_read"] == 2 * closed.bytes
        assert row["weight_bytes"] == pytest.approx(MATRICES * size, rel=0.01)
        assert (row["speedup_allowed"] > 1) == (row["method"] not in ("transformers", "Dense()"))
        assert (row["ms_linear"] is None) is compile
    if machine is Cpu:  # transformers has layers of its own, unless their weights are quantised
        of_transformers, *of_ours = (row["ms_linear"] for row in out["rows"][:4])
        assert len(set(of_ours)) == 1 and of_transformers != of_ours[0] and min(of_transformers, of_ours[0]) > 0


def test_bytes_that_depend_on_the_data_are_those_of_the_last_step(monkeypatch):
    observed, step_bytes = [], models.step_bytes

    def spy(model, method, n, of_stores=()):
        if repr(method) == "Skim(k=8)":
            observed.extend(of_stores)
        return step_bytes(model, method, n, of_stores)

    monkeypatch.setattr(models, "step_bytes", spy)
    out = time_random(Cpu(), "tiny", 2, "float32", [300], ["Dense()", "Skim(k=8)"], 2)
    (row,) = (row for row in out["rows"] if row["method"] == "Skim(k=8)")
    assert len(observed) == 2 and all(of_layer["value_rows"] <= of_layer["key_rows"] for of_layer in observed)
    method, n, shape = parse("Skim(k=8)"), 300 + bench.WARM_UP + 1, Shape(1, 2, 2, 64)
    layers = [method.traffic(n, shape, torch.float32, **of_layer).bytes for of_layer in observed]
    assert row["bytes_read"] == sum(layers) < 2 * method.traffic(n, shape, torch.float32).bytes


def test_steps_that_are_many_times_as_slow_are_seldom_taken(monkeypatch: pytest.MonkeyPatch):
    """Transformers' own are, if they are slow; with 0 as the limit they always are."""
    monkeypatch.setattr(bench, "SLOW", 0.0)
    out = time_random(Cpu(), "tiny", 1, "bfloat16", [300], ["SparQ(r=8, k=32)"], SELDOM + 1)
    assert [row["calls"] for row in out["rows"]] == [2, SELDOM + 1, SELDOM + 1]
    assert all(row["kept"] <= row["calls"] and row["speedup_transformers"] > 0 for row in out["rows"])


def test_candidates_that_do_not_fit_together_are_measured_one_after_the_other():
    model = models.random_llama("tiny", 2, "float32", 1024)
    need = models.Decoder(parse("Dense()"), 600).bound(model)
    out = time_random(StandInGpu(free=2 * need), "tiny", 2, "float32", [600], ["Dense()", "H2O(k=64)"], 1)
    assert [row["interleaved"] for row in out["rows"]] == [False] * 3


def test_a_token_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"transformers after 600 tokens: .* GB of caches, 0.0 GB free"):
        time_random(StandInGpu(free=1 << 20), "tiny", 2, "float32", [600], ["Dense()"], 2)


def test_8_bit_weights_have_no_kernel_on_a_gpu():
    machine = StandInGpu()
    machine.device = torch.device("cuda")
    with pytest.raises(ValueError, match="--weights int8: there is no GPU kernel for them; give bfloat16 or float32"):
        time_random(machine, "tiny", 2, "int8", [600], ["Dense()"], 2)


def test_the_cache_of_transformers_and_ours_give_the_same_token():
    """Both are filled with the same random tokens, so that dense attention must agree."""
    model = models.random_llama("tiny", 2, "float32", 1024)
    caches = [models.random_cache(model, method, 300, 1) for method in (None, parse("Dense()"))]
    ids, places = torch.tensor([[[5]], [[300]]])
    logits = []
    for cache in caches:
        with torch.inference_mode():
            logits.append(model(input_ids=ids, past_key_values=cache, position_ids=places).logits)
        assert cache.get_seq_length() == 301
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


def test_bytes_of_weights_are_those_of_the_roofline():
    model = models.random_llama("smollm-135m", 1, "bfloat16", 1024)
    reads = reads_of_sizes("one layer", MODELS["smollm-135m"]._replace(layers=1))
    rotary = sum(buffer.nbytes for buffer in model.buffers())
    assert models.weight_bytes(model) - rotary == 2 * reads.weights


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "mixtral", "mistral-sliding"])
def test_a_model_of_any_family_is_timed_with_its_own_weights(tmp_path: Path, kind: str):
    """Grouped queries; layers that slide; a learned table; experts; and a window that covers all tokens or not."""
    options = {"sliding_window": 256} if kind == "mistral-sliding" else {}
    model = build(FAMILIES[kind][0], **{**FAMILIES[kind][1], **options})
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    subject = models.loaded_subject(str(tmp_path))
    assert all(map(torch.equal, subject.model.state_dict().values(), model.state_dict().values()))
    out = bench.time_tokens(Cpu(), subject, [40], ["SparQ(r=8, k=16)"], 1)
    assert json.dumps(out)
    n = 40 + bench.WARM_UP
    for row, spec in zip(out["rows"], ("Dense()", "Dense()", "SparQ(r=8, k=16)"), strict=True):
        assert (row["shape"], row["weights"], row["layers"]) == (str(tmp_path), "float32", 2) and set(row) == ROW
        shape = models.cache_shape(model)
        assert shape == (Shape(1, 4, 1, 16) if kind == "gpt2" else Shape(1, 2, 2, 16))
        layer = parse(spec).traffic(n, shape, torch.float32).bytes
        windowed = parse("Dense()").traffic(7, shape, torch.float32).bytes
        assert row["bytes_read"] == (layer + windowed if kind == "gemma2" else 2 * layer)
        assert row["weight_bytes"] == models.weight_bytes(subject.model)


def test_weights_are_read_in_the_formats_of_load(tmp_path: Path):
    """Then the layers of all candidates are ours, and are timed alone as well."""
    build("llama", num_key_value_heads=2, head_dim=16).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    for weights, size in (("int8", 34 / 32), ("int4", 18 / 32), ("bfloat16", 2), ("float32", 4)):
        subject = models.loaded_subject(str(tmp_path), weights)
        rows = bench.time_tokens(Cpu(), subject, [40], ["Dense()"], 1)["rows"]
        matrices = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96) + 64 * VOCAB
        assert rows[0]["weight_bytes"] == pytest.approx(matrices * size, rel=0.08)
        assert rows[0]["weights"] == weights and all(row["ms_linear"] > 0 for row in rows)
    build("gpt_neox").save_pretrained(tmp_path)  # its layers are no operation
    rows = bench.time_tokens(Cpu(), models.loaded_subject(str(tmp_path), "int8"), [40], ["Dense()"], 1)["rows"]
    assert [row["ms_linear"] for row in rows] == [None, None]


def test_experts_and_tables_count_as_far_as_they_are_read():
    """Two experts of four; of the table of embeddings nothing, unless it is the output layer too."""
    mixtral = build("mixtral", **FAMILIES["mixtral"][1])
    experts = sum(p.nbytes for name, p in mixtral.named_parameters() if ".experts." in name)
    whole = sum(t.nbytes for t in [*mixtral.parameters(), *mixtral.buffers()]) - 4 * 64 * VOCAB
    assert models.weight_bytes(mixtral) == whole - experts // 2
    llama = {"num_key_value_heads": 2, "head_dim": 16}
    assert models.weight_bytes(build("llama", **llama)) == models.weight_bytes(
        build("llama", **llama, tie_word_embeddings=True)
    )


@pytest.mark.parametrize(("kind", "options", "why"), [
    ("bloom", {"n_head": 4}, "BloomForCausalLM is not supported: it does not take another attention function"),
    ("gpt2", {}, "the 160 positions of GPT2LMHeadModel"),
    ("mistral", FAMILIES["mistral-sliding"][1], "no layer of full attention that a method could decode: its 2 layers"),
    ("jamba", None, "it has layers that keep states, or that look at no other token; `skimkv bench generate` measures"),
])  # fmt: skip
def test_what_cannot_be_timed_is_one_line(tmp_path: Path, kind: str, options, why: str):
    model = random_model(tiny_configuration(kind)) if options is None else build(kind, **options)
    model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=why) as caught:
        bench.time_tokens(Cpu(), models.loaded_subject(str(tmp_path)), [200], ["Dense()"], 1)
    assert "\n" not in str(caught.value)


def test_programs_take_turns_with_our_methods_on_a_gguf_file(tmp_path: Path, monkeypatch):
    for clock in (rivals, machines):  # nobody waits for a processor, so that all turns count
        monkeypatch.setattr(clock, "RunQueueClock", lambda process="self": lambda: 5.0)
    events = list[str]()

    class Recorded(rivals.Rival):
        def __init__(self, *args) -> None:
            events.append("run")
            super().__init__(*args)

        def start(self) -> None:
            super().start()
            events.append("stop")

    monkeypatch.setattr(bench, "Rival", Recorded)
    path = tmp_path / "tiny.gguf"
    write(path, tiny(num_key_value_heads=6))
    against = {kind: write_program(tmp_path / kind, path, kind) for kind in KINDS}
    out = bench.time_tokens(Cpu(), models.loaded_subject(str(path)), [300], ["SparQ(r=8, k=32)"], 3, against=against)
    assert json.dumps(out)
    assert events == ["run", "stop"] * 4, "each is stopped before the next one runs"
    rows = {row["method"]: row for row in out["rows"]}
    ours, theirs = ["Dense()", "SparQ(r=8, k=32)"], ["llama.cpp -fa 0", "llama.cpp -fa 1"]
    assert list(rows) == [*ours, *theirs, "fork dense", "fork SparQ(r=32, k=128)"]
    assert [name for name, row in rows.items() if row["better"]] == ["llama.cpp -fa 0"]
    # four turns are warm-up: the stand-ins take 100 ms, one more in every repetition, and every second one counts
    ms = {theirs[0]: 111, theirs[1]: 161, "fork dense": 112, "fork SparQ(r=32, k=128)": 62}
    assert {name: rows[name]["ms"] for name in ms} == pytest.approx(ms)
    assert [rows[theirs[0]][key] for key in ("ms_min", "ms_max")] == pytest.approx([109, 113])
    for name, row in rows.items():
        assert (row["shape"], row["weights"], row["layers"]) == (str(path), "Q8_0", 2)
        assert row["interleaved"] and row["speedup_rivals"].keys() == ms.keys()
        assert row["speedup_rivals"].get(name, 1) == 1
        assert ("bytes_read" in row) == (name in ours)
    assert rows[theirs[1]]["speedup_rivals"]["fork dense"] == pytest.approx(112 / 161, rel=0.01)


def test_programs_that_do_not_fit_together_take_turns_with_ours_one_by_one(tmp_path: Path, monkeypatch):
    for clock in (rivals, machines):
        monkeypatch.setattr(clock, "RunQueueClock", lambda process="self": lambda: 5.0)
    path = tmp_path / "tiny.gguf"
    write(path, tiny(num_key_value_heads=6))
    subject, against = models.loaded_subject(str(path)), {"fork": write_program(tmp_path / "fork", path, "fork")}
    plan = [(path, program) for program in rivals.programs("fork", path, 300, 2, 1)]
    specs = [parse(spec) for spec in ("Dense()", "SparQ(r=8, k=32)")]
    decoders = [models.Decoder(spec, tokens) for tokens in (300, bench.FEW) for spec in specs]
    one_by_one = sum(bench._bytes(subject, contender, 300) for contender in (*decoders, plan[1]))
    monkeypatch.setattr(Cpu, "free_bytes", lambda self: int(one_by_one / 0.85) + 100)
    groups = bench._groups(Cpu(), subject, decoders, plan, 300, False)
    assert groups == [[*decoders, program] for program in plan]
    out = bench.time_tokens(Cpu(), subject, [300], ["SparQ(r=8, k=32)"], 1, against=against)
    names = ["fork dense", "fork SparQ(r=32, k=128)"]
    assert [row["method"] for row in out["rows"]] == ["Dense()", "SparQ(r=8, k=32)", *names]
    for row in out["rows"]:
        assert row["interleaved"] and list(row["speedup_rivals"]) == names and not row["better"]
    assert out["rows"][2]["speedup_rivals"][names[1]] == pytest.approx(60 / 110)
    monkeypatch.setattr(Cpu, "free_bytes", lambda self: int(one_by_one / 0.85) - 100)
    assert len(bench._groups(Cpu(), subject, decoders, plan, 300, False)) == 6


def test_our_rows_are_those_beside_the_better_setting():
    def row(name: str, ms: float, **more) -> dict:
        return {"method": name, "ms": ms, "better": True, **more}

    one = [row("Dense()", 50, bytes_read=1, speedup_rivals={"llama.cpp -fa 0": 2.0}), row("llama.cpp -fa 0", 100)]
    two = [row("Dense()", 40, bytes_read=1, speedup_rivals={"llama.cpp -fa 1": 2.2}), row("llama.cpp -fa 1", 90)]
    dense, slow, fast = bench._joined([one, two])
    assert (dense["ms"], dense["speedup_rivals"]) == (40, {"llama.cpp -fa 0": 2.0, "llama.cpp -fa 1": 2.2})
    assert [slow["better"], fast["better"]] == [False, True]
    assert slow["speedup_rivals"] == {"llama.cpp -fa 0": 1, "llama.cpp -fa 1": 0.9}


def test_a_program_without_room_for_its_cache_is_refused(tmp_path: Path, monkeypatch):
    path = tmp_path / "tiny.gguf"
    write(path, tiny(num_key_value_heads=6))
    against = {"fork": write_program(tmp_path / "fork", path, "fork")}
    monkeypatch.setattr(Cpu, "free_bytes", lambda self: path.stat().st_size)
    with pytest.raises(ValueError, match=r"fork dense after 300 tokens: .* GB of caches, 0.0 GB free"):
        bench.time_tokens(Cpu(), models.loaded_subject(str(path)), [300], ["Dense()"], 1, against=against)


def test_the_fork_supports_no_grouped_queries(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    write(path, tiny())
    against = {"fork": tmp_path / "no program is started"}
    with pytest.raises(ValueError, match=r"--against fork: its SparQ .* grouped queries, and .*tiny.gguf has 3 in a"):
        bench.time_tokens(Cpu(), models.loaded_subject(str(path)), [300], ["Dense()"], 1, against=against)
