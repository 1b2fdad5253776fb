"""Make the bundled model from nothing: `python -m training.train --text FOLDER --out FOLDER`.

Training follows a curriculum. First come short rows of random tokens that come again: from these, and not from text, a
network learns to look back, all at once. Then come random keys of several tokens, looked up over a gap: without them,
lines with words for keys were not learnt in two hours. Then come text, facts, records and RULER's tasks of growing
length, to 8192 tokens. The steps are planned for about three hours on 2 cores. Ctrl-C keeps what was learnt, and the
same command goes on from there. `python -m training.fetch_text` collects the text.
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
from rich.progress import TextColumn

from skimkv.cli.errors import carry_out
from skimkv.cli.help import App
from skimkv.cli.options import MODEL_OPTIONS, OUTPUT_OPTIONS, resolve_device, seed_option
from skimkv.cli.output import progress_bar
from skimkv.hf.load import BUILTIN

from . import folder
from .data import KINDS, RowMaker, read_texts
from .network import Network
from .trainer import Stage, Trainer, kind_shares

CONFIG = BUILTIN / "config.json"

COPIES, PAIRS = kind_shares(copies=1.0), kind_shares(copies=0.4, pairs=0.6)
FIRST_TEXT = kind_shares(copies=0.1, pairs=0.18, passages=0.2, facts=0.08, records=0.26, prose=0.04, needles=0.14)
TEXT = kind_shares(
    copies=0.04,
    pairs=0.08,
    passages=0.25,
    facts=0.08,
    records=0.2,
    prose=0.09,
    needles=0.14,
    variables=0.06,
    counts=0.06,
)
LAST_TEXT = kind_shares(
    copies=0.02, passages=0.24, facts=0.08, records=0.2, prose=0.13, needles=0.18, variables=0.08, counts=0.07
)
LOOKUPS = kind_shares(
    passages=0.22, facts=0.04, records=0.2, prose=0.06, needles=0.2, uuids=0.2, variables=0.04, counts=0.04
)
STAGES = (
    Stage(64, 300, 2e-3, COPIES, 4096),
    Stage(64, 200, 2e-3, PAIRS, 4096),
    Stage(256, 160, 2e-3, PAIRS),
    Stage(256, 500, 2e-3, FIRST_TEXT),
    Stage(512, 600, 1.5e-3, TEXT),
    Stage(1024, 600, 1.5e-3, TEXT),
    Stage(2048, 450, 1.4e-3, TEXT),
    Stage(4096, 600, 1.3e-3, TEXT),
    Stage(8192, 480, 1.2e-3, LAST_TEXT, theta=2e6),
    Stage(8192, 800, 1.2e-3, LOOKUPS),
)
TRAINING_OPTIONS = "Training options"


def parse_stage(text: str) -> Stage:
    """Parse LENGTH:STEPS:LR, a stage on the mixture TEXT. Raises ValueError if a number is missing or out of range."""
    try:
        length, steps, lr = text.split(":")
        stage = Stage(int(length), int(steps), float(lr), TEXT)
    except ValueError:
        raise ValueError(f"--stage {text!r} must be LENGTH:STEPS:LR, for example 512:400:1e-3") from None
    if stage.length < 64 or stage.steps < 1 or not 0 < stage.lr < 1:
        raise ValueError(f"--stage {text!r}: need LENGTH >= 64, STEPS >= 1 and 0 < LR < 1")
    return stage


def run(trainer: Trainer, save: Callable[[], None], workers: int = 1, save_every: float = 120.0) -> bool:
    """Train what is left of all stages; return False if Ctrl-C ended it, which it does between two steps.

    `save` is called every `save_every` seconds and at the end.
    """
    interrupts: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    saved_at = time.monotonic()
    try:
        with progress_bar(TextColumn("{task.fields[means]}"), keep=True) as bar:
            while trainer.stage < len(trainer.stages):
                stage, means = trainer.stages[trainer.stage], RunningMeans()
                title = f"{trainer.stage + 1}/{len(trainer.stages)}: {stage.length} tokens"
                task = bar.add_task(title, total=stage.steps, completed=trainer.step, means=means)
                for batch in trainer.batches(workers):
                    means.add(*trainer.train(batch))
                    bar.update(task, completed=trainer.step, means=means)
                    if interrupts:
                        return False
                    if trainer.step == stage.steps or time.monotonic() - saved_at > save_every:
                        save()
                        saved_at = time.monotonic()
                        bar.print(f"{time.strftime('%H:%M:%S')} {title}, step {trainer.step}: {means}")
                trainer.start(trainer.stage + 1)
        return True
    finally:
        save()
        signal.signal(signal.SIGINT, handler)


class RunningMeans:
    """Means over about the last twenty steps: the loss, and for each kind the share of answer tokens that were right.

    str() of it is what the progress bar shows.
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, loss: float, right: Sequence[tuple[int, int]]) -> None:
        """Add one step: its loss, and for each of KINDS (right answer tokens, answer tokens)."""
        for name, (value, count) in zip(("loss", *KINDS), [(loss, 1), *right], strict=True):
            if count:
                values, counts = self.sums.get(name, (0.0, 0.0))
                self.sums[name] = values * 0.95 + value, counts * 0.95 + count

    def __str__(self) -> str:
        return ", ".join(f"{name} {value / count:.3f}" for name, (value, count) in self.sums.items())


