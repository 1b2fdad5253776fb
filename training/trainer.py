"""One step of training, and the state of a training: stages, their rows, optimizers, and what survives Ctrl-C."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .data import KINDS, Batch, RowMaker
from .network import Network


class Stage(NamedTuple):
    """A part of a training: `steps` steps of `tokens` tokens each, in rows of `length` tokens.

    The learning rate falls from lr to lr/10 in a cosine.
    """

    length: int
    steps: int
    lr: float
    shares: tuple[float, ...]  # how often each of KINDS is drawn
    tokens: int = 8192
    theta: float | None = None  # the base of rotary positions from this stage on; None: as it was

    @property
    def has_text(self) -> bool:
        """Whether rows are made of text too, and not only of the random tokens of copies and pairs."""
        return any(self.shares[2:])


def kind_shares(**shares: float) -> tuple[float, ...]:
    """Return the share of each of KINDS, 0 for those not named. Raises ValueError if there is no such kind."""
    if unknown := [kind for kind in shares if kind not in KINDS]:
        raise ValueError(f"rows of kind {', '.join(unknown)}: must be of {', '.join(KINDS)}")
    return tuple(shares.get(kind, 0.0) for kind in KINDS)


class StageBatches(Dataset[Batch]):
    """The batches of a stage. Each is a function of the seed, the stage and its own number."""

    def __init__(self, maker: RowMaker, stage: Stage, seed: str) -> None:
        self.maker, self.stage, self.seed = maker, stage, seed

    def __getitem__(self, i: int) -> Batch:
        rows = max(1, self.stage.tokens // self.stage.length)
        return self.maker.batch(f"{self.seed} {i}", self.stage.length, rows, self.stage.shares)


def _ignore_interrupt(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains


class Trainer:
    """A network, its optimizers, and how far it has come: `stage` is an index into `stages`, `step` counts in it."""

    def __init__(
        self, network: Network, maker: RowMaker, stages: Sequence[Stage], seed: int, device: torch.device
    ) -> None:
        self.network, self.maker, self.stages, self.seed, self.device = network.to(device), maker, stages, seed, device
        self.first_theta = network.theta
        self.start(0)

    def start(self, stage: int) -> None:
        """Begin a stage with new optimizers.

        Muon learns faster, but it does not learn to look back, so stages without text train matrices with AdamW.
        """
        self.stage, self.step = stage, 0
        bases = [part.theta for part in self.stages[: stage + 1] if part.theta is not None]
        self.network.theta = bases[-1] if bases else self.first_theta
        matrices = [p for name, p in self.network.named_parameters() if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in self.network.named_parameters() if p.ndim != 2 or "embed" in name]
        of_matrices: tuple[torch.optim.Optimizer, float]
        if stage < len(self.stages) and not self.stages[stage].has_text:
            of_matrices = torch.optim.AdamW(matrices, betas=(0.9, 0.98), weight_decay=0.05), 1.0
        else:
            of_matrices = torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"), 3.0
        of_others = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0), 1.0
        self.optimizers = [of_matrices, of_others]  # each with what the stage's learning rate is multiplied by

    def batches(self, workers: int) -> Iterator[Batch]:
        """Yield the batches of this stage from this step on, made by so many processes."""
        batches = StageBatches(self.maker, self.stages[self.stage], f"{self.seed} {self.stage}")
        steps = range(self.step, self.stages[self.stage].steps)
        ahead: dict[str, Any] = {"prefetch_factor": 4, "worker_init_fn": _ignore_interrupt} if workers else {}
        yield from DataLoader(batches, batch_size=None, sampler=steps, num_workers=workers, **ahead)

    def train(self, batch: Batch) -> tuple[float, list[tuple[int, int]]]:
        """Take one step; return the loss in nats, and for each of KINDS (right answer tokens, answer tokens).

        A short row may have had no room for an answer; a batch in which nothing weighs has a loss of 0.
        Raises FloatingPointError if the loss is not finite.
        """
        self._set_learning_rate()
        ids, weights = batch.ids.to(self.device), batch.weights[:, 1:].to(self.device)
        is_weighted = weights > 0
        expected, weight = ids[:, 1:][is_weighted], weights[is_weighted]
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            logits = self.network.logits(self.network(ids[:, :-1])[is_weighted])
        loss = (F.cross_entropy(logits.float(), expected, reduction="none") * weight).sum() / weight.sum().clamp_min(
            1.0
        )
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} at step {self.step} of stage {self.stage + 1}")
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        is_right = logits.detach().argmax(-1) == expected
        kinds = batch.kinds.to(self.device)[:, None].expand_as(is_weighted)[is_weighted]
        answers = [(kinds == kind) & (weight >= 1) for kind in range(len(KINDS))]
        return loss.item(), [(int(is_right[answer].sum()), int(answer.sum())) for answer in answers]

    def _set_learning_rate(self) -> None:
        """The cosine of this stage, after 20 steps that rise to it."""
        stage = self.stages[self.stage]
        rate = stage.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * self.step / stage.steps)))
        for optimizer, factor in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor * min(1, (self.step + 1) / 20)

    def state(self) -> dict[str, Any]:
        """Return all that `restore` needs to go on as if training had never stopped."""
        return {
            "network": self.network.state_dict(), "optimizers": [o.state_dict() for o, _ in self.optimizers],
            "at": (self.stage, self.step), "seed": self.seed, "stages": [tuple(stage) for stage in self.stages],
        }  # fmt: skip

    def restore(self, path: Path) -> None:
        """Go on from a saved state. Stages that have not begun may have changed since.

        Raises ValueError if the file is no state, or if its seed or a stage that has begun is another.
        """
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            begun = state["at"][0] + (state["at"][1] > 0)
            stages = [Stage(*stage) for stage in state["stages"]]
            is_same = state["seed"] == self.seed and stages[:begun] == list(self.stages[:begun])
            if is_same:
                self.network.load_state_dict(state["network"])
                self.start(state["at"][0])
                for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
                    optimizer.load_state_dict(saved)
                self.step = state["at"][1]
        except Exception as error:
            raise ValueError(f"{path}: not the state of this training ({str(error).splitlines()[0]})") from None
        if not is_same:
            raise ValueError(f"{path} is of other stages or another seed; name another --out, or remove it")
