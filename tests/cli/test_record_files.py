"""The commands that keep records in a file: one writer at a time, and no record of another model is taken."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from skimkv.cli import main
from skimkv.hf.load import BUILTIN
from support.evaluation import eval_argv

HOLDER = "import fcntl, sys; f = open(sys.argv[1], 'a'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); input()"


def tune_argv(tmp_path: Path, out: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text("the old king went to the mill by the river " * 40)
    sizes = ["--prompt", "32", "--scored", "4", "--pieces", "2", "--target-loss", "50%", "--channels", "int4"]
    return ["tune", "--text", str(text), *sizes, "--out", str(out)]


def serve_argv(out: Path) -> list[str]:
    model = ["--shape", "tiny", "--layers", "1", "--method", "LMInfinite(k=8, initial=2)"]
    return ["bench", "serve", *model, "--length", "16+2", "--memory", "100K", "--out", str(out)]


@pytest.mark.parametrize("command", ["eval", "tune", "bench serve"])
def test_two_processes_do_not_write_to_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out = tmp_path / "r.jsonl"
    argv = {"eval": eval_argv(out, limit=1), "tune": tune_argv(tmp_path, out), "bench serve": serve_argv(out)}[command]
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(out)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert main(argv) == 2 and out.read_bytes() == b""
        assert "r.jsonl: another run is writing to it" in capsys.readouterr().err
        other.communicate(b"\n")
    assert main(argv) == 0
    whole = out.read_bytes()
    assert whole.count(b"\n") > 2 and main(argv) == 0 and out.read_bytes() == whole


def test_tune_does_not_take_the_losses_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every matrix is scaled between two runs: the name of the folder is the same, its losses are not."""
    model = Path(shutil.copytree(BUILTIN, tmp_path / "model"))
    argv = [*tune_argv(tmp_path, tmp_path / "t.jsonl"), "--model", str(model), "--json"]
    for scale, status in ((1.0, 0), (1.3, 2)):
        (file,) = model.glob("*.safetensors")
        save_file({name: x * scale if x.ndim > 1 else x for name, x in load_file(file).items()}, file, {"format": "pt"})
        assert main(argv) == status
    assert "of another model or other data; choose another --out" in capsys.readouterr().err
