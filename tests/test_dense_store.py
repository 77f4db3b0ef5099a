"""The dense store: gathered rows, room for new tokens, growth past it, and attention over what it holds."""

from __future__ import annotations

import pytest
import torch

from tidekv_cli.engine.attention import PLAIN, Eager
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.selectors import Selection
from tidekv_cli.engine.stores.dense import DenseStore


@pytest.mark.parametrize("slack", [0, 1, 10])
@pytest.mark.parametrize("rows", [1, 4])
def test_store_append_and_attend(slack: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, 2, 20, 8, generator=draw) for _ in range(2))
    indices = torch.tensor([[0, 3, 19], [1, 2, 4]])
    store = DenseStore(keys, values, Selection(indices), slack, FlashCPU())
    assert store.nbytes == 2 * 2 * (3 + slack) * 8 * 4
    gathered = [torch.stack([t[0, h, indices[h]] for h in range(2)])[None] for t in (keys, values)]
    for _ in range(5):
        new = [torch.randn(1, 2, rows, 8, generator=draw) for _ in range(2)]
        gathered = [torch.cat(pair, 2) for pair in zip(gathered, new, strict=True)]
        assert torch.equal(store.append(*new)[0], gathered[0]) and torch.equal(store.values, gathered[1])
        queries = torch.randn(1, 4, rows, 8, generator=draw)
        assert torch.allclose(store.attend(queries, 0.3, PLAIN), Eager().attend(queries, *gathered, 0.3)[0], atol=1e-6)


def test_growth_is_by_half_and_slack_is_not_copied() -> None:
    rows, new = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 1, 8)
    store = DenseStore(rows, rows, Selection(torch.arange(20).expand(2, -1)), 2, FlashCPU())
    held, sizes = store.nbytes, []
    first = store.keys  # held on to, so that its memory is not given out again
    for _ in range(20):
        store.append(new, new)
        sizes.append(store.nbytes)
    per_row = held // 22
    assert sizes == [22 * per_row] * 2 + [33 * per_row] * 11 + [49 * per_row] * 7
    assert store.length == 40 and store.keys.data_ptr() != first.data_ptr()
    assert torch.equal(store.keys[:, :, :20], rows[:, :, :20])
    assert torch.equal(store.values[:, :, 20:], new.expand(-1, -1, 20, -1))


def test_the_store_does_not_hold_on_to_the_full_rows() -> None:
    rows = torch.randn(1, 2, 30, 8)
    store = DenseStore(rows, rows, Selection(torch.arange(30).expand(2, -1)), 0, FlashCPU())
    expected = rows.clone()
    rows.zero_()
    assert torch.equal(store.keys, expected) and torch.equal(store.values, expected)


def test_half_precision_is_kept_bit_for_bit() -> None:
    rows = torch.randn(1, 2, 30, 8).bfloat16()
    indices = torch.tensor([[0, 7, 29], [3, 4, 5]])
    store = DenseStore(rows, -rows, Selection(indices), 3, FlashCPU())
    assert store.keys.dtype == torch.bfloat16 and store.nbytes == 2 * 2 * 6 * 8 * 2
    for head in range(2):
        assert torch.equal(store.keys[0, head], rows[0, head, indices[head]])
        assert torch.equal(store.values[0, head], -rows[0, head, indices[head]])
