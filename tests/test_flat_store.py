"""The flat store: heads that keep different numbers of rows, against plain attention over one head after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tidekv_cli.engine.attention import PLAIN, Attention, Eager, Math, Rule
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.selectors import Selection
from tidekv_cli.engine.stores.dense import Dense
from tidekv_cli.engine.stores.flat import Flat, FlatStore

Rows = list[tuple[Tensor, Tensor]]  # of each KV head its keys and values
SINKS = torch.linspace(-1.0, 2.0, 12)
RULES = [PLAIN, Rule(softcap=1.5), Rule(sinks=SINKS), Rule(Visible(5000), 1.5, SINKS)]
COUNTS = [
    (40, 7, 130, 64),
    (128, 128, 128, 128),
    (1, 1, 1, 1),
    (127, 128, 129, 300),
    (0, 390, 2, 256),
    (70, 70, 70, 70),
]


class Case:
    """A store and, in plain lists, what it must hold."""

    def __init__(self, counts: tuple[int, ...] | None, slack: int = 3, dtype: torch.dtype = torch.float32) -> None:
        self._draw = torch.Generator().manual_seed(sum(counts or (1,)))
        self.heads, self.size, self.width, self.dtype = 4, 16, 8, dtype
        keys, values = self.drawn(self.heads, 400, self.size), self.drawn(self.heads, 400, self.width)
        chosen = [torch.randperm(400, generator=self._draw)[:n].sort().values for n in counts or (50,) * self.heads]
        kept = Selection(torch.stack(chosen)) if counts is None else Selection(torch.cat(chosen), None, counts)
        self.rows: Rows = [(keys[0, h, at], values[0, h, at]) for h, at in enumerate(chosen)]
        self.make: Callable[[Attention], FlatStore] = lambda backend: Flat()(keys, values, kept, slack, backend)

    def drawn(self, heads: int, count: int, size: int) -> Tensor:
        return torch.randn(1, heads, count, size, generator=self._draw).to(self.dtype)

    def append(self, store: FlatStore, count: int) -> None:
        new = self.drawn(self.heads, count, self.size), self.drawn(self.heads, count, self.width)
        store.append(*new)
        self.rows = [
            (torch.cat((keys, new[0][0, h])), torch.cat((values, new[1][0, h])))
            for h, (keys, values) in enumerate(self.rows)
        ]

    def expected(self, queries: Tensor, rule: Rule) -> Tensor:
        """A masked softmax of each query by itself, in float64."""
        out = torch.zeros(*queries.shape[:3], self.width, dtype=torch.float64)
        group, count = queries.shape[1] // self.heads, queries.shape[2]
        for head in range(queries.shape[1]):
            keys, values = (rows.double() for rows in self.rows[head // group])
            for row in range(count):
                seen = torch.arange(len(keys)) <= len(keys) - count + row
                logits = keys @ queries[0, head, row].double() * 0.3
                if rule.softcap is not None:
                    logits = rule.softcap * (logits / rule.softcap).tanh()
                logits = logits.masked_fill(~seen, float("-inf"))
                total = logits.exp().sum() + (0 if rule.sinks is None else rule.sinks[head].double().exp())
                out[0, head, row] = logits.exp() @ values / total
        return out


@pytest.mark.parametrize("backend", [FlashCPU(), Math(), Eager()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("counts", [*COUNTS, None])
def test_attention_over_ragged_heads(counts: tuple[int, ...] | None, backend: Attention) -> None:
    """One and several new queries, grouped and not, and more new rows than there is room for."""
    case = Case(counts)
    store = case.make(backend)
    for count, group in ((1, 3), (1, 1), (4, 3), (1, 2), (40, 1)):
        case.append(store, count)
        queries = case.drawn(case.heads * group, count, case.size)
        assert torch.allclose(store.attend(queries, 0.3, PLAIN).double(), case.expected(queries, PLAIN), atol=1e-5)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 5, 33])
def test_rules(rule: Rule, count: int) -> None:
    """A window is longer than there are tokens where such a layer has a store: it hides nothing."""
    case = Case((40, 7, 130, 64))
    store = case.make(FlashCPU())
    case.append(store, count)
    queries = case.drawn(12, count, case.size)
    assert torch.allclose(store.attend(queries, 0.3, rule).double(), case.expected(queries, rule), atol=1e-5)


def test_a_window_is_not_of_rows() -> None:
    """What is kept of a longer prompt may be more rows than a window that hides no token has."""
    case = Case((300, 300, 300, 300))
    store = case.make(FlashCPU())
    case.append(store, 1)
    queries = case.drawn(4, 1, case.size)
    assert torch.equal(store.attend(queries, 0.3, Rule(Visible(100))), store.attend(queries, 0.3, PLAIN))


def test_half_precision() -> None:
    case = Case((200, 7, 130, 64), dtype=torch.bfloat16)
    store = case.make(FlashCPU())
    case.append(store, 3)
    queries = case.drawn(12, 3, case.size)
    out = store.attend(queries, 0.3, PLAIN)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), case.expected(queries, PLAIN), atol=2e-2)


@pytest.mark.parametrize("slack", [0, 5])
@pytest.mark.parametrize("counts", [(40, 0, 8, 72), (63, 64, 65, 200)])
def test_bytes_and_lengths(counts: tuple[int, ...], slack: int) -> None:
    """Of rows and slack to the byte; offsets take the same however the rows are shared out, and little."""
    case = Case(counts, slack)
    store, total = case.make(FlashCPU()), sum(counts)
    assert store.length == store.prompt_length == total // 4
    rows = (total + 4 * slack) * (16 + 8) * 4
    offsets = 8 * (total // 128) + 4 * (1 + total // 128 + 4 * 127)
    assert store.nbytes == rows + offsets
    even = (total // 4,) * 4
    assert Case(even, slack).make(FlashCPU()).nbytes == store.nbytes
    before = store.nbytes
    case.append(store, max(slack, 1))
    assert store.length == total // 4 + max(slack, 1) and store.prompt_length == total // 4
    assert (store.nbytes == before) == (slack > 0)
    store.pretend(7)
    assert store.length == total // 4 + max(slack, 1) + 7


def test_bytes_are_booked_as_cache() -> None:
    case, meter = Case((63, 64, 65, 200)), LiveMeter()
    with meter:
        store = case.make(FlashCPU())
        store.trim(Selection(torch.arange(60).repeat(4), None, (60,) * 4))
    assert meter.live["cache"] == store.nbytes


@pytest.mark.parametrize("kept", [(30, 7, 129, 1), (40, 0, 130, 64)])
def test_trim(kept: tuple[int, ...]) -> None:
    """Row numbers are of the head; twice in a row, and then new tokens."""
    case = Case((40, 7, 130, 64))
    store, slack_bytes = case.make(FlashCPU()), 4 * 3 * 24 * 4
    for counts in (kept, tuple(n // 2 for n in kept)):
        picked = [torch.randperm(len(rows[0]))[:n].sort().values for rows, n in zip(case.rows, counts, strict=True)]
        store.trim(Selection(torch.cat(picked), None, counts))
        case.rows = [(keys[at], values[at]) for (keys, values), at in zip(case.rows, picked, strict=True)]
        assert store.prompt_length == store.length == sum(counts) // 4
        offsets = 8 * (sum(counts) // 128) + 4 * (1 + sum(counts) // 128 + 4 * 127)
        assert store.nbytes == sum(counts) * 24 * 4 + slack_bytes + offsets
    case.append(store, 2)
    queries = case.drawn(8, 2, case.size)
    assert torch.allclose(store.attend(queries, 0.3, PLAIN).double(), case.expected(queries, PLAIN), atol=1e-5)


def test_trim_of_heads_that_are_alike() -> None:
    case = Case(None)
    store = case.make(FlashCPU())
    rows = torch.arange(0, 50, 2).expand(4, -1)
    store.trim(Selection(rows))
    case.rows = [(keys[::2], values[::2]) for keys, values in case.rows]
    case.append(store, 1)
    queries = case.drawn(4, 1, case.size)
    assert torch.allclose(store.attend(queries, 0.3, PLAIN).double(), case.expected(queries, PLAIN), atol=1e-5)


def test_a_trim_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case((40, 7, 130, 64))
    store = case.make(FlashCPU())
    case.append(store, 1)
    queries = case.drawn(4, 1, case.size)
    before, held = store.attend(queries, 0.3, PLAIN), store.nbytes
    stay = Selection(torch.arange(5).repeat(4), None, (5,) * 4)
    select, calls = torch.index_select, iter(range(100))

    def failing(*args: object, **more: object) -> Tensor:
        if next(calls) == 11:  # among the values
            raise MemoryError
        return select(*args, **more)

    monkeypatch.setattr(torch, "index_select", failing)
    with pytest.raises(MemoryError):
        store.trim(stay)
    monkeypatch.undo()
    assert torch.equal(store.attend(queries, 0.3, PLAIN), before) and store.nbytes == held
    store.trim(stay)
    assert store.prompt_length == 5


@pytest.mark.parametrize("backend", [FlashCPU(), Math(), Eager()], ids=lambda backend: backend.name)
def test_on_fake_tensors_as_on_real_ones(backend: Attention) -> None:
    """Live bytes while a store is made, trimmed and asked are the same."""
    peaks = []
    for mode in (FakeTensorMode(), None):
        meter = LiveMeter()
        if mode is not None:
            mode.__enter__()
        keys, values = torch.empty(2, 1, 4, 400, 16).unbind()
        kept = Selection(torch.zeros(800, dtype=torch.long), None, (200,) * 4)
        stay = Selection(torch.zeros(600, dtype=torch.long), None, (150,) * 4)
        queries, new = torch.empty(1, 8, 1, 16), torch.empty(1, 4, 1, 16)
        with meter:
            store = Flat()(keys, values, kept, 9, backend)
            store.trim(stay)
            store.pretend(4)
            store.append(new, new)
            out = store.attend(queries, 0.3, PLAIN)
        peaks.append((meter.peak_bytes, meter.live["cache"]))
        assert out.shape == (1, 8, 1, 16)
        if mode is not None:
            mode.__exit__(None, None, None)
    assert peaks[0] == peaks[1]


def test_dense_is_made_alike() -> None:
    keys = torch.randn(1, 2, 20, 8)
    store = Dense()(keys, keys, Selection(torch.tensor([[0, 5], [1, 2]])), 1, FlashCPU())
    assert store.prompt_length == 2 and torch.equal(store.keys[0, 1], keys[0, 1, 1:3])
