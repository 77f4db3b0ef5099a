"""ChunkKV equals its dense reference at every block size, keeps whole runs, and runs in whole prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.references_selectors import BLOCKS, KINDS, SHAPES, check_whole_runs, dense_chunkkv, layer
from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.selectors import LayerView
from tidekv_cli.engine.selectors.chunkkv import ChunkKV
from tidekv_cli.errors import UsageError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", range(5))
def test_kept_sets_equal_the_dense_reference(kind: str, shape: tuple[int, int], case: int) -> None:
    draw = random.Random(f"{kind} {shape} {case}")
    window, run = draw.choice([1, 8, 32]), draw.choice([1, 3, 20, 64, 150])
    length = window + draw.randrange(1, 400)
    budget = draw.randrange(window, length + 1)
    view = layer(case, length, shape, window, kind)
    expected = dense_chunkkv(view, budget, window, run)
    for block in BLOCKS:
        kept = ChunkKV(window, run).select(LayerView(view.keys, view.observation, block), budget)
        assert torch.equal(kept.indices, expected), (block, length, budget, window, run)
        assert kept.scores is None or kept.scores.shape == kept.indices.shape


def known(means: list[float], run: int) -> LayerView:
    """A layer of one head whose keys get the weights `means`, each over a run, of a window of one query."""
    wanted = torch.tensor([mean for mean in means for _ in range(run)] + [1.0])
    keys = wanted.log()[None, :, None] * torch.tensor([1.0, 0.0])
    return LayerView(keys, Observation(torch.tensor([[[1.0, 0.0]]]), torch.zeros(1, 1), 1.0), 7)


def test_whole_runs_stay_but_for_the_last_taken() -> None:
    view = known([0.25, 1.0, 0.5, 0.125], 5)
    for budget, expected in (
        (4, [5, 6, 7]),
        (6, [5, 6, 7, 8, 9]),
        (9, [5, 6, 7, 8, 9, 10, 11, 12]),
        (17, [*range(15), 15]),
    ):
        assert ChunkKV(1, 5).select(view, budget).indices.tolist() == [[*expected, 20]]


def test_equal_runs_go_to_the_lower_one_and_a_short_last_run_counts_by_its_own_mean() -> None:
    view = known([0.5, 1.0, 0.5], 5)
    assert ChunkKV(1, 5).select(view, 9).indices.tolist() == [[0, 1, 2, 5, 6, 7, 8, 9, 15]]
    # Runs of 10: the second one has 5 tokens, of mean 0.5; the first one has the mean 0.75.
    assert ChunkKV(1, 10).select(view, 12).indices.tolist() == [[*range(11), 15]]
    view = known([0.25, 0.25, 0.5], 5)
    assert ChunkKV(1, 10).select(view, 7).indices.tolist() == [[0, *range(10, 15), 15]]


def test_equal_scores_tie_whatever_the_length_of_their_run() -> None:
    for length in range(24, 64):
        view = layer(length, length + 1, (3, 1), 1, "equal keys")
        assert ChunkKV(1, 20).select(view, 22).indices.tolist() == [[*range(21), length]] * 3


@pytest.mark.parametrize("values", [{"window": 0}, {"run": 0}, {"run": 1025}])
def test_impossible_values(values: dict[str, int]) -> None:
    ((name, value),) = values.items()
    with pytest.raises(UsageError, match=f"{name}={value}"):
        ChunkKV(**values)


def test_whole_prompts(tiny_model: Callable[..., Any]) -> None:
    check_whole_runs(tiny_model, ChunkKV(8, 6), 8)
