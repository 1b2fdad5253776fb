"""One step of training, and where it stands: stages, their rows, optimizers, and what survives an interruption."""

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

from .data import KINDS, Batch, Maker
from .network import Network


class Stage(NamedTuple):
    """steps of `tokens` tokens in rows of `length`, at a learning rate that falls from lr to lr/10 in a cosine."""

    length: int
    steps: int
    lr: float
    mix: tuple[float, ...]  # the share of each of KINDS
    tokens: int = 8192

    @property
    def reads(self) -> bool:
        """Any text: more than the random tokens of copies and pairs."""
        return any(self.mix[2:])


def mix(**shares: float) -> tuple[float, ...]:
    """The share of each of KINDS, by name; of the others none. Raises ValueError."""
    if not shares.keys() <= set(KINDS):
        raise ValueError(f"rows of kind {', '.join(shares.keys() - set(KINDS))}: must be of {', '.join(KINDS)}")
    return tuple(shares.get(kind, 0.0) for kind in KINDS)


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
