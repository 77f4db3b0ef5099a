"""Backends give the same output and LSE: bottom-right causal, grouped heads, one query or many."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tidekv_cli.engine.attention import Attention, Eager, Math, Rule, merge
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.meter import LiveMeter

SHAPES = [(1, 1, 1, 1), (4, 2, 1, 9), (4, 4, 7, 7), (9, 3, 5, 40), (8, 1, 33, 100), (6, 2, 600, 700), (2, 2, 513, 513)]
SHAPES += [(4, 2, 512, 560), (4, 2, 513, 560)]  # either side of where a group's heads are folded


def tensors(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, rows, length = shape
    draw = torch.Generator().manual_seed(length)
    queries = torch.randn(1, heads, rows, 32, generator=draw).to(dtype)
    keys, values = torch.randn(2, 1, kv_heads, length, 32, generator=draw).to(dtype).unbind()
    return queries, keys, values


def one_by_one(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax of one query of one head at a time, in float64."""
    _, heads, rows, _ = queries.shape
    group, past = heads // keys.shape[1], keys.shape[2] - rows
    out, lse = torch.empty_like(queries, dtype=torch.float64), torch.empty(1, heads, rows, dtype=torch.float64)
    for head in range(heads):
        for row in range(rows):
            seen = keys[0, head // group, : past + row + 1].double()
            logits = seen @ queries[0, head, row].double() * scale
            lse[0, head, row] = logits.logsumexp(0)
            out[0, head, row] = logits.softmax(0) @ values[0, head // group, : past + row + 1].double()
    return out, lse


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", [FlashCPU(), Eager(), Math()], ids=lambda backend: backend.name)
def test_output_and_lse(backend: Attention, shape: tuple[int, int, int, int]) -> None:
    queries, keys, values = tensors(shape)
    out, lse = backend.attend(queries, keys, values, 0.2)
    expected_out, expected_lse = one_by_one(queries, keys, values, 0.2)
    assert out.shape == queries.shape and lse.shape == queries.shape[:3]
    assert torch.allclose(out.double(), expected_out, atol=2e-6)
    assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_kernel_that_wants_equal_head_counts(
    shape: tuple[int, int, int, int], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in torch 2.5, whose kernel reads other memory where keys have fewer heads."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def strict(queries: Tensor, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        assert queries.shape[1] == keys.shape[1] == values.shape[1] and queries.shape[0] == keys.shape[0]
        return kernel(queries, keys, values, *rest, **more)

    monkeypatch.setattr("tidekv_cli.engine.flash_cpu._GROUPED_HEADS", False)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", strict)
    rule = Rule(Visible(window))
    out, lse = FlashCPU().attend(*tensors(shape), 0.2, rule)
    expected_out, expected_lse = Eager().attend(*tensors(shape), 0.2, rule)
    assert torch.allclose(out, expected_out, atol=2e-6) and torch.allclose(lse, expected_lse, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_half_precision(shape: tuple[int, int, int, int]) -> None:
    queries, keys, values = tensors(shape, torch.bfloat16)
    out, lse = FlashCPU().attend(queries, keys, values, 0.2)
    expected_out, expected_lse = one_by_one(queries, keys, values, 0.2)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    assert torch.allclose(out.double(), expected_out, atol=2e-2)
    assert torch.allclose(lse.double(), expected_lse, atol=2e-2)


def test_eager_never_repeats_a_groups_keys() -> None:
    queries, keys, values = tensors((32, 8, 16, 4000))
    meter = LiveMeter()
    with meter:
        Eager().attend(queries, keys, values, 0.2)
    logits = 32 * 16 * 4000 * 4
    assert meter.peak_bytes < 4 * logits + 2**20, "more than the logits, their copies and the mask"


def test_merge_of_two_halves_is_the_whole() -> None:
    queries, keys, values = tensors((4, 2, 1, 60))
    backend = Eager()
    parts = [backend.attend(queries, keys[:, :, s], values[:, :, s], 0.2) for s in (slice(0, 23), slice(23, 60))]
    out, lse = merge(*parts)
    expected_out, expected_lse = backend.attend(queries, keys, values, 0.2)
    assert torch.allclose(out, expected_out, atol=1e-6) and torch.allclose(lse, expected_lse, atol=1e-6)


RULES = [
    Rule(Visible(1)),
    Rule(Visible(7)),
    Rule(Visible(64)),
    Rule(Visible(1000)),
    Rule(softcap=2.0),
    Rule(Visible(9), softcap=2.0),
    Rule(sinks=torch.linspace(-2.0, 3.0, 6)),
    Rule(Visible(9), 2.0, torch.linspace(-2.0, 3.0, 6)),
    Rule(Visible(function=lambda batch, head, query, key: key // 8 == query // 8)),
]


def by_definition(queries: Tensor, keys: Tensor, values: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Each query by itself, in float64; a sink is one more logit that has no value."""
    first = keys.shape[2] - queries.shape[2]
    group = queries.shape[1] // keys.shape[1]
    out = torch.zeros(*queries.shape[:3], values.shape[3], dtype=torch.float64)
    lse = torch.zeros(queries.shape[:3], dtype=torch.float64)
    for head in range(queries.shape[1]):
        for row in range(queries.shape[2]):
            at = [k for k in range(first + row + 1) if sees(rule.visible, first + row, k)]
            logits = keys[0, head // group, at].double() @ queries[0, head, row].double() * 0.3
            if rule.softcap is not None:
                logits = rule.softcap * torch.tanh(logits / rule.softcap)
            more = logits if rule.sinks is None else torch.cat((logits, rule.sinks[head : head + 1].double()))
            lse[0, head, row] = more.logsumexp(0)
            weights = (logits - lse[0, head, row]).exp()
            out[0, head, row] = weights @ values[0, head // group, at].double()
    return out, lse


def sees(visible: Visible, query: int, key: int) -> bool:
    if visible.window is not None and query - key >= visible.window:
        return False
    return visible.function is None or bool(visible.function(0, 0, torch.tensor(query), torch.tensor(key)))


@pytest.mark.parametrize("backend", [FlashCPU(), Eager(), Math()])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("rows", "length", "width"), [(1, 40, 8), (5, 5, 8), (30, 70, 8), (30, 70, 4)])
def test_every_rule_is_what_it_says(backend: Any, rule: Rule, rows: int, length: int, width: int) -> None:
    torch.manual_seed(rows)
    queries, keys = torch.randn(1, 6, rows, 8), torch.randn(1, 2, length, 8)
    values = torch.randn(1, 2, length, width)
    out, lse = backend.attend(queries, keys, values, 0.3, rule)
    expected, expected_lse = by_definition(queries, keys, values, rule)
    assert out.shape == expected.shape and (out - expected).abs().max() < 1e-5
    assert (lse - expected_lse).abs().max() < 1e-5


@pytest.mark.parametrize("rule", RULES)
def test_rows_at_a_time_change_nothing(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(1, 6, 50, 8), torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 8)
    whole = FlashCPU().attend(queries, keys, values, 0.3, rule)
    monkeypatch.setattr("tidekv_cli.engine.attention._ROWS", 7)
    for one, other in zip(FlashCPU().attend(queries, keys, values, 0.3, rule), whole, strict=True):
        assert (one - other).abs().max() < 1e-6
