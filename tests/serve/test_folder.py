"""Conversations in files: a server that is started again goes on with them, whatever was killed or damaged."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from skimkv.hf import saved_cache
from skimkv.methods import parse
from skimkv.serve import worker as worker_module
from skimkv.serve.conversations import Conversations
from skimkv.serve.folder import OURS, Folder, claim
from skimkv.serve.generation import Generator
from skimkv.serve.worker import Ended, Task, Worker
from support import tiny_models
from support.serving import running
from support.specs import EACH

SPARQ, PLENTY, NEW = "SparQ(r=4, k=16)", 10**9, 6


class Served:
    """A worker whose conversations are kept in a folder, or in memory alone, and what it logged."""

    def __init__(
        self, path: Path | None, method: Any = SPARQ, limit: int = PLENTY, queue: int = PLENTY, parallel: int = 1,
        name: str = "llama", max_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.lines: list[str] = []
        made = self.generator = Generator(tiny_models.family(name), parse(method), Conversations(4, PLENTY), max_tokens)
        if path is not None:
            made.folder = Folder(path, limit, queue, made.model, made.method, made.max_tokens, self.lines.append)
        self.worker = Worker(made, tiny_models.tokenizer(), parallel)

    @property
    def folder(self) -> Folder:
        assert self.generator.folder is not None
        return self.generator.folder

    def ask(
        self, ids: torch.Tensor, new: int = NEW, gone: threading.Event | None = None, **fields: Any
    ) -> tuple[list[str], int]:
        """The words of the greedy answer to a prompt, ids (n,), and how many tokens of the prompt were reused.

        gone: is set at the first piece, with which the client leaves.
        """
        task = Task(self.generator.prompt(ids.tolist(), fields, new))

        async def answer() -> tuple[list[str], int]:
            text = ""
            async for _, piece in self.worker.answers([task], gone or threading.Event()):
                if isinstance(piece, Ended):
                    return text.split(), piece.reused_tokens
                text += str(piece)
                if gone is not None:
                    gone.set()
                    break
            return text.split(), 0

        return asyncio.run(answer())

    def end(self) -> None:
        """End as the server does."""
        self.worker.end()
        if self.generator.folder is not None:
            self.folder.end()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """A function that makes a server; all of them end with the test."""
    made: list[Served] = []

    def make(*args: Any, **options: Any) -> Served:
        made.append(Served(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.end()


def text(n: int, seed: int = 0) -> torch.Tensor:
    return tiny_models.prompt(n=n, seed=seed)[0]


def next_turn(ids: torch.Tensor, words: list[str]) -> torch.Tensor:
    """A prompt, its answer, and twenty tokens more."""
    return torch.cat([ids, torch.tensor([int(word.removeprefix("w")) for word in words]), text(20, 1)])


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir() if file.name != ".lock")


QUICK = SPARQ, "Skim(k=16, r=8)", "H2O(k=24)"


@pytest.mark.filterwarnings("ignore:.*the method decodes 1 of 2 layers")
@pytest.mark.parametrize(("method", "name"), [
    *((one, "llama") for one in QUICK), (SPARQ, "gemma2"), (SPARQ, "gpt2"),
    *(pytest.param(one, "llama", marks=pytest.mark.slow) for one in EACH),
], ids=str)  # fmt: skip
def test_a_server_that_is_started_again_gives_the_same_tokens(
    method: Any, name: str, serve: Any, tmp_path: Path
) -> None:
    """Two turns in one server, whose conversation stays in memory; and one turn in each of two servers."""
    ids, whole, first = text(60), serve(None, method, name=name), serve(tmp_path, method, name=name)
    words, _ = whole.ask(ids)
    assert first.ask(ids) == (words, 0)
    first.end()
    later = next_turn(ids, words)
    second = serve(tmp_path, method, parallel=3, name=name)
    assert second.ask(later) == whole.ask(later) and whole.generator.totals.reused_tokens == 60
    assert second.generator.totals.loaded_tokens == second.generator.totals.reused_tokens == 60
    second.end()
    assert len(files(tmp_path)) == 1  # that of the turn before has gone
    third = serve(tmp_path, method, name=name)
    (stored,) = third.folder._files.values()
    assert torch.equal(stored.ids, later.int())


def test_the_longest_beginning_is_loaded_where_that_pays(serve: Any, tmp_path: Path) -> None:
    """Also a part of a file, if the method keeps every token; too little of a long one, and what memory has, is not."""
    first = serve(tmp_path)
    long, other = text(150), text(70, 2)
    short = torch.cat([long[:50], other[:20]])
    for ids in (long, short, other):
        first.ask(ids, 2)
    first.end()
    assert len(files(tmp_path)) == 3
    again = serve(tmp_path)
    find = again.folder.find
    assert find(torch.cat([other[:40], text(30, 3)]), 0).ids.tolist() == other.tolist()
    assert find(torch.cat([other[:34], text(30, 3)]), 0) is None and find(torch.cat([other, text(9, 3)]), 50) is None
    assert again.ask(torch.cat([short, text(9, 3)]))[1] == 70
    assert again.ask(torch.cat([long[:60], text(30, 3)]))[1] == 50  # which memory has by now
    assert again.ask(torch.cat([other[:60], text(30, 3)]))[1] == 60
    assert again.generator.totals.loaded_tokens == 70 + 60


def test_the_same_prompt_again_is_written_once(serve: Any, tmp_path: Path) -> None:
    made = serve(tmp_path)
    for _ in range(2):
        words, _ = made.ask(text(60))
        made.ask(text(30))  # too short to be worth a file
    made.end()
    (name,) = files(tmp_path)
    assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    again = serve(tmp_path)
    assert again.ask(text(60)) == (words, 58)
    again.end()
    assert files(tmp_path) == [name]


def test_a_prompt_that_is_read_anew_loads_no_file(serve: Any, tmp_path: Path) -> None:
    made = serve(tmp_path)
    words, _ = made.ask(text(60))
    made.end()
    again = serve(tmp_path)
    assert again.ask(text(60), cache_prompt=False) == (words, 0) and again.generator.totals.loaded_tokens == 0


@pytest.mark.parametrize("place", ["write", "move", "remove"])
def test_a_kill_leaves_every_file_whole(place: str, serve: Any, tmp_path: Path) -> None:
    """While a file is written, before it is moved to its place, and before that of the turn before is removed."""
    ids, made = text(60), serve(tmp_path)
    words, _ = made.ask(ids)
    made.end()
    (before,) = files(tmp_path)
    later, whole = next_turn(ids, words), serve(None)
    whole.ask(later)
    (conversation,) = whole.generator.conversations._kept

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def write_half(tensors: Any, path: Path, header: Any) -> None:
        path.with_name(".tmpAbCdEf").write_bytes(b"half")  # as safetensors does, which gives it its name afterwards
        die()

    child = os.fork()
    if child == 0:
        try:
            made = Served(tmp_path)
            if place == "write":
                saved_cache.save_file = write_half
            else:
                setattr(Path, {"move": "replace", "remove": "unlink"}[place], die)
            made.folder.add(conversation)
            made.folder.end()
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert before in files(tmp_path) and len(files(tmp_path)) == 2
    again = serve(tmp_path)
    assert len(files(tmp_path)) == (2 if place == "remove" else 1)
    assert again.ask(later) == (whole.ask(later)[0], 78 + NEW if place == "remove" else 60)


@pytest.mark.parametrize("how", ["a bit", "half", "headless"])
def test_a_damaged_file_is_named_and_the_prompt_is_read(how: str, serve: Any, tmp_path: Path) -> None:
    ids, made = text(60), serve(tmp_path)
    words, _ = made.ask(ids)
    made.end()
    (name,) = files(tmp_path)
    again = serve(tmp_path) if how == "a bit" else None
    content = bytearray((tmp_path / name).read_bytes())
    content[-5] ^= 1
    size = {"a bit": len(content), "half": len(content) // 2, "headless": 4}[how]
    (tmp_path / name).write_bytes(content[:size])
    again = again or serve(tmp_path)
    assert again.ask(ids) == (words, 0) and again.generator.totals.loaded_tokens == 0
    (line,) = [line for line in again.lines if name in line]
    assert line.startswith(f"{tmp_path / name}: ") and line.endswith("; the file is removed") and "\n" not in line
    again.end()
    assert files(tmp_path) == [name]  # written anew
    assert serve(tmp_path).ask(ids) == (words, 58)


def test_bytes_are_bounded_and_what_was_used_last_stays(serve: Any, tmp_path: Path) -> None:
    made = serve(tmp_path)
    for seed in range(3):
        made.ask(text(60, seed))
    made.end()
    one = (tmp_path / files(tmp_path)[0]).stat().st_size
    again = serve(tmp_path, limit=int(3.5 * one))
    assert again.folder.nbytes == sum((tmp_path / name).stat().st_size for name in files(tmp_path)) > 2.9 * one
    assert again.ask(text(60, 0))[1] == 58
    again.ask(text(60, 3))
    again.end()
    assert len(files(tmp_path)) == 3
    last = serve(tmp_path, limit=int(2.5 * one))
    assert len(files(tmp_path)) == last.folder.count == 2
    assert [last.ask(text(60, seed))[1] for seed in (0, 3)] == [58, 58]
    last.end()
    small = serve(tmp_path, limit=one // 2)
    assert files(tmp_path) == [] and small.folder.nbytes == 0
    small.ask(text(60))
    small.end()
    assert files(tmp_path) == [] and "give more --cache-dir-size" in "\n".join(small.lines)


def test_files_of_another_use_are_ignored_and_named(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = serve(tmp_path)
    made.ask(text(60))
    made.end()
    (name,) = files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"of somebody else")
    for options, words in (
        ({"method": "Dense()"}, "its method is 'SparQ(r=4, k=16)', not 'Dense()'"),
        ({"name": "qwen3"}, "its model is 'LlamaForCausalLM', not 'Qwen3ForCausalLM'"),
        ({"max_tokens": 100}, "its max_tokens is '160', not '100'"),
    ):
        other = serve(tmp_path, **options)
        assert other.folder.count == 0 and other.folder.nbytes > 0
        assert f"{tmp_path}: {name} is ignored: {words}" in other.lines
        assert other.ask(text(60))[1] == 0
        other.end()
    assert len(files(tmp_path)) == 5
    before = saved_cache.FORMAT
    monkeypatch.setattr(saved_cache, "FORMAT", "0")
    assert f"and 3 others is ignored: its format is '{before}', not '0'" in serve(tmp_path).lines[0]


def test_no_other_request_waits_for_a_file(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come while a file is written, its own next turn included, and while one is loaded."""
    save, load, go_on, whole = saved_cache.save, saved_cache.load, threading.Event(), serve(None)

    def slow(work: Any) -> Any:
        def wait(*args: Any) -> None:
            assert go_on.wait(60)
            work(*args)

        return wait

    monkeypatch.setattr(saved_cache, "save", slow(save))
    made = serve(tmp_path, parallel=2)
    ids = text(60)
    words, _ = whole.ask(ids)
    assert made.ask(ids) == (words, 0) and made.folder.waiting == 1
    assert made.ask(text(50, 5)) == (whole.ask(text(50, 5))[0], 0)
    later = next_turn(ids, words)
    assert made.ask(later) == (whole.ask(later)[0], 60)
    assert made.folder.waiting == 3 and not files(tmp_path)
    go_on.set()
    made.end()
    assert len(files(tmp_path)) == 2
    go_on.clear()
    monkeypatch.setattr(saved_cache, "load", slow(load))
    again = serve(tmp_path, parallel=2)
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(again.ask, later)
        assert again.ask(text(40, 7)) == (whole.ask(text(40, 7))[0], 0) and not loading.done()
        go_on.set()
        assert loading.result(60) == (whole.ask(later)[0], len(later) - 2)


