"""benchmarks/divergence.py: grids, settings chosen on one half and reported on the other, and a small run."""

from __future__ import annotations

import json
import random

import pytest
import torch

import skimkv
from benchmarks import divergence as script
from benchmarks import divergence_texts as texts
from skimkv.eval.shared_prompt import record_prompt
from skimkv.eval.traffic import cache_traffic, step_traffic
from skimkv.methods import Dense
from support.tiny_models import family, prompt


def test_grids():
    found = list(script.settings("SparQ(r=[4, 8], k=[16, 32], channels='int4')"))
    assert found == [f"SparQ(r={r}, k={k}, channels='int4')" for r in (4, 8) for k in (16, 32)]
    assert {script.family(method) for method in found} == {"SparQ(channels='int4')"}
    assert script.family("RocketKV(k=1024, top=96)") == "RocketKV", "top is a budget, as k is"
    assert script.family("Dense()") == "Dense" and list(script.settings("Dense()")) == ["Dense()"]
    assert script.BASELINE in {script.family(method) for grid in script.GRIDS for method in script.settings(grid)}
    with pytest.raises(ValueError, match="unknown method"):
        list(script.settings("Spark(r=[1, 2])"))


def records(method, share, scores):
    """A record for each document: its mean divergence, and twice that in every other token."""
    return [
        {"method": method, "score": kl, "kl": [2 * kl, 0.0], "agrees": "01", "bytes": round(1e6 * share),
         "dense_bytes": 10**6, "seed": 0, "id": str(i)} for i, kl in enumerate(scores)
    ]  # fmt: skip


def test_settings_are_chosen_on_one_half_and_reported_on_the_other():
    """Documents 0, 2, ... choose; r=2 is best there at 5%, and r=8 is a bad buy: more bytes and more divergence."""
    cheap = records("SparQ(r=1, k=8)", 0.02, [0.4, 0.8] * 5)
    middle = records("SparQ(r=2, k=8)", 0.04, [0.1, 0.2] * 5)
    wrong = records("SparQ(r=8, k=8)", 0.045, [0.3, 0.01] * 5)
    exact = records("H2O(k=9)", 0.05, [0.1, 0.3] * 5)
    lines = script.families([*cheap, *middle, *wrong, *exact])
    sparq, other = lines
    assert [sparq.at_budget(share) for share in (0.01, 0.02, 0.05)] == [None, cheap[0]["method"], middle[0]["method"]]
    assert [found.method for found in sparq.front()] == [cheap[0]["method"], middle[0]["method"]]
    assert sparq.front()[1].kl_mean == pytest.approx(0.2) and sparq.front()[1].tail.kl_p99 == 0.4
    assert sparq.share_for(0.4) == pytest.approx((0.02 * 0.04) ** 0.5), "halfway between 0.8 and 0.2"
    assert sparq.share_for(0.1) is None and sparq.share_for(0.9) is None
    mean, p99 = sparq.at_share((0.02 * 0.04) ** 0.5)
    assert mean == pytest.approx(0.4) and p99 == pytest.approx(0.8) and sparq.at_share(0.041) is None
    rows = script.budget_rows([lines], "H2O", (0.02, 0.05))
    assert [(row["family"], row["budget"]) for row in rows] == [("SparQ", 0.02), ("SparQ", 0.05), ("H2O", 0.05)]
    assert rows[1]["diff_to_baseline"] == pytest.approx(-0.1) and "diff_to_baseline" not in rows[0]
    assert other.share_for(0.3) is None, "one setting is no line"
    again = records("H2O(k=4)", 0.025, [0.5, 0.5] * 5)
    targets = script.target_rows([script.families([*cheap, *middle, *exact, *again])], "H2O", (0.4,))
    assert targets[0]["times_fewer_than_baseline"] == pytest.approx(targets[1]["share"] / targets[0]["share"])


def test_each_kind_of_text_chooses_with_half_of_its_documents():
    """Six documents of two kinds in one order: the first and third of a kind choose, whatever stands between."""
    ids = ["chat-0:0", "code-3:0", "code-1:0", "chat-2:0", "chat-1:0", "code-2:0"]
    scores = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    own = [{**record, "id": id} for record, id in zip(records("H2O(k=9)", 0.02, scores), ids, strict=True)]
    (line,) = script.families(own)
    assert line.chosen_on[0].kl_mean == pytest.approx((0.1 + 0.5 + 0.2 + 0.6) / 4)
    (row,) = script.budget_rows([[line]], "H2O", (0.02,))
    assert {kind: found["kl_mean"] for kind, found in row["kinds"].items()} == {"chat": 0.4, "code": 0.3}
    assert row["kinds"]["chat"]["kl_p99"] == 0.8 and row["kl_mean"] == pytest.approx(0.35)


