"""benchmarks/rivals.py: what it runs, what it keeps, and what it prints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import rivals as benchmark

BENCH = """import json, sys
if "--against" not in sys.argv:
    sys.exit("no such option")
row = {"ms_min": 1.0, "ms_max": 9.0, "kept": 9}
names = {"Dense()": 50.0, "llama.cpp -fa 0": 100.0}
print("progress")
print(json.dumps({"rows": [
    {**row, "method": name, "ms": ms, "better": ms == 100.0, "speedup_rivals": {"llama.cpp -fa 0": 100.0 / ms}}
    for name, ms in names.items()
]}))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch):
    """The script, with stand-ins for the two programs that it runs."""
    bench, writer = tmp_path / "bench.py", tmp_path / "writer.py"
    bench.write_text(BENCH)
    writer.write_text("import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(' '.join(sys.argv[2:]))")
    monkeypatch.setattr(benchmark, "WRITER", writer)
    monkeypatch.setattr(benchmark, "BENCH", [sys.executable, str(bench)])
    return benchmark


def test_results_are_kept_and_not_measured_again(script, tmp_path: Path, capsys):
    folder = tmp_path / "out"
    args = [str(folder), "--llama", "bin/llama-bench", "--model", "llama-3-8b-Q4_K_M", "--length", "512"]
    script.main(args)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| llama-3-8b-Q4_K_M-512 | `Dense()` | 50.0 | 1.0 to 9.0 | 9 | 2.00× |"
    assert len(lines) == 4
    assert folder.joinpath("llama-3-8b-Q4_K_M.gguf").read_text() == "--shape llama-3-8b --layers 8 --type Q4_K_M"
    result = folder / "llama-3-8b-Q4_K_M-512.json"
    kept = json.loads(result.read_text())
    kept["rows"][0]["ms"] = 25.0
    result.write_text(json.dumps(kept))
    script.main(args)
    assert "| `Dense()` | 25.0 |" in capsys.readouterr().out


def test_what_fails_is_one_line_and_leaves_no_result(script, tmp_path: Path, monkeypatch, capsys):
    script.WRITER.write_text("import sys; sys.exit('the disk is full')")
    script.main([str(tmp_path / "out"), "--llama", "x", "--model", "llama-2-7b-Q8_0", "--length", "512"])
    out, err = capsys.readouterr()
    assert err == "llama-2-7b-Q8_0-512: the disk is full\n" and len(out.splitlines()) == 2
    assert not list((tmp_path / "out").glob("*.json"))


def test_every_command_names_its_programs(script, tmp_path: Path):
    parsed = script.argparse.Namespace(
        folder=tmp_path, llama=Path("a"), fork=Path("b"), model=None, length=None, rounds=9, file=None
    )
    found = dict(script.commands(parsed))
    assert [path.name for path in found][:2] == ["llama-2-7b-Q8_0-16384.json", "llama-2-7b-Q4_K_M-16384.json"]
    assert len(found) == 6
    for path, steps in found.items():
        programs = ["--against", "llama.cpp=a", "--against", "fork=b"]
        programs = programs[:2] if path.name.startswith("llama-3") else programs  # it has grouped queries
        assert steps[-1][-len(programs) - 1 :] == ["--json", *programs] and len(steps) == 2


def test_prompts_and_tokens_of_a_file(script, tmp_path: Path, capsys):
    bench = Path(script.BENCH[1])
    prompts = BENCH.replace('"speedup_rivals": {"llama.cpp -fa 0": 100.0 / ms}', '"first_speedup_rival": 100.0 / ms')
    prompts = prompts.replace('"ms_', '"first_ms_').replace('"ms":', '"first_ms":')
    tokens = "".join(f"    {line}\n" for line in BENCH.splitlines()[1:])
    prompts = "".join(f"    {line}\n" for line in prompts.splitlines()[1:])
    bench.write_text(f"import json, sys\nif sys.argv[1] == 'token':\n{tokens}else:\n{prompts}")
    script.main([str(tmp_path / "out"), "--llama", "x", "--file", "a/m.gguf", "--length", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2::2] == [
        f"| m-{name} | `Dense()` | 50.0 | 1.0 to 9.0 | 9 | 2.00× |" for name in ("prompt-512", "prompt-2048", "64")
    ]
