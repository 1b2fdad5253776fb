"""Make the bundled model from nothing: `python -m skimkv.models.train --text FOLDER --out FOLDER`.

A curriculum. First random tokens that come again, at short length: looking back appears there, all at once, and not in
text. Then random keys of several tokens, looked up over a gap: without them lines with words for keys are never learnt.
Then text, facts and records of growing length; each doubling costs little. About an hour and a half on two idle cores.
Ctrl-C keeps what was learnt, and the same command goes on from there.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from torch.utils.data import DataLoader, Dataset

from . import folder
from .data import KINDS, Batch, Maker, read
from .network import Network

CONFIG = Path(__file__).parent / "tiny" / "config.json"


class Stage(NamedTuple):
    """steps of `tokens` tokens in rows of `length`, at a learning rate that falls from lr to lr/10 in a cosine."""

    length: int
    steps: int
    lr: float
    mix: tuple[float, ...]  # the share of each of KINDS
    tokens: int = 8192

    @property
    def reads(self) -> bool:
        """Any text."""
        return any(self.mix[2:])


COPY, PAIRS = (1.0, 0.0, 0.0, 0.0, 0.0), (0.4, 0.6, 0.0, 0.0, 0.0)
FIRST, MIX, LONG = (0.1, 0.2, 0.2, 0.15, 0.35), (0.05, 0.12, 0.4, 0.18, 0.25), (0.04, 0.06, 0.6, 0.13, 0.17)
STAGES = (
    Stage(64, 300, 2e-3, COPY, 4096),
    Stage(64, 200, 2e-3, PAIRS, 4096),
    Stage(256, 160, 2e-3, PAIRS),
    Stage(256, 400, 2e-3, FIRST),
    Stage(512, 400, 1.5e-3, MIX),
    Stage(1024, 350, 1.5e-3, MIX),
    Stage(2048, 300, 1.3e-3, LONG),
    Stage(4096, 600, 1.2e-3, LONG),
)


class Rows(Dataset[Batch]):
    """The batches of a stage, each a function of the seed, the stage and its own number."""

    def __init__(self, maker: Maker, stage: Stage, name: str) -> None:
        self.maker, self.stage, self.name = maker, stage, name

    def __getitem__(self, i: int) -> Batch:
        rows = max(1, self.stage.tokens // self.stage.length)
        return self.maker.batch(f"{self.name} {i}", self.stage.length, rows, self.stage.mix)


def _deaf(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains


class Trainer:
    """A network, its optimizers, and where it stands in the stages."""

    def __init__(
        self, network: Network, maker: Maker, stages: Sequence[Stage], seed: int, device: torch.device
    ) -> None:
        self.network, self.maker, self.stages, self.seed, self.device = network.to(device), maker, stages, seed, device
        self.start(0)

    def start(self, stage: int) -> None:
        """Begin a stage, with new optimizers. Muon learns faster, but not to look back: there matrices have AdamW."""
        self.stage, self.step = stage, 0
        matrices = [p for name, p in self.network.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.network.named_parameters() if p.ndim != 2 or "embed" in name]
        first: tuple[torch.optim.Optimizer, float]
        if stage < len(self.stages) and not self.stages[stage].reads:
            first = torch.optim.AdamW(matrices, betas=(0.9, 0.98), weight_decay=0.05), 1.0
        else:
            first = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"), 3.0
        # with their learning rates by the stage's
        self.optimizers = [first, (torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), 1.0)]

    def batches(self, workers: int) -> Iterator[Batch]:
        """Of this stage, from this step."""
        rows = Rows(self.maker, self.stages[self.stage], f"{self.seed} {self.stage}")
        todo = range(self.step, self.stages[self.stage].steps)
        ahead: dict[str, Any] = {"prefetch_factor": 4, "worker_init_fn": _deaf} if workers else {}
        yield from DataLoader(rows, batch_size=None, sampler=todo, num_workers=workers, **ahead)

    def train(self, batch: Batch) -> tuple[float, list[tuple[int, int]]]:
        """One step -> (loss in nats, for each kind: how many answer tokens it had right, of how many)."""
        stage = self.stages[self.stage]
        rate = stage.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * self.step / stage.steps)))
        for optimizer, factor in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor * min(1, (self.step + 1) / 20)
        ids, weights = batch.ids.to(self.device), batch.weights[:, 1:].to(self.device)
        chosen = weights > 0
        wanted, weight = ids[:, 1:][chosen], weights[chosen]
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.network.logits(self.network(ids[:, :-1])[chosen])
        loss = (F.cross_entropy(logits.float(), wanted, reduction="none") * weight).sum() / weight.sum()
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.step} of stage {self.stage + 1}")
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        right = logits.detach().argmax(-1) == wanted
        kinds = batch.kinds.to(self.device)[:, None].expand_as(chosen)[chosen]
        mine = [(kinds == kind) & (weight >= 1) for kind in range(len(KINDS))]
        return loss.item(), [(int(right[m].sum()), int(m.sum())) for m in mine]

    def state(self) -> dict[str, Any]:
        return {
            "network": self.network.state_dict(), "optimizers": [o.state_dict() for o, _ in self.optimizers],
            "at": (self.stage, self.step), "seed": self.seed, "stages": [tuple(stage) for stage in self.stages],
        }  # fmt: skip

    def restore(self, path: Path) -> None:
        """Raises ValueError if the file is no state, or that of other stages or another seed."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            same = state["seed"] == self.seed and [Stage(*stage) for stage in state["stages"]] == list(self.stages)
            if same:
                self.network.load_state_dict(state["network"])
                self.start(state["at"][0])
                for (optimizer, _), held in zip(self.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(held)
                self.step = state["at"][1]
        except Exception as error:
            raise ValueError(f"{path}: not the state of this training ({str(error).splitlines()[0]})") from None
        if not same:
            raise ValueError(f"{path} is of other stages or another seed; name another --out, or remove it")


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
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    saved = time.monotonic()
    try:
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
            while trainer.stage < len(trainer.stages):
                stage, shown = trainer.stages[trainer.stage], Shown()
                title = f"{trainer.stage + 1}/{len(trainer.stages)}: {stage.length} tokens"
                going = bar.add_task(title, total=stage.steps, completed=trainer.step)
                for batch in trainer.batches(workers):
                    shown.add(*trainer.train(batch))
                    bar.update(going, completed=trainer.step, description=f"{title}, {shown}")
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
    from ..cli import carry_out

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(main)
    raise SystemExit(carry_out(app, "skimkv.models.train"))
