"""skimkv info: every method, and what this installation is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest
import torch

from skimkv import METHODS, Dense, Method, attach, spec
from skimkv.cli.options import check_method
from skimkv.hf.load import BUILTIN
from support.command_line import answer, assert_mistake, run
from support.random_models import random_model, tiny_configuration


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    facts = answer(capsys, "info")
    assert list(facts) == ["versions", "devices", "backends", "gpu_kernels", "methods"]
    assert [method["name"] for method in facts["methods"]] == list(METHODS)
    assert {method["store"] for method in facts["methods"]} == {"Full", "SignIndexed", "Slots", "Clusters"}
    kernels = {method["name"]: method["kernels"] for method in facts["methods"]}
    without = {name: of for name, of in kernels.items() if of != ["cpu", "gpu"]}
    on_a_cpu_only = ("Skim", "Quest", "TOVA")
    reference = ("SubGenStream", "TopP", "RaBitQ", "SANTA", "VAttention", "RocketKV")
    assert without == {name: ["cpu"] for name in on_a_cpu_only} | {name: [] for name in reference}
    assert facts["backends"]["cpu"]["backend"] in ("ref", "cpu")


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert all(name in out for name in METHODS)


def test_names_and_versions_stay_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    _, out, _ = run(capsys, "info")
    versions = answer(capsys, "info")["versions"]
    lines = out.splitlines()
    assert all(
        any(f"{name}\N{NO-BREAK SPACE}{version}" in line for line in lines) for name, version in versions.items()
    )
    assert max(map(len, lines[:3])) <= 80 and any(line.endswith(", 1 thread") for line in lines)


@dataclass(frozen=True, repr=False)
class Plain(Dense):
    """Reads everything, without a kernel."""

    size: int = 3
    kernel = Method.kernel


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package `plain_method` that announces the method Plain by an entry point."""
    package = ModuleType("plain_method", "A paper about plain methods.")
    package.Plain = Plain  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setattr(
        spec, "announced_methods", lambda: [EntryPoint("Plain", "plain_method:Plain", "skimkv.methods")]
    )
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.usefixtures("announced")
def test_a_method_of_another_package(capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer(capsys, "info")["methods"][-1]
    assert (plain["spec"], plain["store"], plain["kernels"]) == ("Plain(size=3, kv=None)", "Full", [])
    assert plain["reads"] == "Reads everything, without a kernel."
    _, out, _ = run(capsys, "info")
    assert "reference on every device; store Full" in out
    check_method("Plain(size=4)")
    with pytest.raises(ValueError, match="no argument 'sizes'"):
        check_method("Plain(sizes=4)")


def test_model_families(capsys: pytest.CaptureFixture[str]) -> None:
    listed = answer(capsys, "info", "--models")
    assert list(listed) == ["transformers", "installed", "counts", "families"]
    assert sum(listed["counts"].values()) == len(listed["families"]) > 100
    statuses = {family["name"]: family["status"] for family in listed["families"]}
    assert (statuses["llama"], statuses["qwen3_next"], statuses["bloom"]) == ("equal", "partly", "refused")
    status, out, _ = run(capsys, "info", "--models")
    assert status == 0 and "jamba: 1 of 5 layers; the other layers are linear attention" in out
    assert f"Found with transformers {listed['transformers']}" in out


def test_the_layers_of_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In a model like Gemma 3 generate() decodes those that info counts, also where the window covers all tokens."""
    assert "the method decodes all 4 layers" in run(capsys, "info", "--model", "builtin")[1]
    model = random_model(tiny_configuration("gemma3_text"))
    model.save_pretrained(tmp_path)
    told = answer(capsys, "info", "--model", str(tmp_path))
    assert (told["architecture"], told["decoded"], told["layers"], told["window"]) == ("Gemma3ForCausalLM", 1, 6, 8)
    assert told["summary"] == (
        "the method decodes 1 of 6 layers; the others see only the last 8 tokens and keep the library's cache"
    )
    for tokens in (3, 30):  # the window is 8
        with attach(model, "Dense()"):
            out = model.generate(
                torch.arange(tokens)[None], max_new_tokens=4, do_sample=False, return_dict_in_generate=True
            )
        assert len(out.past_key_values.stores) == told["decoded"]
    (tmp_path / "config.json").write_text('{"model_type": "bloom", "hidden_size": 32, "n_head": 4, "n_layer": 1}')
    status, _, error = run(capsys, "info", "--model", str(tmp_path))
    assert status == 2 and "BloomForCausalLM is not supported: it does not take another attention function" in error


def test_a_damaged_model_is_named_with_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" + bytes(3))
    for command in ("info", "doctor"):
        assert_mistake(run(capsys, command, "--model", str(file)), f"skimkv: {file}: truncated or damaged: ")
    config = json.loads((BUILTIN / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": -1}))
    (tmp_path / "model.safetensors").touch()
    for command in ("info", "doctor", "roofline"):
        mistake = run(capsys, command, "--model", str(tmp_path))
        assert_mistake(mistake, f"{tmp_path}/config.json: num_hidden_layers = -1 must be at least 0")