def main(
    text: Annotated[
        Path,
        typer.Option(metavar="PATH", help="A text file, or a folder of *.txt. The last tenth of each is not read."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="The folder of the model, and of the state from which training goes on.",
            rich_help_panel=OUTPUT_OPTIONS,
        ),
    ],
    init: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A model to start from. The stages of random tokens are then left out.",
            rich_help_panel=MODEL_OPTIONS,
        ),
    ] = None,
    config: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The config.json of a Llama with tied embeddings.",
            show_default="the bundled model's",
            rich_help_panel=MODEL_OPTIONS,
        ),
    ] = CONFIG,
    stage: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LENGTH:STEPS:LR",
            help="A stage of text instead of the curriculum. May be given several times.",
            rich_help_panel=TRAINING_OPTIONS,
        ),
    ] = None,
    seed: Annotated[int, seed_option("Random seed of the weights and the rows.", TRAINING_OPTIONS)] = 0,
    device: Annotated[
        str,
        typer.Option(
            metavar="DEVICE",
            help="cpu or cuda.",
            show_default="cuda if there is a GPU, otherwise cpu",
            rich_help_panel=TRAINING_OPTIONS,
        ),
    ] = "",
    threads: Annotated[
        int,
        typer.Option(
            min=1, help="Threads on the CPU.", show_default="one for each core", rich_help_panel=TRAINING_OPTIONS
        ),
    ] = os.cpu_count() or 1,
) -> None:
    """Train the bundled model, or a model of your own shape, on text.

    Training is planned for about three hours on 2 cores. Press Ctrl-C to stop, and run the same command again to go on.

    Example:

        python -m training.train --text books --out my-model
    """
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"training needs torch 2.9 or later for torch.optim.Muon; this is {torch.__version__}")
    stages = [parse_stage(spec) for spec in stage or ()] or [part for part in STAGES if init is None or part.has_text]
    shape = folder.read_config(config if init is None else init / "config.json")
    longest = max(part.length for part in stages)
    if longest > shape.max_position_embeddings:
        raise ValueError(f"a stage of {longest} tokens: the model has {shape.max_position_embeddings} positions")
    place = _device(device)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # rows are made in a process of their own
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    texts = read_texts(text)
    network = Network(shape)
    if init is not None:
        folder.load_weights(network, init)
    state = out / "state.pt"
    known = out if state.exists() else init  # a folder with a tokenizer
    tokenizer = (
        folder.train_tokenizer(texts, shape.vocab_size)
        if known is None
        else folder.load_tokenizer(known, shape.vocab_size)
    )
    trainer = Trainer(network, RowMaker(texts, tokenizer), stages, seed, place)
    out.mkdir(parents=True, exist_ok=True)
    if state.exists():
        trainer.restore(state)

    def save() -> None:
        """Keep the state of the training, and the model as it is now."""
        folder.replace_file(state, lambda path: torch.save(trainer.state(), path))
        shape.rope_parameters["rope_theta"] = network.theta
        folder.save_model(network, shape, tokenizer, out)

    finished = run(trainer, save)
    stopped = f"stopped at step {trainer.step} of stage {trainer.stage + 1}; run again to go on"
    print(f"{'done' if finished else stopped}: {out}")


def _device(name: str) -> torch.device:
    """The device of that name; without a name, a GPU if there is one. Raises ValueError."""
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("mps"):
        raise ValueError(f"--device {name}: training runs on cpu or cuda")
    return resolve_device(name)


if __name__ == "__main__":
    app = App()
    app.command()(main)
    raise SystemExit(carry_out(lambda: app, "training.train"))