def test_a_slow_disk_takes_bounded_memory(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, save = threading.Event(), saved_cache.save
    monkeypatch.setattr(saved_cache, "save", lambda *args: go_on.wait(60) and save(*args))
    made = serve(tmp_path, queue=1)
    for seed in range(4):
        made.ask(text(60, seed))
    assert made.folder.waiting == 2
    assert [line for line in made.lines if "is too slow" in line] == [
        f"a conversation of 60 tokens is not written: {tmp_path} is too slow"
    ] * 2
    go_on.set()
    made.end()
    again = serve(tmp_path)
    assert [again.ask(text(60, seed))[1] for seed in range(4)] == [58, 0, 0, 58]


def test_a_disk_that_is_full_is_told_of(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_cache, "save_file", full)
    made = serve(tmp_path)
    words, _ = made.ask(text(60))
    assert made.ask(text(60)) == (words, 58)
    made.end()
    assert f"is not written to {tmp_path}: [Errno 28] No space left on device" in "\n".join(made.lines)
    assert files(tmp_path) == []


def test_an_answer_that_is_cut_at_the_end_is_kept(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, gone = serve(tmp_path), threading.Event()
    step = made.generator.step
    monkeypatch.setattr(made.generator, "step", lambda answers: step(answers) if gone.wait(60) else None)
    monkeypatch.setattr(worker_module, "LEAVING_SECONDS", 60)
    made.ask(text(60), 95, gone)
    made.end()
    assert made.generator.totals.new_tokens < 95 and serve(tmp_path).folder.count == 1


def test_one_server_uses_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with claim(path), pytest.raises(ValueError, match=f"--cache-dir {path}: another server uses it"), claim(path):
        pass
    assert path.stat().st_mode & 0o777 == 0o700
    with claim(path):
        (path / "file").write_text("")
    with (
        pytest.raises(ValueError, match="Not a directory; give a folder that can be written to"),
        claim(path / "file/c"),
    ):
        pass


def test_over_http(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    model, tokenizer = tiny_models.family("llama"), tiny_models.tokenizer()
    body = {"prompt": " ".join(f"w{i}" for i in text(60).tolist()), "max_tokens": 5}
    answers, numbers = [], []
    for _ in range(2):
        with running(model, tokenizer, "tiny", SPARQ, cache_dir=tmp_path) as server:
            answers.append(server.request("/v1/completions", body)[1])
            lines = server.send("/metrics").read().decode().splitlines()
            numbers.append({line.split()[0]: int(float(line.split()[1])) for line in lines if line[0] != "#"})
            totals = server.request("/skimkv")[1]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers] == [0, 58]
    assert [one["skimkv_loaded_tokens_total"] for one in numbers] == [0, 58]
    (file,) = tmp_path.glob(OURS)
    assert numbers[1]["skimkv_stored_conversations"] == totals["stored_conversations"] == 1
    assert numbers[1]["skimkv_stored_bytes"] == totals["stored_bytes"] == file.stat().st_size
    assert "skimkv_stored_waiting" in numbers[1] and totals["loaded_tokens"] == 58