def test_kinds_of_one_document_choose_together():
    own = records("H2O(k=9)", 0.02, [2, 4, 6])
    own = [{**record, "id": f"{kind}-0:0"} for record, kind in zip(own, "abc", strict=True)]
    ways = [script.families(own, chooses) for chooses in (0, 1)]
    assert [way[0].chosen_on[0].kl_mean for way in ways] == [4, 4]
    (row,) = script.budget_rows(ways, "H2O", [0.02])
    assert {kind: found["kl_mean"] for kind, found in row["kinds"].items()} == {"a": 2, "b": 4, "c": 6}


def test_both_ways_judge_every_document():
    """The first half prefers k=4 and the second k=9, so each is judged where the other was chosen."""
    own = [*records("H2O(k=4)", 0.02, [0.1, 0.4]), *records("H2O(k=9)", 0.02, [0.3, 0.2])]
    ways = [script.families(own, chooses) for chooses in (0, 1)]
    (row,) = script.budget_rows(ways, "H2O", (0.02,))
    assert row["kl_mean"] == pytest.approx((0.4 + 0.3) / 2) and row["method"] == "H2O(k=4) or H2O(k=9)"
    line = [*records("H2O(k=4)", 0.02, [0.4, 1.6] * 2), *records("H2O(k=9)", 0.08, [0.1, 0.4] * 2)]
    (row,) = script.target_rows([script.families(line, chooses) for chooses in (0, 1)], "H2O", (0.4,))
    assert row["share"] == pytest.approx((0.02 * 0.08) ** 0.5), "8% on the second half, 2% on the first"


def test_shares_for_a_99th_percentile():
    """It is twice the mean in these records: .8 at 2% of the bytes and .2 at 8%, so .4 at 4%."""
    lines = script.families([*records("H2O(k=4)", 0.02, [0.4] * 4), *records("H2O(k=9)", 0.08, [0.1] * 4)])
    (row,) = script.target_rows([lines], "H2O", (0.4,), tail=True)
    assert row["share"] == pytest.approx(0.04) and row["kl_p99"] == 0.4 and row["times_fewer_than_baseline"] == 1


def test_settings_as_they_stand_are_shown_beside_a_line_at_as_many_bytes():
    """The line has .4 at 2% and .1 at 8%, so .2 at 4%; beyond its ends it has nothing."""
    line = [*records("Skim(k=4)", 0.02, [0.4] * 4), *records("Skim(k=9)", 0.08, [0.1] * 4)]
    others = [*records("H2O(k=9)", 0.09, [0.3] * 4), *records("H2O(k=4)", 0.04, [0.5, 0.7, 0.5, 0.7])]
    ways = [script.families([*line, *others], chooses) for chooses in (0, 1)]
    near, far = script.setting_rows(ways, ["Skim"])
    assert near["method"] == "H2O(k=4)" and near["kl_mean"] == pytest.approx(0.6) and near["kl_p99"] == 1.4
    assert near["beside"] == {"Skim": {"kl_mean": pytest.approx(0.2), "kl_p99": pytest.approx(0.4)}}
    assert far["share"] == pytest.approx(0.09) and far["beside"] == {"Skim": {"kl_mean": None, "kl_p99": None}}


def test_growth_is_that_of_the_last_quarter_over_the_first():
    """Two answers of 500 tokens: one grows from 1 to 3, the other stays at 2."""
    grows, stays = [1.0] * 250 + [3.0] * 250, [2.0] * 500
    own = [{**record, "kl": kl} for record, kl in zip(records("H2O(k=9)", 0.02, [2, 2]), (grows, stays), strict=True)]
    (row,) = script.growth_rows(own)
    assert row["windows"] == [1.5, 2.5] and row["growth"] == 1 and row["growth_low"] is None


def test_texts_of_three_kinds(tmp_path, capsys):
    """Each file has the tokens that were asked for, and no passage is in two chats."""
    words, data, out = random.Random(0), tmp_path / "data", tmp_path / "texts"
    data.mkdir()
    sentence = " ".join(words.choice(["river", "mill", "stone"]) for _ in range(300))
    (data / "wikitext-test.txt").write_text("".join(f" = Town {i} = \n\n {sentence} \n" for i in range(3)))
    asked = [{"question": "Where?", "answers": [{"text": "there"}]}]
    passages = [{"context": f"passage {i} {sentence[:300]}", "qas": asked} for i in range(9)]
    (data / "squad.json").write_text(json.dumps({"data": [{"paragraphs": passages}]}))
    _, tokenizer = skimkv.load("builtin")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    texts.write(data, out, tokenizer, tokens=200, documents=2, seed=0)
    found = {path.stem: path.read_text() for path in sorted(out.glob("*.txt"))}
    assert list(found) == ["chat-0", "chat-1", "code-0", "code-1", "wikitext-0", "wikitext-1"]
    assert all(texts.count(tokenizer, text) >= 200 for text in found.values())
    in_chats = [{i for i in range(9) if f"passage {i}" in found[name]} for name in ("chat-0", "chat-1")]
    assert in_chats[0] and in_chats[1] and not in_chats[0] & in_chats[1]
    assert "[assistant] there" in found["chat-0"] and found["wikitext-0"].startswith(" = Town")
    tokenizer.chat_template = None
    texts.write(data, out, tokenizer, tokens=200, documents=2, seed=0)
    chat = (out / "chat-0.txt").read_text()
    assert chat.startswith("User: passage ") and "\n\nWhere?\n\nAssistant: there\n\n" in chat
    assert texts.main([str(data), str(out), "--tokens", "9999999"]) == 2
    assert "0 documents have 10000031 tokens, not 4: ask for fewer" in capsys.readouterr().err


