"""Mask functions of transformers come to rules; what does not is kept as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from tidekv_cli.engine.masks import CAUSAL, Visible, visible

CPU = torch.device("cpu")


def written_out(function: Any, queries: int, keys: int, first: int) -> list[list[bool]]:
    """One call for each pair."""
    pairs = [[function(0, 0, torch.tensor(first + q), torch.tensor(k)) for k in range(keys)] for q in range(queries)]
    return [[bool(seen) for seen in row] for row in pairs]


def test_causal_and_windows() -> None:
    assert visible(causal_mask_function) is CAUSAL and CAUSAL.everything
    for window in (1, 2, 3, 128, 4096, 100_000):
        found = visible(sliding_window_causal_mask_function(window))
        assert found == Visible(window) and not found.everything
    assert visible(and_masks(sliding_window_causal_mask_function(5), causal_mask_function)) == Visible(5)


def test_functions_that_differ_in_their_defaults_only() -> None:
    def of(window: int) -> Any:
        def seen(batch: Any, head: Any, query: Any, key: Any, window: int = window, *, least: int = 0) -> Any:
            return (key <= query) & (key > query - window)

        return seen

    assert [visible(of(window)) for window in (5, 9)] == [Visible(5), Visible(9)]


def test_what_cannot_be_compared_is_not_taken_for_another() -> None:
    def of(window: dict[str, int]) -> Any:
        return lambda batch, head, query, key: (key <= query) & (key > query - window["size"])

    assert all(visible(of({"size": window})).function is not None for window in (5, 9))


ASKED: list[int] = []


def test_equal_functions_are_looked_at_once() -> None:
    def made(window: int) -> Any:
        def function(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
            ASKED.append(window)
            return (key <= query) & (key > query - window)

        return function

    assert visible(made(7)) == visible(made(7)) == Visible(7)
    before = len(ASKED)
    assert before > 0 and visible(made(7)) == Visible(7) and len(ASKED) == before
    assert visible(made(8)) == Visible(8)


def test_other_rules_stay_functions() -> None:
    def even(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return key % 2 == 0

    def first(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
        return key < 4

    for function in (
        and_masks(causal_mask_function, even),
        or_masks(sliding_window_causal_mask_function(6), and_masks(causal_mask_function, first)),
        chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.long)),
    ):
        found = visible(function)
        assert found.function is function and not found.everything
        assert found.seen(5, 15, 20, CPU).tolist() == written_out(function, 15, 20, 5)


@pytest.mark.parametrize("window", [1, 3, 20, 50])
def test_what_a_window_leaves(window: int) -> None:
    function = sliding_window_causal_mask_function(window)
    assert visible(function).seen(5, 15, 20, CPU).tolist() == written_out(function, 15, 20, 5)


def test_on_fake_tensors() -> None:
    with FakeTensorMode():
        assert visible(sliding_window_causal_mask_function(77)) == Visible(77)
        assert visible(sliding_window_causal_mask_function(77)).seen(0, 4, 4, CPU).shape == (4, 4)
