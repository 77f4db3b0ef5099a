"""Scoring by blocks equals the dense reference exactly; ties, halos, NaN and the two-pass form."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.references import dense_snapkv
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.observation import Observation, WindowObserver
from tidekv_cli.engine.scoring import StreamingTopK, pool_scores, window_lse, window_scores
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
    for block in (1, 64, 100, 2048):
        view = LayerView(keys, seen, block)
        kept = SnapKV(window=8, pool=pooling, pool_kernel=5).select(view, 40).indices
        assert torch.equal(kept, dense_snapkv(view, 40, 8, 5, pooling))
        assert (kept.diff() > 0).all()
    if kind == "equal keys" and pooling == "max":  # all tie: the lowest positions stay
        assert kept[0].tolist() == [*range(32), *range(292, 300)]


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 5, 7])
@pytest.mark.parametrize("sinks", [0, 4])
def test_every_budget_of_a_prompt_hardly_longer_than_it(pooling: Any, kernel: int, sinks: int) -> None:
    window, room = 8, 5  # room: chosen entries, K less what is mandatory
    for length in range(window + sinks + 1, window + sinks + room + 3):
        view = random_view(length, length, 2, 2, window)
        selector = SnapKV(window=window, pool=pooling, pool_kernel=kernel, sinks=sinks)
        for budget in range(window + sinks, length):
            expected = dense_snapkv(view, budget, window, kernel, pooling, sinks)
            for block in (1, 3, 2048):
                kept = selector.select(LayerView(view.keys, view.observation, block), budget)
                assert torch.equal(kept.indices, expected), (length, budget, block)


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_no_dropped_key_beats_a_kept_one_by_the_definition(pooling: Any, passes: int, seed: int) -> None:
    """Against causal softmax in float64, which shares no step with the code; rounding is all that may differ."""
    window, kernel, budget, length = 16, 7, 90, 500
    view = random_view(seed, length, 2, 3, window)
    seen = view.observation
    assert seen is not None
    if passes == 2:
        seen = Observation(seen.queries, None, seen.scale)
    exact = by_definition(view.keys, seen, kernel, pooling)
    raw = window_scores(view.keys, seen, length - window, 100)
    noise = (torch.cat(list(pool_scores(raw, kernel, pooling)), 1) - exact).abs().max()
    assert noise <= 1e-5 * exact.max()
    selector = SnapKV(window=window, pool=pooling, pool_kernel=kernel)
    kept = selector.select(LayerView(view.keys, seen, 100), budget).indices[:, :-window]
    chosen = torch.zeros_like(exact, dtype=torch.bool).scatter_(1, kept, True)
    worst = exact.masked_fill(~chosen, float("inf")).amin(1)
    assert (worst >= exact.masked_fill(chosen, 0.0).amax(1) - 2 * noise).all()


def by_definition(keys: Tensor, seen: Observation, kernel: int, pooling: str) -> Tensor:
    """Pooled scores [Hkv, S - W] in float64: one query of one head at a time, each pooled value by hand."""
    heads, length, _ = keys.shape
    count, window, _ = seen.queries.shape
    prefix, group, half = length - window, count // heads, kernel // 2
    raw = torch.zeros(heads, prefix, dtype=torch.float64)
    for head in range(count):
        for row in range(window):
            visible = keys[head // group, : prefix + row + 1].double()
            weights = (visible @ seen.queries[head, row].double() * seen.scale).softmax(0)
            raw[head // group] += weights[:prefix] / (group * window)
    pooled = torch.empty_like(raw)
    for position in range(prefix):
        near = raw[:, max(position - half, 0) : position + half + 1]
        pooled[:, position] = near.sum(1) / kernel if pooling == "avg" else near.amax(1)
    return pooled


def test_top_k_is_a_stable_sort() -> None:
    draw = torch.Generator().manual_seed(0)
    for count in (1, 5, 40, 99, 100):
        scores = torch.randint(0, 7, (3, 100), generator=draw).float() / 7
        expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
        for block, room in product((1, 3, 32, 100), (1, 2, 20, 1000)):
            top = StreamingTopK(count, 100, room)
            for part in scores.split(block, 1):
                top.push(part)
            positions, kept = top.result()
            assert torch.equal(positions, expected)
            assert torch.equal(kept, scores.gather(1, expected))


def test_top_k_ranks_nan_last_and_infinity_first() -> None:
    top = StreamingTopK(2, 5, 1)
    top.push(torch.tensor([[float("nan"), 1.0, float("nan"), float("inf"), 0.0]]))
    assert top.result()[0].tolist() == [[1, 3]]
    empty = StreamingTopK(2, 4, 1)
    empty.push(torch.full((1, 4), float("nan")))
    assert empty.result()[0].tolist() == [[0, 1]]


def test_top_k_with_nan_among_duplicates() -> None:
    draw = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 4, (4, 120), generator=draw).float()
    scores[torch.rand(4, 120, generator=draw) < 0.3] = float("nan")
    ranked = scores.nan_to_num(float("-inf")).sort(dim=1, descending=True, stable=True).indices
    for count in (1, 30, 100, 119):  # 100 and more take some of the NaNs, the lowest positions first
        for block in (1, 7, 120):
            top = StreamingTopK(count, 120, 10)
            for part in scores.split(block, 1):
                top.push(part)
            assert torch.equal(top.result()[0], ranked[:, :count].sort(1).values)


def test_top_k_orders_every_kind_of_number() -> None:
    draw = torch.Generator().manual_seed(2)
    kinds = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3.4e38, -3.4e38, float("inf"), float("-inf"), 1.0 + 2**-23]
    scores = torch.tensor(kinds)[torch.randint(0, len(kinds), (3, 200), generator=draw)]
    ranked = scores.sort(dim=1, descending=True, stable=True).indices
    for count in range(1, 200, 9):
        top = StreamingTopK(count, 200, 1)
        for part in scores.split(50, 1):
            top.push(part)
        assert torch.equal(top.result()[0], ranked[:, :count].sort(1).values)


def test_top_k_holds_no_more_than_it_says() -> None:
    top = StreamingTopK(10, 51 * 16, 40)
    meter = LiveMeter()
    with meter:
        top.push(torch.zeros(2, 16))
        held = [meter.live_bytes]
        for _ in range(50):
            top.push(torch.zeros(2, 16))
            held.append(meter.live_bytes)
    assert max(held) <= 2 * (10 + 40) * 4 + 2 * 10 * 8


def test_top_k_counts_positions_from_the_first() -> None:
    top = StreamingTopK(2, 4, 1, first=3)
    top.push(torch.tensor([[1.0, 5.0]]))
    top.push(torch.tensor([[0.0, 5.0]]))
    assert top.result()[0].tolist() == [[4, 6]]


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
    found = window_lse(view.keys, seen, block)
    assert torch.allclose(found.reshape(6, 16), seen.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("block", [64, 100, 2048])
def test_two_passes_keep_what_one_keeps(seed: int, block: int) -> None:
    view = random_view(seed, 400, 2, 2, 16)
    seen = view.observation
    assert seen is not None
    one = SnapKV(window=16).select(view, 64).indices
    blind = LayerView(view.keys, Observation(seen.queries, None, seen.scale), block)
    assert torch.equal(one, SnapKV(window=16).select(blind, 64).indices)


@pytest.mark.parametrize("chunk", [1, 3, 8, 50])
def test_the_observer_joins_chunks_shorter_than_the_window(chunk: int) -> None:
    queries, lse = torch.randn(1, 4, 50, 8), torch.randn(1, 4, 50)
    observer = WindowObserver(8, 50)
    for _ in range(2):  # the second layer starts empty
        for start in range(0, 50, chunk):
            stop = min(start + chunk, 50)
            observer.catch(queries[:, :, start:stop], queries[:, :, :stop], lse[:, :, start:stop], start, 0.5)
        seen = observer.take()
        assert torch.equal(seen.queries, queries[0, :, 42:])
        assert seen.lse is not None and torch.equal(seen.lse, lse[0, :, 42:])
