"""Make the bundled model from nothing: `python -m skimkv.models.train --text FOLDER --out FOLDER`.

A curriculum. First random tokens that come again, at short length: looking back appears there, all at once, and not in
text. Then random keys of several tokens, looked up over a gap: without them lines with words for keys were not learnt
in two hours. Then text, facts and records of growing length. About two hours on 2 cores.
Ctrl-C keeps what was learnt, and the same command goes on from there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import folder
from .data import KINDS, Maker, read
from .network import Network
from .trainer import Stage, Trainer, mix

CONFIG = Path(__file__).parent / "tiny" / "config.json"

COPY, PAIRS = mix(copies=1.0), mix(copies=0.4, pairs=0.6)
FIRST = mix(copies=0.1, pairs=0.2, passages=0.25, facts=0.1, records=0.35)
MIX = mix(copies=0.05, pairs=0.1, passages=0.45, facts=0.12, records=0.28)
LAST = mix(copies=0.05, passages=0.42, facts=0.1, records=0.43)
STAGES = (
    Stage(64, 300, 2e-3, COPY, 4096),
    Stage(64, 200, 2e-3, PAIRS, 4096),
    Stage(256, 160, 2e-3, PAIRS),
    Stage(256, 500, 2e-3, FIRST),
    Stage(512, 500, 1.5e-3, MIX),
    Stage(1024, 400, 1.5e-3, MIX),
    Stage(2048, 350, 1.3e-3, MIX),
    Stage(4096, 600, 1.2e-3, MIX),
    Stage(4096, 600, 1e-3, LAST),
)


def stage_of(text: str) -> Stage:
    """LENGTH:STEPS:LR, on the mixture. Raises ValueError."""
    try:
        length, steps, lr = text.split(":")
        stage = Stage(int(length), int(steps), float(lr), MIX)
    except ValueError:
        raise ValueError(f"--stage {text!r} must be LENGTH:STEPS:LR, for example 512:400:1e-3") from None
    if stage.length < 64 or stage.steps < 1 or not 0 < stage.lr < 1:
        raise ValueError(f"--stage {text!r}: need LENGTH >= 64, STEPS >= 1 and 0 < LR < 1")
    return stage


def run(trainer: Trainer, save: Callable[[], None], workers: int = 1, every: float = 240.0) -> bool:
    """All that is left to do, saved every so many seconds; False if Ctrl-C ended it, between two steps."""
    stopped: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    saved = time.monotonic()
    try:
        with Progress(*columns, TextColumn("{task.fields[shown]}"), console=Console(stderr=True)) as bar:
            while trainer.stage < len(trainer.stages):
                stage, shown = trainer.stages[trainer.stage], Shown()
                title = f"{trainer.stage + 1}/{len(trainer.stages)}: {stage.length} tokens"
                going = bar.add_task(title, total=stage.steps, completed=trainer.step, shown=shown)
                for batch in trainer.batches(workers):
                    shown.add(*trainer.train(batch))
                    bar.update(going, completed=trainer.step, shown=shown)
                    if stopped:
                        return False
                    if time.monotonic() - saved > every:
                        save()
                        saved = time.monotonic()
                trainer.start(trainer.stage + 1)
        return True
    finally:
        save()
        signal.signal(signal.SIGINT, before)


class Shown:
    """Running means over about twenty steps: the loss, and the share of answer tokens that were right."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, loss: float, right: Sequence[tuple[int, int]]) -> None:
        for name, (hits, of) in zip(("loss", *KINDS), [(loss, 1), *right], strict=True):
            if of:
                old = self.sums.get(name, (0.0, 0.0))
                self.sums[name] = old[0] * 0.95 + hits, old[1] * 0.95 + of

    def __str__(self) -> str:
        return ", ".join(f"{name} {hits / of:.3f}" for name, (hits, of) in self.sums.items())


def main(
    text: Annotated[Path, typer.Option(help="A text file, or a folder of *.txt; a tenth of each is never read.")],
    out: Annotated[Path, typer.Option(help="Folder of the model, and of the state from which training goes on.")],
    init: Annotated[
        Path | None, typer.Option(help="Folder of a model to start from; then only stages of text.")
    ] = None,
    config: Annotated[Path, typer.Option(help="config.json of a Llama with tied embeddings.")] = CONFIG,
    stage: Annotated[list[str] | None, typer.Option(help="LENGTH:STEPS:LR instead of the curriculum; repeat.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and the rows.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; else a GPU if there is one.")] = "",
    threads: Annotated[int, typer.Option(min=1, help="Of the CPU.")] = os.cpu_count() or 1,
) -> None:
    """Train the bundled model. Ctrl-C and run again to go on."""
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"training needs torch 2.9 or later for torch.optim.Muon; this is {torch.__version__}")
    stages = [stage_of(each) for each in stage or ()] or [each for each in STAGES if init is None or each.reads]
    shape = folder.config(config if init is None else init / "config.json")
    longest = max(each.length for each in stages)
    if longest > shape.max_position_embeddings:
        raise ValueError(f"a stage of {longest} tokens: the model has {shape.max_position_embeddings} positions")
    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place.split(":")[0] not in ("cpu", "cuda") or (place != "cpu" and not torch.cuda.is_available()):
        raise ValueError(f"--device {device}: must be cpu, or cuda where PyTorch sees a CUDA device")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # rows are made in a process of their own
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    texts = read(text)
    made = Network(shape)
    if init is not None:
        folder.fill(made, init)
    state = out / "state.pt"
    tokenizer = folder.tokenizer(texts, shape.vocab_size, out if state.exists() else init)
    trainer = Trainer(made, Maker(texts, tokenizer), stages, seed, torch.device(place))
    out.mkdir(parents=True, exist_ok=True)
    if state.exists():
        trainer.restore(state)

    def save() -> None:
        torch.save(trainer.state(), out / "state.new")
        os.replace(out / "state.new", state)
        folder.write(made, shape, tokenizer, out)

    done = run(trainer, save)
    at = "done" if done else f"stopped at step {trainer.step} of stage {trainer.stage + 1}; run again to go on"
    print(f"{at}: {out}")


if __name__ == "__main__":
    from ..cli.errors import carry_out
    from ..cli.help import App

    app = App()
    app.command()(main)
    raise SystemExit(carry_out(app, "skimkv.models.train"))
