"""skimkv serve: its command line, and the command itself in a process of its own."""

from __future__ import annotations

import importlib.util
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import skimkv
from skimkv import serve
from skimkv.hf import load
from support.command_line import answer, assert_mistake, run
from support.command_server import Server
from support.gguf_files import tiny, write


def test_packages_that_are_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PACKAGES", ("json", "no_such_package"))
    assert_mistake(run(capsys, "serve", "builtin"), "serving needs no_such_package: pip install 'skimkv[serve]'")


def test_an_address_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(load, "load", lambda *args, **options: pytest.fail("the model was loaded"))
    with serve.listen("127.0.0.1", 0) as opened:
        port = str(opened.getsockname()[1])
        mistakes = (("--port", port), f"cannot listen at 127.0.0.1, port {port}"), (("--host", ""), "--host is empty")
        for argv, words in mistakes:
            assert_mistake(run(capsys, "serve", "builtin", *argv), words)


def test_clients_are_refused_while_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address is free again when the model cannot be loaded."""
    pytest.importorskip("uvicorn")
    with serve.reserve("127.0.0.1", 0) as free:
        address = free.getsockname()

    def connect(*args: Any, **options: Any) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=30)
        raise ValueError("no such weights")

    monkeypatch.setattr(load, "load", connect)
    assert_mistake(run(capsys, "serve", "builtin", "--port", str(address[1])), "no such weights")
    serve.listen(*address).close()


def test_a_benchmark_of_vllm_says_that_it_is_not_installed(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert_mistake(
        run(capsys, "bench", "serve", "--engine", "vllm"), "vLLM is not installed: pip install 'skimkv[vllm]'"
    )


@pytest.mark.slow
def test_the_benchmark(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = "--out", str(tmp_path / "r.jsonl"), "--plot", str(tmp_path / "r.png")
    setting = "--shape", "tiny", "--layers", "1", "--length", "36+4", "--memory", "100K"
    rows = answer(capsys, "bench", "serve", *setting, *files)["rows"]
    assert len(rows) == 2 * 6 and (tmp_path / "r.png").stat().st_size > 10_000
    status, out, _ = run(capsys, "bench", "serve", *setting, *files)
    assert status == 0 and "caches within 102,400 bytes: tiny, 1 layer, bfloat16 weights" in out
    assert_mistake(run(capsys, "bench", "serve", *setting, "--memory", "10"), "one sequence takes")
    for row in rows:
        assert f"{row['tokens_per_s']:,.0f}" in out  # read from the file: the same figures


def expected(model: str, prompt: str, new: int, **options: Any) -> str:
    network, tokenizer = skimkv.load(model, **options)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with skimkv.attach(network, "SparQ(r=8, k=16)"), torch.no_grad():
        tokens: Any = network.generate(ids, max_new_tokens=new, do_sample=False)  # type: ignore[operator]
    text: str = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
    return text


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    prompt = "".join(f"stone-{i}: {10000 + 37 * i}\n" for i in range(30)) + "stone-7: "
    with Server("builtin", "--method", "SparQ(r=8, k=16)", "--weights", "int8", "--conversations", "1") as server:
        texts = [server.complete(model="builtin", prompt=prompt, max_tokens=8)["choices"][0] for _ in range(2)]
        stop = texts[0]["text"][2]
        stopped = server.complete(model="builtin", prompt=prompt, max_tokens=20, stop=stop)["choices"][0]
    assert server.first_line.startswith("skimkv serves builtin with SparQ(r=8, k=16) at ")
    text = expected("builtin", prompt, 8, weights="int8")
    assert [choice["text"] for choice in texts] == [text, text]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(stop)], "stop")
    lines = server.errors.splitlines()
    tokens = int(lines[0].split()[0])
    assert [line.split(";")[0] for line in lines[:3]] == [
        f"{tokens} prompt tokens, 0 of them reused",
        *[f"{tokens} prompt tokens, {tokens - 2} of them reused"] * 2,
    ]
    assert (server.status, lines[3:]) == (-signal.SIGTERM, [])


@pytest.mark.slow
def test_conversations_survive_a_kill(tmp_path: Path) -> None:
    """The first server is killed when the file is there, and the second one is told to end."""
    pytest.importorskip("uvicorn")
    prompt = "".join(f"stone-{i}: {10000 + 37 * i}\n" for i in range(30)) + "stone-7: "
    argv = "builtin", "--method", "Skim(k=16)", "--cache-dir", str(tmp_path / "kept")
    answers = []
    for kill in (True, False):
        with Server(*argv) as server:
            answers.append(server.complete(model="builtin", prompt=prompt, max_tokens=8))
            while kill and not list((tmp_path / "kept").glob("*.safetensors")):
                time.sleep(0.05)
            if kill:
                server.process.kill()
    assert answers[0]["choices"] == answers[1]["choices"]
    tokens = answers[1]["usage"]["prompt_tokens"]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, tokens - 2]
    lines = server.errors.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'kept'} holds 1 conversations of this use, and ")
    assert lines[1].startswith(f"{tokens} prompt tokens, {tokens - 2} of them reused from a file; 8 new tokens")
    assert server.status == -signal.SIGTERM


@pytest.mark.slow
def test_a_gguf_file(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    name = str(tmp_path / "tiny.gguf")
    write(tmp_path / "tiny.gguf", tiny())
    with Server(name, "--method", "SparQ(r=8, k=16)") as server:
        text = server.complete(model=name, prompt="the Cat", max_tokens=6)["choices"][0]["text"]
    assert text == expected(name, "the Cat", 6)
