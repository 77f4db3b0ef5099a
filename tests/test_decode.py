"""Sampling, end tokens, stores that grow, and the meter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.references import plain_greedy
from tidekv_cli.engine.attention import Eager, FlashCPU
from tidekv_cli.engine.budgets import Uniform
from tidekv_cli.engine.decode import Sampler
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session
from tidekv_cli.engine.stores.dense import DenseStore
from tidekv_cli.errors import UsageError

CPU = torch.device("cpu")


def chosen(settings: SamplingSettings, logits: torch.Tensor, count: int = 400) -> list[int]:
    sampler = Sampler(settings, CPU)
    return [sampler.choose(logits) for _ in range(count)]


def test_greedy_and_tiny_temperature_take_the_best() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0])
    assert set(chosen(SamplingSettings(), logits, 3)) == {1}
    assert set(chosen(SamplingSettings(temperature=1e-30, seed=0), logits, 20)) == {1}


def test_top_p_keeps_the_smallest_set_with_that_mass() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(chosen(SamplingSettings(1.0, 0.4, 0), logits)) == {0}
    assert set(chosen(SamplingSettings(1.0, 0.7, 0), logits)) == {0, 1}
    assert set(chosen(SamplingSettings(1.0, 1.0, 0), logits)) == {0, 1, 2, 3}
    share = chosen(SamplingSettings(1.0, 1.0, 1), logits, 4000).count(0) / 4000
    assert abs(share - 0.5) < 0.03


def test_seed_repeats() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert chosen(SamplingSettings(1.0, 0.9, 7), logits) == chosen(SamplingSettings(1.0, 0.9, 7), logits)
    assert chosen(SamplingSettings(1.0, 0.9, 7), logits) != chosen(SamplingSettings(1.0, 0.9, 8), logits)


@pytest.mark.parametrize("values", [(-1.0, 1.0), (float("nan"), 1.0), (1.0, 0.0), (1.0, 1.1), (1.0, float("nan"))])
def test_impossible_sampling(values: tuple[float, float]) -> None:
    with pytest.raises(UsageError):
        SamplingSettings(*values)


def test_generation_ends_before_any_end_token_and_outgrows_its_slack(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    ids = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = plain_greedy(model, ids, 30)
    settings = PrefillSettings("tide", SnapKV(), Uniform(40), FlashCPU(), 16, 64, 2)  # slack for 2, then growth
    session = Session(model, frozenset())
    assert list(session.generate(session.prefill(ids, settings)[0], SamplingSettings(), 30)) == expected
    end = frozenset({expected[7], expected[20]})
    first = min(expected.index(token) for token in end)
    stopping = Session(model, end)
    assert list(stopping.generate(stopping.prefill(ids, settings)[0], SamplingSettings(), 30)) == expected[:first]


@pytest.mark.parametrize("slack", [0, 1, 10])
@pytest.mark.parametrize("rows", [1, 4])
def test_store_append_and_attend(slack: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, 20, 8, generator=draw) for _ in range(2))
    indices = torch.tensor([[0, 3, 19], [1, 2, 4]])
    store = DenseStore(keys, values, indices, slack, FlashCPU())
    assert store.nbytes == 2 * 2 * (3 + slack) * 8 * 4
    gathered = [torch.stack([t[0, h, indices[h]] for h in range(2)])[None] for t in (keys, values)]
    for _ in range(5):
        new = [torch.randn(1, 2, rows, 8, generator=draw) for _ in range(2)]
        gathered = [torch.cat(pair, 2) for pair in zip(gathered, new, strict=True)]
        assert torch.equal(store.append(*new)[0], gathered[0]) and torch.equal(store.values, gathered[1])
        queries = torch.randn(1, 4, rows, 8, generator=draw)
        assert torch.allclose(store.attend(queries, 0.3), Eager().attend(queries, *gathered, 0.3)[0], atol=1e-6)


def test_meter_counts_each_storage_from_birth_to_death() -> None:
    meter = LiveMeter()
    kept = torch.zeros(1000)
    meter.watch([kept, kept[10:]])
    assert meter.live_bytes == 4000
    with meter:
        made = torch.ones(500)
        view = made[5:].view(5, 99)
        made.add_(1.0)
        parts = torch.ones(300).split(100)
        assert meter.live_bytes == 4000 + 2000 + 1200
        del parts
        double = kept * 2
        del double
        assert meter.live_bytes == 4000 + 2000
    assert meter.peak_bytes >= 4000 + 2000 + 4000
    del made
    assert meter.live_bytes == 6000  # the view still holds it
    del view
    assert meter.live_bytes == 4000
