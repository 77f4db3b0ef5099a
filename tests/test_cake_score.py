"""CAKE's scores equal their dense reference at every block size, and run in whole prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.references_selectors import BLOCKS, KINDS, SHAPES, check_whole_runs, dense_cake, layer
from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.selectors import LayerView
from tidekv_cli.engine.selectors.cake import CakeScore
from tidekv_cli.errors import UsageError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", range(5))
def test_kept_sets_equal_the_dense_reference(kind: str, shape: tuple[int, int], case: int) -> None:
    draw = random.Random(f"{kind} {shape} {case}")
    window, kernel, gamma = draw.choice([1, 2, 8, 32]), draw.choice([1, 3, 5, 13]), draw.choice([0.0, 1.0, 200.0])
    length = window + draw.randrange(kernel, 400)
    budget = draw.randrange(window, length + 1)
    view = layer(case, length, shape, window, kind)
    expected = dense_cake(view, budget, window, gamma, kernel)
    for block in BLOCKS:
        selector = CakeScore(window, gamma, kernel)
        kept = selector.select(LayerView(view.keys, view.observation, block), budget)
        assert torch.equal(kept.indices, expected), (block, length, budget, window, kernel, gamma)
        assert kept.scores is None or kept.scores.shape == kept.indices.shape


def known(weights: list[list[float]]) -> LayerView:
    """A layer of one head whose keys get, of each query of the window, the weights [W][S - W]."""
    logs = torch.tensor(weights).log()
    window, prefix = logs.shape
    keys = torch.cat((logs.T, torch.zeros(window, window)))[None]
    return LayerView(keys, Observation(torch.eye(window)[None], torch.zeros(1, window), 1.0), 64)


def test_what_queries_disagree_about_stays_if_gamma_says_so() -> None:
    view = known([[0.2, 0.3, 0.25, 0.01], [0.2, 0.05, 0.25, 0.01]])
    for gamma, best in ((0.0, 2), (200.0, 1)):
        assert CakeScore(2, gamma, 1).select(view, 3).indices.tolist() == [[best, 4, 5]]
    scores = CakeScore(2, 200.0, 1).select(view, 3).scores
    assert scores is not None and scores[0, 0].item() == pytest.approx(0.175 + 200 * 0.25**2 / 2, rel=1e-6)


@pytest.mark.parametrize(
    "values",
    [{"window": 0}, {"gamma": -1.0}, {"gamma": float("nan")}, {"gamma": float("inf")}, {"pool_kernel": 4}],
)
def test_impossible_values(values: dict[str, Any]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(UsageError, match=f"{name}={value}"):
        CakeScore(**values)


def test_whole_prompts(tiny_model: Callable[..., Any]) -> None:
    check_whole_runs(tiny_model, CakeScore(8), 8)
