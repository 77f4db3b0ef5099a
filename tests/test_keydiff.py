"""KeyDiff equals its dense reference, in float32 without a copy of all keys, and runs in whole prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.references_selectors import BLOCKS, KINDS, SHAPES, check_whole_runs, dense_keydiff, layer
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.selectors import LayerView
from tidekv_cli.engine.selectors.keydiff import KeyDiff


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", range(5))
def test_kept_sets_equal_the_dense_reference(kind: str, shape: tuple[int, int], case: int) -> None:
    draw = random.Random(f"{kind} {shape} {case}")
    length = draw.choice([draw.randrange(1, 400), draw.randrange(500, 1200)])
    budget = draw.randrange(1, length + 1)
    view = layer(case, length, shape, 1, kind)
    expected = dense_keydiff(view, budget)
    for block in BLOCKS:
        kept = KeyDiff().select(LayerView(view.keys, None, block), budget)
        assert torch.equal(kept.indices, expected), (block, length, budget)
        assert kept.scores is not None and kept.scores.isfinite().all()


@pytest.mark.parametrize("factor", [0.0, 1e-42, 1e-30, 1e30, 1e38])
def test_neither_huge_nor_tiny_nor_zero_keys_give_what_is_no_number(factor: float) -> None:
    signs = torch.randn(2, 90, 8, generator=torch.Generator().manual_seed(0)).sign()
    kept = KeyDiff().select(LayerView(signs * factor, None, 64), 30)
    assert kept.scores is not None and kept.scores.isfinite().all()
    plain = KeyDiff().select(LayerView(signs, None, 64), 30)
    assert torch.equal(kept.indices, plain.indices if factor else torch.arange(30).expand(2, -1))


def test_opposite_keys_have_no_mean_direction() -> None:
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(5, 1)[None]
    assert KeyDiff().select(LayerView(keys, None, 64), 3).indices.tolist() == [[0, 1, 2]]


def test_the_key_that_points_elsewhere_stays() -> None:
    keys = torch.ones(2, 1500, 4)
    keys[0, 700], keys[1, 1499] = -keys[0, 700], torch.tensor([9.0, -9.0, 9.0, -9.0])
    assert KeyDiff().select(LayerView(keys, None, 64), 2).indices.tolist() == [[0, 700], [0, 1499]]


def test_no_float32_copy_of_all_keys() -> None:
    keys = torch.randn(2, 16384, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    meter = LiveMeter()
    meter.watch([keys])
    with meter:
        KeyDiff().select(LayerView(keys, None, 256), 256)
    assert meter.peak_bytes - keys.nbytes < keys.nbytes / 3


def test_whole_prompts(tiny_model: Callable[..., Any]) -> None:
    check_whole_runs(tiny_model, KeyDiff(), 0)
