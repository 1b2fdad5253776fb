"""Training the bundled model: the rows it learns from, its steps, and going on after an interruption."""

from __future__ import annotations

import json
import random
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from typer import Typer

import skimkv
from skimkv.cli.errors import carry_out
from skimkv.eval.tasks.record import WORDS
from skimkv.hf.load import BUILTIN
from skimkv.models import folder, train
from skimkv.models.data import KINDS, Maker, read
from skimkv.models.network import BACK, Network, _turn
from skimkv.models.trainer import Stage, Trainer, mix

SHAPE = {
    **json.loads((BUILTIN / "config.json").read_text()), "hidden_size": 32, "head_dim": 16, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300,
}  # fmt: skip
EVERY = (1.0,) * len(KINDS)
STAGES = [Stage(64, 3, 1e-3, EVERY, 256), Stage(96, 3, 1e-3, EVERY, 192)]


@pytest.fixture(scope="module")
def text() -> str:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8))) for _ in range(400)]
    return " ".join(rng.choice(words) + rng.choice(("", "", "", ",", ".")) for _ in range(6000))


@pytest.fixture(scope="module")
def maker(text: str) -> Maker:
    return Maker([text], folder.tokenizer([text], 300, None))


@pytest.fixture
def corner(tmp_path: Path, text: str) -> Path:
    """A folder with a text and the shape of a micro model."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def trainer(maker: Maker, seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    return Trainer(Network(SimpleNamespace(**SHAPE)), maker, STAGES, seed, torch.device("cpu"))


def command(corner: Path, *more: str) -> int:
    app = Typer(pretty_exceptions_enable=False)
    app.command()(train.main)
    given = {"--text": corner / "text", "--out": corner / "out", "--config": corner / "config.json", "--threads": 1}
    return carry_out(app, "train", [*(str(x) for pair in given.items() for x in pair), *more])


def marked(maker: Maker, kind: str, seed: int, length: int = 1024) -> tuple[str, list[str]]:
    """A row in text, and its answers."""
    row = getattr(maker, kind)(random.Random(seed), length)
    answers, last = [], False
    for i, weight in zip(row.ids, row.weights, strict=True):
        if weight >= 2 and not last:
            answers.append([])
        if weight >= 2:
            answers[-1].append(i)
        last = weight >= 2
    return maker.tokenizer.decode(row.ids), [maker.tokenizer.decode(answer) for answer in answers]


@pytest.mark.parametrize("kind", KINDS[2:])
def test_an_answer_stands_in_what_was_read(maker: Maker, kind: str) -> None:
    found = 0
    for seed in range(20):
        text, answers = marked(maker, kind, seed)
        for answer in answers[:-1]:  # the last may be cut
            key = answer.strip().rstrip(".>\n").rsplit("<", 1)[-1]
            assert text.count(key) >= 2
            found += 1
    assert found > 12


def test_in_some_passages_a_name_tells_nothing(maker: Maker) -> None:
    after: dict[str, set[str]] = {}
    for seed in range(20):
        text = maker.tokenizer.decode(maker.passages(random.Random(seed), 1024).ids)
        for name, line in re.findall(r"\n\n([A-Z' ]+):\n(.{8})", text):
            after.setdefault(f"{seed} {name}", set()).add(line)
    assert len(after) > 10
    assert sum(len(lines) > 2 for lines in after.values()) > len(after) / 2


def test_what_follows_a_name_weighs_most(maker: Maker) -> None:
    found = 0
    for seed in range(20):
        row = maker.passages(random.Random(seed), 1024)
        most = max(row.weights)
        if most > 2 * min(weight for weight in row.weights if weight >= 2):  # a row with names
            first = row.weights.index(most)
            assert ":\n" in maker.tokenizer.decode(row.ids[first - 4 : first + 1])
            found += 1
    assert found > 3


def test_a_number_stands_nearer_or_farther_from_its_key(maker: Maker) -> None:
    far = set()
    for seed in range(30):
        text = maker.tokenizer.decode(maker.records(random.Random(seed), 1024).ids)
        told = re.findall(r"line (\S+): (\w*) is <(\d+)>", text)
        keys = {key for key, *_ in told}
        assert len({(key, number) for key, _, number in told}) == len(keys)
        far |= {label for _, label, _ in told}
    assert len(far) > 5
    assert "REGISTER_CONTENT" in far


def test_copies_are_of_what_came_before(maker: Maker) -> None:
    for seed in range(20):
        row = maker.copies(random.Random(seed), 256)
        for i, weight in enumerate(row.weights[:256]):
            if weight:
                assert row.ids[i] in row.ids[:i]


def test_short_rows_are_copied_whole(maker: Maker) -> None:
    row = maker.copies(random.Random(0), 64)
    n = row.weights.index(1.0) - 1
    assert row.ids[1 + n : 64] == row.ids[1 : 64 - n]
    assert set(row.weights[1 + n : 64]) == {1.0}


@pytest.mark.parametrize("length", [128, 512])
def test_a_random_key_tells_its_value(maker: Maker, length: int) -> None:
    """An answer followed the tokens before it earlier too, and seldom did another: only where a key is in a value."""
    found, sure, by_one = 0, 0, 0
    for seed in range(40):
        row = maker.pairs(random.Random(seed), length)
        starts = [i for i in range(1, length - 5) if row.weights[i] and not row.weights[i - 1]]
        assert starts
        for i in starts:
            w = row.weights[i:].index(0.0) if 0.0 in row.weights[i:] else len(row.weights) - i
            answer = row.ids[i : i + w]
            after = [
                [row.ids[j : j + w] for j in range(m, i) if row.ids[j - m : j] == row.ids[i - m : i]]
                for m in range(1, 8 if length == 128 else 22)
            ]
            assert answer in after[0]
            told = [bool(each) and all(one == answer for one in each) for each in after]
            found, sure, by_one = found + 1, sure + any(told), by_one + told[0]
    assert sure > 0.98 * found
    assert by_one < 0.5 * found


def test_heads_look_back_from_the_start() -> None:
    torch.manual_seed(0)
    network = Network(folder.config(BUILTIN / "config.json"))
    seen: list[list[torch.Tensor]] = [[] for _ in network.layers]
    for layer, made in zip(network.layers, seen, strict=True):
        for name in ("q_proj", "k_proj"):
            layer.self_attn[name].register_forward_hook(
                lambda module, inputs, out, made=made: made.append(out.unflatten(-1, (-1, 64)))
            )
    network(torch.randint(2, 2048, (2, 64)))
    angle = torch.arange(64)[:, None, None] * network.theta ** (-torch.arange(32) / 32)
    later = torch.ones(64, 64, dtype=torch.bool).triu(1)
    assert BACK == ((1, 2, 3, 4), (4, 8, 12, 16))
    for made, backs, least in zip(seen, BACK, (0.8, 0.3), strict=False):
        q, k = (_turn(x, angle.cos(), angle.sin()) for x in made)  # (2,64,4,64), (2,64,2,64)
        for h, back in enumerate(backs):
            weights = (q[:, :, h] @ k[:, :, h // 2].transpose(1, 2) / 8).masked_fill(later, -torch.inf).softmax(-1)
            assert weights.diagonal(-back, 1, 2).mean() > least, (h, back)


def test_batches_are_functions_of_their_seed(maker: Maker) -> None:
    one, same, other = (maker.batch(seed, 128, 4, EVERY) for seed in ("a", "a", "b"))
    assert torch.equal(one.ids, same.ids)
    assert torch.equal(one.weights, same.weights)
    assert not torch.equal(one.ids, other.ids)
    assert one.ids.shape == one.weights.shape == (4, 128)
    assert (one.ids[:, 0] == 0).all()
    assert (one.weights[:, 0] == 0).all()


def test_no_row_has_a_key_of_the_tasks(text: str) -> None:
    texts = [text + " " + " ".join(WORDS)]
    assert not set(WORDS) & set(Maker(texts, folder.tokenizer(texts, 300, None)).words)


def test_the_end_of_a_text_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 27_000 + "b" * 3000)
    assert read(tmp_path) == ["a" * 27_000]


def test_the_network_is_the_llama_that_is_written(tmp_path: Path, maker: Maker) -> None:
    torch.manual_seed(0)
    network = Network(SimpleNamespace(**SHAPE))
    folder.write(network, SimpleNamespace(**SHAPE), maker.tokenizer, tmp_path)
    model, words = skimkv.load(tmp_path, dtype=torch.float32)
    ids = torch.tensor([words("some words, and 12 more").input_ids])
    with torch.no_grad():
        folder.fill(network, tmp_path)  # both in the rounding of float16
        torch.testing.assert_close(network.logits(network(ids)), model(ids).logits, atol=1e-5, rtol=1e-4)


def test_the_bundled_model_can_be_trained_on() -> None:
    network = Network(folder.config(BUILTIN / "config.json"))
    folder.fill(network, BUILTIN)
    words = Tokenizer.from_file(str(BUILTIN / "tokenizer.json"))
    ids = torch.tensor([[0, *words.encode("torpid-kid: 24169\nlank-oak: 77310\ntorpid-kid: ").ids]])
    with torch.no_grad():
        assert words.decode([int(network.logits(network(ids))[0, -1].argmax())]) == "2"


def test_the_loss_falls_on_one_batch(maker: Maker) -> None:
    made = trainer(maker)
    batch = maker.batch("a", 64, 4, EVERY)
    made.stages = [Stage(64, 60, 5e-3, EVERY)]
    losses = [made.train(batch)[0] for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_going_on_is_as_never_having_stopped(tmp_path: Path, maker: Maker) -> None:
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


def test_random_tokens_have_an_optimizer_of_their_own(tmp_path: Path, maker: Maker) -> None:
    stages = [Stage(64, 2, 1e-3, mix, 256) for mix in (train.COPY, train.PAIRS, train.FIRST)]

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


def test_a_state_of_other_stages_or_no_state(tmp_path: Path, maker: Maker) -> None:
    torch.save(trainer(maker).state(), tmp_path / "state.pt")
    with pytest.raises(ValueError, match="other stages or another seed"):
        trainer(maker, seed=1).restore(tmp_path / "state.pt")
    (tmp_path / "state.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not the state of this training"):
        trainer(maker).restore(tmp_path / "state.pt")


def test_the_command_from_nothing_and_from_a_model(corner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(corner, "--stage", "64:2:1e-3") == 0
    assert "done" in capsys.readouterr().out
    model, words = skimkv.load(corner / "out")
    assert model.config.hidden_size == 32
    assert words("some 12").input_ids
    assert command(corner, "--stage", "64:2:1e-3") == 0  # nothing is left to do
    assert command(corner, "--stage", "64:1:1e-3", "--out", str(corner / "more"), "--init", str(corner / "out")) == 0
    assert (corner / "more" / "tokenizer.json").read_text() == (corner / "out" / "tokenizer.json").read_text()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--stage", "64:2"], "--stage '64:2' must be LENGTH:STEPS:LR"),
        (["--stage", "8:2:1e-3"], "need LENGTH >= 64"),
        (["--stage", "64:0:1e-3"], "STEPS >= 1"),
        (["--stage", "64:1:nan"], "0 < LR < 1"),
        (["--stage", "8192:1:1e-3"], "a stage of 8192 tokens: the model has 4096 positions"),
        (["--device", "tpu"], "--device tpu: must be cpu, or cuda"),
        (["--text", "no-such-folder"], "--text no-such-folder: there is no such file"),
        (["--config", "no-such-file"], "no-such-file: no config.json can be read there"),
        (["--init", "no-such-folder"], "no config.json can be read there"),
    ],
)
def test_bad_arguments_are_one_line(
    corner: Path, capsys: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert command(corner, *argv) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_shape_that_is_not_trained(corner: Path) -> None:
    for name, value in (("model_type", "gpt2"), ("hidden_size", 0), ("vocab_size", 100), ("rope_parameters", None)):
        (corner / "config.json").write_text(json.dumps({**SHAPE, name: value}))
        with pytest.raises(ValueError, match=name):
            folder.config(corner / "config.json")
    (corner / "text" / "a.txt").write_text("short")
    with pytest.raises(ValueError, match="need at least 20000"):
        read(corner / "text")


def test_a_share_of_no_kind() -> None:
    assert mix(records=0.25, copies=0.5) == (0.5, 0.0, 0.0, 0.0, 0.25)
    with pytest.raises(ValueError, match="rows of kind prose: must be of copies, pairs"):
        mix(prose=1.0)
