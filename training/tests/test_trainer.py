"""Training steps and stages, and going on after an interruption."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from training import train
from training.data import RowMaker
from training.network import Network
from training.tests.micro_model import ALL_KINDS, SHAPE
from training.trainer import Stage, Trainer, kind_shares

STAGES = [Stage(64, 3, 1e-3, ALL_KINDS, 256), Stage(96, 3, 1e-3, ALL_KINDS, 192)]


def trainer(maker: RowMaker, seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    return Trainer(Network(SimpleNamespace(**SHAPE)), maker, STAGES, seed, torch.device("cpu"))


@pytest.mark.slow
def test_the_loss_falls_on_one_batch(maker: RowMaker) -> None:
    made = trainer(maker)
    batch = maker.batch("a", 64, 4, ALL_KINDS)
    made.stages = [Stage(64, 100, 5e-3, ALL_KINDS)]
    losses = [made.train(batch)[0] for _ in range(100)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_batch_in_which_nothing_weighs_has_no_loss(maker: RowMaker) -> None:
    made = trainer(maker)
    batch = maker.batch("a", 64, 4, ALL_KINDS)
    loss, right = made.train(batch._replace(weights=torch.zeros_like(batch.weights)))
    assert loss == 0
    assert set(right) == {(0, 0)}


def test_going_on_is_as_never_having_stopped(tmp_path: Path, maker: RowMaker) -> None:
    whole = trainer(maker)
    assert train.run(whole, lambda: None, workers=0)
    for stop in (1, 3, 4):
        first, path = trainer(maker), tmp_path / f"{stop}.pt"
        steps, step = 0, first.train

        def counted(batch, first=first, stop=stop, step=step):
            nonlocal steps
            steps += 1
            if steps == stop:
                signal.raise_signal(signal.SIGINT)
            return step(batch)

        first.train = counted
        assert not train.run(first, lambda first=first, path=path: torch.save(first.state(), path), workers=0)
        assert first.stage * 3 + first.step == stop
        again = trainer(maker, seed=0)
        again.restore(path)
        assert train.run(again, lambda: None, workers=0)
        for name, p in whole.network.state_dict().items():
            assert torch.equal(p, again.network.state_dict()[name]), name


def test_random_tokens_have_an_optimizer_of_their_own(tmp_path: Path, maker: RowMaker) -> None:
    stages = [Stage(64, 2, 1e-3, shares, 256) for shares in (train.COPIES, train.PAIRS, train.FIRST_TEXT)]

    def new() -> Trainer:
        return Trainer(Network(SimpleNamespace(**SHAPE)), maker, stages, 0, torch.device("cpu"))

    one = new()
    for stage, kind in enumerate((torch.optim.AdamW, torch.optim.AdamW, torch.optim.Muon)):
        one.start(stage)
        assert type(one.optimizers[0][0]) is kind
        one.train(next(iter(one.batches(0))))
        torch.save(one.state(), tmp_path / "state.pt")
        two = new()
        two.restore(tmp_path / "state.pt")
        assert (two.stage, two.step, type(two.optimizers[0][0])) == (stage, 1, kind)


def test_a_state_of_other_stages_or_no_state(tmp_path: Path, maker: RowMaker) -> None:
    torch.save(trainer(maker).state(), tmp_path / "state.pt")
    with pytest.raises(ValueError, match="other stages or another seed"):
        trainer(maker, seed=1).restore(tmp_path / "state.pt")
    (tmp_path / "state.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not the state of this training"):
        trainer(maker).restore(tmp_path / "state.pt")


def test_a_share_of_no_kind() -> None:
    assert kind_shares(records=0.25, copies=0.5) == (0.5, 0.0, 0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="rows of kind essays: must be of copies, pairs"):
        kind_shares(essays=1.0)


def test_stages_that_have_not_begun_may_change(tmp_path: Path, maker: RowMaker) -> None:
    begun = trainer(maker)
    begun.train(maker.batch("a", 64, 4, ALL_KINDS))
    torch.save(begun.state(), tmp_path / "state.pt")
    other = Stage(128, 5, 1e-3, ALL_KINDS, 128)
    longer = trainer(maker)
    longer.stages = [STAGES[0], other, other]
    longer.restore(tmp_path / "state.pt")
    assert longer.stage == 0
    changed = trainer(maker)
    changed.stages = [other, STAGES[1]]
    with pytest.raises(ValueError, match="other stages or another seed"):
        changed.restore(tmp_path / "state.pt")


def test_a_finished_training_goes_on_with_a_new_stage(tmp_path: Path, maker: RowMaker) -> None:
    finished = trainer(maker)
    finished.start(len(STAGES))
    torch.save(finished.state(), tmp_path / "state.pt")
    longer = trainer(maker)
    longer.stages = [*STAGES, Stage(128, 5, 1e-3, ALL_KINDS, 128)]
    longer.restore(tmp_path / "state.pt")
    assert (longer.stage, longer.step) == (len(STAGES), 0)


def test_a_stage_raises_the_base_of_the_positions_and_those_after_it_keep_it(maker: RowMaker) -> None:
    made = trainer(maker)
    first = made.network.theta
    made.stages = [STAGES[0], STAGES[1]._replace(theta=4e6), STAGES[1]]
    bases = []
    for stage in range(4):
        made.start(stage)
        bases.append(made.network.theta)
    assert bases == [first, 4e6, 4e6, 4e6]
