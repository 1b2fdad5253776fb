"""The survey of a model: which layers it measures, and what its numbers must add up to."""

from __future__ import annotations

import pytest
import torch

from skimkv.analysis import LEAST_TOKENS
from skimkv.analysis.survey import count_layers, survey
from support.tiny_models import family, prompt

N = LEAST_TOKENS


def pieces(count: int) -> list[list[int]]:
    return prompt(count, N).tolist()


@pytest.mark.slow
def test_only_layers_with_full_attention_are_measured() -> None:
    words: list[str] = []
    findings = survey(family("gemma2"), pieces(1), queries=3, clouds=4, tick=words.append)
    assert count_layers(family("gemma2")) == 1
    assert findings.layers == [1]
    assert words == ["scores", "clusters", "clusters"]
    assert [(cloud.layer, cloud.kind) for cloud in findings.clouds] == [(1, "keys"), (1, "values")]
    with pytest.raises(ValueError, match="has no layer of full attention"):
        survey(family("mistral-sliding"), pieces(1), queries=3)


@pytest.mark.slow
def test_scores_and_clusters_add_up() -> None:
    findings = survey(family("llama"), pieces(2), queries=3, clouds=1)
    layers, heads, kv_heads, D = 2, 4, 2, 16
    assert findings.top_mass.shape == (layers, heads, 2 * 3)
    assert findings.q.shape == (layers, heads, 2 * 3 * D)
    every_query_gives_1 = torch.full((2, layers, kv_heads), float(N))
    torch.testing.assert_close(findings.accumulated.sum(-1), every_query_gives_1)
    torch.testing.assert_close(findings.scores_by_rank().sum(-1), torch.ones(layers))
    ids, count, score = findings.scores_by_token()
    assert ids.tolist() == sorted({token for piece in pieces(2) for token in piece})
    assert int(count.sum()) == 2 * N
    assert float(score.sum()) == pytest.approx(2 * N * layers * kv_heads)
    all_channels = findings.agreement[:, findings.grid.r.index(D)]
    assert float(all_channels.min()) > 0.95
    for cloud in findings.clouds:
        for clusters in cloud.clusters:
            assert int(clusters[0]) == 1
            assert set(clusters.diff().tolist()) <= {0, 1}


@pytest.mark.slow
def test_heads_without_groups_have_no_choice_of_a_group() -> None:
    one, two = (survey(family("gpt2"), pieces(n), queries=2, clouds=1) for n in (1, 2))
    assert one.grid.channels == ["top", "first", "random"]
    assert "batch" not in one.correlation_ratio
    assert set(two.correlation_ratio) == {"batch", "sequence", "layer", "head", "channel"}
    torch.testing.assert_close(two.accumulated[:1], one.accumulated)