@pytest.mark.parametrize("context", [4, 24])
def test_layers_that_no_method_decodes_are_left_out(context):
    """Gemma 2 has a sliding layer of 8 tokens."""
    model = family("gemma2")
    with torch.inference_mode():
        cache = record_prompt(model, prompt(1, context)).cache(Dense())
    own = step_traffic(Dense(), cache.stores).bytes
    assert script.other_layers_bytes(model, context, 1) == cache_traffic(cache).bytes - own > 0


def test_answers_of_dense_attention(tmp_path, capsys):
    """They are forced as a text is, whatever prompts are read in, and the same command goes on."""
    text, out = tmp_path / "words.txt", tmp_path / "out"
    text.write_text("the mill by the river grinds no stone " * 60)
    argv = [str(text), "--out", str(out), "--context", "24", "--answer", "6", "--documents", "2", "--batch", "2",
            "--dtype", "float32", "--prompt-dtype", "bf16", "--method", "Dense()", "--method", "H2O(k=8)"]  # fmt: skip
    assert script.main(argv) == 0
    assert "last quarter less first" in capsys.readouterr().out
    dense, h2o = json.loads((out / "growth.json").read_text())
    assert dense["kl_max"] < 1e-4 < h2o["kl_mean"] and len(h2o["windows"]) == 1
    answers = json.loads((out / "answers.json").read_text())["answers"]
    assert [len(ids) for ids in answers.values()] == [6] * len(answers)
    before = (out / "answers.jsonl").read_text()
    assert script.main(argv) == 0 and (out / "answers.jsonl").read_text() == before
    assert script.main([*argv, "--seed", "1"]) == 2
    assert "holds answers of another model, or another --seed, --context, --answer or" in capsys.readouterr().err
    assert script.main([*argv, "--answer", "0"]) == 2
    assert "--answer 0 must be at least 1 token" in capsys.readouterr().err
    assert script.main([*argv, "--temperature", "0"]) == 2
    assert "--temperature 0.0 must be a number above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    """It goes on from the records that are there, and writes the same figures again."""
    rng, text, out = random.Random(0), tmp_path / "words.txt", tmp_path / "out"
    text.write_text(" ".join(rng.choice(["river", "mill", "stone", "of", "a", "king"]) for _ in range(2500)))
    argv = [str(text), "--out", str(out), "--context", "64", "--reference", "4", "--documents", "6", "--dtype",
            "float32", "--method", "SparQ(r=[4, 16, 64], k=[8, 32])", "--baseline", "SparQ"]  # fmt: skip
    assert script.main([*argv, "--counted", "TopK(k=[8, 16], oracle=True)"]) == 0
    shown = capsys.readouterr().out
    assert "oracle top-k" in shown and "share of dense's bytes for a mean KL of" in shown
    found = json.loads((out / "divergence.json").read_text())
    assert found["reported_documents"] == 3 and (out / "divergence.png").read_bytes().startswith(b"\x89PNG")
    front = found["curves"]["SparQ"]
    assert len(front) > 1 and front[-1]["kl_mean"] < front[0]["kl_mean"] and front[-1]["share"] > front[0]["share"]
    size = (out / "results.jsonl").stat().st_size
    assert script.main([*argv, "--counted", "TopK(k=[8, 16], oracle=True)"]) == 0
    assert json.loads((out / "divergence.json").read_text()) == found
    assert (out / "results.jsonl").stat().st_size == size
    assert script.main([*argv, "--method", "H2O(k=[8, 16])", "--beside", "SparQ"]) == 0
    assert "settings as they stand" in capsys.readouterr().out
    shown = json.loads((out / "divergence.json").read_text())["settings"]
    assert [row["method"] for row in shown] == ["H2O(k=8)", "H2O(k=16)"] and shown[1]["beside"]["SparQ"]["kl_mean"] > 0
    assert script.main([*argv, "--beside", "Skim"]) == 2
    assert "--beside Skim is none of the families: SparQ" in capsys.readouterr().err
    assert script.main([*argv[:-1], "Dense"]) == 2
    assert "--baseline Dense is none of the families: SparQ" in capsys.readouterr().err
