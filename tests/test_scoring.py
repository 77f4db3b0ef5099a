"""Scoring by blocks equals the dense reference exactly; ties, halos, NaN and the two-pass form."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

from tests.references import dense_snapkv
from tidekv_cli.engine.scoring import Observation, Observer, StreamingTopK, pool_scores, window_lse
from tidekv_cli.engine.selectors import LayerView
from tidekv_cli.engine.selectors.snapkv import SnapKV


def random_view(seed: int, length: int, kv_heads: int, group: int, window: int, size: int = 16) -> LayerView:
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randn(kv_heads, length, size, generator=draw)
    queries = 2 * torch.randn(kv_heads * group, window, size, generator=draw)
    scale = size**-0.5
    logits = torch.einsum("hgwd,hsd->hgws", queries.view(kv_heads, group, window, size) * scale, keys)
    positions = torch.arange(length)
    logits.masked_fill_(positions[None, :] > positions[length - window :, None], float("-inf"))
    lse = logits.logsumexp(-1).reshape(kv_heads * group, window)
    return LayerView(keys, Observation(queries, lse, scale), 2048)


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 3), (4, 1), (2, 4)])
@pytest.mark.parametrize("case", range(8))
def test_kept_sets_equal_the_dense_reference_at_every_block_size(
    pooling: str, kv_heads: int, group: int, case: int
) -> None:
    draw = random.Random(1000 * kv_heads + 10 * group + case)
    window, sinks, kernel = draw.choice([1, 8, 32]), draw.choice([0, 4]), draw.choice([1, 3, 5, 7, 13])
    length = window + sinks + draw.randrange(2, 700)
    budget = draw.randrange(window + sinks, length)
    view = random_view(case, length, kv_heads, group, window)
    expected = dense_snapkv(view, budget, window, kernel, pooling, sinks)
    for block in (1, 64, 100, 256, 2048, length, 10**6):
        selector = SnapKV(window=window, pool=pooling, pool_kernel=kernel, sinks=sinks)
        kept = selector.select(LayerView(view.keys, view.observation, block), budget)
        assert torch.equal(kept.indices, expected), (block, length, budget, window, kernel, sinks)
        if kept.scores is not None:  # None where the budget leaves nothing to choose
            assert kept.scores.shape == kept.indices.shape


@pytest.mark.parametrize("kind", ["equal keys", "quantised", "huge", "bfloat16"])
@pytest.mark.parametrize("pooling", ["avg", "max"])
def test_ties_huge_logits_and_half_precision(kind: str, pooling: str) -> None:
    view = random_view(3, 300, 2, 2, 8)
    keys, seen = view.keys, view.observation
    assert seen is not None
    if kind == "equal keys":
        keys = torch.ones_like(keys)
    elif kind == "quantised":
        keys = keys.sign()
    elif kind == "huge":
        seen = Observation(seen.queries * 1e4, seen.lse * 1e4, seen.scale)
    else:
        keys, seen = keys.bfloat16(), Observation(seen.queries.bfloat16(), seen.lse, seen.scale)
    for block in (64, 128, 2048):
        view = LayerView(keys, seen, block)
        kept = SnapKV(window=8, pool=pooling, pool_kernel=5).select(view, 40).indices
        assert torch.equal(kept, dense_snapkv(view, 40, 8, 5, pooling))
        assert (kept.diff() > 0).all()
    if kind == "equal keys" and pooling == "max":  # all tie: the lowest positions stay
        assert kept[0].tolist() == [*range(32), *range(292, 300)]


def test_top_k_is_a_stable_sort() -> None:
    draw = torch.Generator().manual_seed(0)
    for count in (1, 5, 40, 99, 100):
        scores = torch.randint(0, 7, (3, 100), generator=draw).float() / 7
        expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
        for block in (1, 3, 32, 100):
            top = StreamingTopK(count)
            for part in scores.split(block, 1):
                top.push(part)
            positions, kept = top.result()
            assert torch.equal(positions, expected)
            assert torch.equal(kept, scores.gather(1, expected))


def test_top_k_ranks_nan_last_and_infinity_first() -> None:
    top = StreamingTopK(2)
    top.push(torch.tensor([[float("nan"), 1.0, float("nan"), float("inf"), 0.0]]))
    assert top.result()[0].tolist() == [[1, 3]]
    empty = StreamingTopK(2)
    empty.push(torch.full((1, 4), float("nan")))
    assert empty.result()[0].tolist() == [[0, 1]]


@pytest.mark.parametrize("kernel", [1, 3, 7, 13])
@pytest.mark.parametrize("block", [1, 2, 5, 64, 500])
def test_pooling_crosses_block_borders(kernel: int, block: int) -> None:
    for length in (1, 2, 6, 7, 129):
        raw = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
        for pooling in ("avg", "max"):
            pieces = torch.cat(list(pool_scores(iter(raw.split(block, 1)), kernel, pooling)), 1)
            whole = (
                F.avg_pool1d(raw, kernel, 1, kernel // 2)
                if pooling == "avg"
                else F.max_pool1d(raw, kernel, 1, kernel // 2)
            )
            assert torch.equal(pieces, whole)


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_the_first_of_two_passes_gives_the_lse(block: int) -> None:
    view = random_view(5, 210, 2, 3, 16)
    seen = view.observation
    assert seen is not None and seen.lse is not None
    found = window_lse(view.keys, seen, 210 - 16, block)
    assert torch.allclose(found.reshape(6, 16), seen.lse, rtol=1e-6, atol=1e-5)


def test_two_passes_keep_what_one_keeps() -> None:
    view = random_view(6, 400, 2, 2, 16)
    seen = view.observation
    assert seen is not None
    one = SnapKV(window=16).select(view, 64).indices
    two = SnapKV(window=16).select(LayerView(view.keys, Observation(seen.queries, None, seen.scale), 128), 64).indices
    assert torch.equal(one, two)


@pytest.mark.parametrize("chunk", [1, 3, 8, 50])
def test_the_observer_joins_chunks_shorter_than_the_window(chunk: int) -> None:
    queries, lse = torch.randn(1, 4, 50, 8), torch.randn(1, 4, 50)
    observer = Observer(8, 50)
    for _ in range(2):  # the second layer starts empty
        for start in range(0, 50, chunk):
            stop = min(start + chunk, 50)
            observer.catch(queries[:, :, start:stop], lse[:, :, start:stop], start, 0.5)
        seen = observer.take()
        assert torch.equal(seen.queries, queries[0, :, 42:])
        assert seen.lse is not None and torch.equal(seen.lse, lse[0, :, 42:])
