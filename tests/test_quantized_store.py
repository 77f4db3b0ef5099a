"""The quantised store: rounding within half a step, packing, bytes, and attention over what is stored."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tidekv_cli.engine.attention import PLAIN, Attention, Eager, Math, Rule
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.selectors import Selection
from tidekv_cli.engine.stores.dense import DenseStore
from tidekv_cli.engine.stores.low_bit import packed, quantised, restored, unpacked
from tidekv_cli.engine.stores.quantized import Quantized, QuantizedStore
from tidekv_cli.errors import ModelError, UsageError

SMALL = Quantized(4, 8, 16)


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def everything(count: int, heads: int) -> Selection:
    return Selection(torch.arange(count).expand(heads, -1))


def made(
    keys: Tensor, values: Tensor, slack: int = 0, kind: Quantized = SMALL, backend: Attention | None = None
) -> QuantizedStore:
    return kind(keys, values, everything(keys.shape[2], keys.shape[1]), slack, backend or FlashCPU())


def stored(store: QuantizedStore) -> tuple[Tensor, Tensor]:
    return store.rows(0, store.length)


def by_definition(rows: Tensor, bits: int, border: int, group: int, dim: int) -> Tensor:
    """What is stored of rows [Hkv, L, D], one group after another: dim 1 over tokens, 2 over channels."""
    out = rows.clone()
    for head in out:
        lines = head[:border].T if dim == 1 else head[:border]
        for line in lines:
            for start in range(0, len(line), group):
                part = line[start : start + group]
                codes, steps = quantised(part[None], bits, 1)
                assert int(codes.max()) < 1 << bits
                part.copy_(steps.zero.float()[0] + codes[0].float() * steps.scale.float()[0])
    return out


KINDS = {
    "random": drawn(40, 32),
    "constant": torch.full((40, 32), 1 / 3),
    "zero": torch.zeros(40, 32),
    "huge range": drawn(40, 32) * 10.0 ** drawn(40, 32, seed=1).mul(8).clamp(-30, 30),
    "tiny": drawn(40, 32) * 1e-36,
    "below normal": drawn(40, 32) * 1e-39,
    "far from zero": 1000 + drawn(40, 32) * 1e-3,
    "negative": -7 - drawn(40, 32).abs(),
    "powers of two": 2.0 ** torch.arange(-16, 16).expand(40, -1),
}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_within_half_a_step(kind: str, dtype: torch.dtype, bits: int) -> None:
    numbers = KINDS[kind].to(dtype).float()
    codes, steps = quantised(numbers, bits, 1)
    back = restored(codes, steps)
    assert steps.scale.dtype == steps.zero.dtype == torch.bfloat16 and back.isfinite().all()
    assert (steps.zero.float() <= numbers).all() and (steps.scale >= 0).all()
    half = steps.scale.double() / 2
    rounding = numbers.double().abs().amax(1, keepdim=True) * 2.0**-23  # of float32 itself
    assert ((back.double() - numbers.double()).abs() <= half + rounding + 2.0**-149).all()


def test_equal_numbers_come_back_as_they_are() -> None:
    for value in (0.0, 1.5, -3.0, 2.0**-30):
        codes, steps = quantised(torch.full((2, 32), value), 4, 1)
        assert (restored(codes, steps) == value).all() and (steps.scale == 0).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packing(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, 5, 48), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    rows = packed(codes, bits)
    assert rows.shape == (3, 5, 48 * bits // 8) and rows.dtype == torch.uint8
    assert torch.equal(unpacked(rows, bits), codes)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 100])
def test_what_is_stored(length: int, bits: int) -> None:
    """Keys S mod R as they are, values the last R; groups of 8 tokens or channels."""
    keys, values = drawn(1, 2, length, 24), drawn(1, 2, length, 16, seed=1)
    found = stored(made(keys, values, kind=Quantized(bits, 8, 16)))
    assert torch.equal(found[0][0], by_definition(keys[0], bits, length - length % 16, 8, 1))
    assert torch.equal(found[1][0], by_definition(values[0], bits, max(length - 16, 0), 8, 2))


def test_kept_rows_of_a_longer_prompt() -> None:
    keys, values = drawn(1, 2, 90, 24), drawn(1, 2, 90, 16, seed=1)
    draw = torch.Generator().manual_seed(2)
    indices = torch.stack([torch.randperm(90, generator=draw)[:50].sort().values for _ in range(2)])
    store = SMALL(keys, values, Selection(indices), 3, FlashCPU())
    picked = [torch.stack([rows[0, h, indices[h]] for h in range(2)])[None] for rows in (keys, values)]
    assert store.length == store.prompt_length == 50
    assert all(torch.equal(a, b) for a, b in zip(stored(store), stored(made(*picked)), strict=True))


def test_many_rows_are_taken_some_at_a_time() -> None:
    """The same, and no second copy in full precision."""
    keys, values = drawn(1, 2, 9000, 32), drawn(1, 2, 9000, 32, seed=1)
    meter = LiveMeter()
    meter.watch([keys, values])
    with meter:
        store = made(keys, values)
    assert meter.live["cache"] == store.nbytes
    assert meter.peak_bytes - 2 * keys.nbytes - store.nbytes < keys.nbytes
    assert torch.equal(stored(store)[0][0], by_groups(keys[0], 9000 // 16 * 16))


def by_groups(keys: Tensor, border: int) -> Tensor:
    codes, steps = quantised(keys[:, :border].unflatten(1, (-1, 8)), 4, 2)
    return torch.cat((restored(codes, steps).flatten(1, 2), keys[:, border:]), 1)


@pytest.mark.parametrize("slack", [0, 7, 100])
@pytest.mark.parametrize("sizes", [[1] * 70, [5] * 14, [40, 1, 29], [70]])
def test_appended_rows_are_as_if_there_from_the_start(sizes: list[int], slack: int) -> None:
    keys, values = drawn(1, 2, 90, 24), drawn(1, 2, 90, 16, seed=1)
    store = made(keys[:, :, :20], values[:, :, :20], slack)
    before, length = store.nbytes, 20
    for size in sizes:
        part = slice(length, length + size)
        store.append(keys[:, :, part], values[:, :, part])
        store.attend(drawn(1, 2, size, 24), 0.3, PLAIN)
        length += size
        whole = made(keys[:, :, :length], values[:, :, :length])
        assert all(torch.equal(a, b) for a, b in zip(stored(store), stored(whole), strict=True))
    assert store.length == 90 and store.prompt_length == 20
    assert (store.nbytes == before) == (slack == 100)


SINKS = torch.linspace(-1.0, 2.0, 6)
RULES = [PLAIN, Rule(softcap=1.5), Rule(sinks=SINKS), Rule(Visible(5), 1.5, SINKS)]


@pytest.mark.parametrize("backend", [FlashCPU(), Math(), Eager()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("length", "new"), [(3, 1), (16, 1), (100, 1), (95, 7), (60, 40), (4100, 1), (2060, 300)])
def test_attention_over_what_is_stored(length: int, new: int, rule: Rule, backend: Attention) -> None:
    """Over several parts, with fewer and more new rows than the residual has, for queries in one block and in two."""
    keys, values = drawn(1, 2, length + new, 24), drawn(1, 2, length + new, 16, seed=1)
    store = made(keys[:, :, :length], values[:, :, :length], new, backend=backend)
    store.append(keys[:, :, length:], values[:, :, length:])
    queries = drawn(1, 6, new, 24, seed=2)
    expected = Eager().attend(queries, *stored(store), 0.3, Rule(softcap=rule.softcap, sinks=rule.sinks))[0]
    assert torch.allclose(store.attend(queries, 0.3, rule), expected, atol=1e-5)


def test_half_precision() -> None:
    keys, values = drawn(1, 2, 5000, 32, dtype=torch.bfloat16), drawn(1, 2, 5000, 32, seed=1, dtype=torch.bfloat16)
    store = made(keys, values, 1)
    store.append(keys[:, :, :1], values[:, :, :1])
    queries = drawn(1, 4, 1, 32, seed=2, dtype=torch.bfloat16)
    out, rows = store.attend(queries, 0.3, PLAIN), stored(store)
    assert out.dtype == rows[0].dtype == torch.bfloat16
    assert torch.allclose(out.float(), Eager().attend(queries.float(), *(r.float() for r in rows), 0.3)[0], atol=1e-2)


def test_more_bits_are_closer() -> None:
    keys, values = drawn(1, 2, 600, 64), drawn(1, 2, 600, 64, seed=1)
    queries = drawn(1, 4, 1, 64, seed=2)
    expected = Eager().attend(queries, keys, values, 0.125)[0]
    off = [
        float((made(keys, values, kind=Quantized(bits)).attend(queries, 0.125, PLAIN) - expected).abs().max())
        for bits in (2, 4, 8)
    ]
    assert off[0] > 3 * off[1] > 9 * off[2] and off[2] < 2e-3


@pytest.mark.parametrize(("group", "most"), [(32, 0.33), (64, 0.30)])
def test_bytes(group: int, most: float) -> None:
    rows = torch.zeros(1, 8, 4096, 128, dtype=torch.bfloat16)
    dense = DenseStore(rows, rows, everything(4096, 8), 0, FlashCPU())
    store = made(rows, rows, kind=Quantized(4, group))
    assert store.nbytes <= most * dense.nbytes
    entries, residual = 8 * 128 * (4096 + 4096 - 128), 8 * 128 * 128 * 2
    assert store.nbytes == entries // 2 + entries // group * 4 + residual


def test_bytes_are_constant_within_the_slack() -> None:
    keys = drawn(1, 2, 200, 16)
    store = made(keys[:, :, :50], keys[:, :, :50], 150)
    before, meter = store.nbytes, LiveMeter()
    for at in range(50, 200):
        with meter:
            store.append(keys[:, :, at : at + 1], keys[:, :, at : at + 1])
    assert store.nbytes == before and meter.live["cache"] == 0


@pytest.mark.parametrize(("size", "group"), [(80, 20), (96, 32), (24, 24), (88, 22)])
def test_head_sizes_that_the_group_does_not_divide(size: int, group: int) -> None:
    values = drawn(1, 1, 150, size)
    store = made(values, values, kind=Quantized(4, 32, 64))
    assert torch.equal(stored(store)[1][0], by_definition(values[0], 4, 150 - 64, group, 2))


@pytest.mark.parametrize(
    ("bits", "group", "residual"), [(3, 32, 128), (0, 32, 128), (4, 0, 128), (4, 32, 100), (4, 32, 0), (4, 64, 32)]
)
def test_impossible_settings(bits: int, group: int, residual: int) -> None:
    with pytest.raises(UsageError):
        Quantized(bits, group, residual)


def test_what_is_refused() -> None:
    odd = drawn(1, 1, 40, 5)
    with pytest.raises(ModelError, match="heads of 5 numbers"):
        made(odd, odd)
    assert made(odd, odd, kind=Quantized(8, 8, 16)).length == 40
    rows = drawn(1, 1, 40, 8)
    with pytest.raises(NotImplementedError):
        made(rows, rows).trim(everything(3, 1))
    with pytest.raises(AssertionError):
        SMALL(rows, rows, Selection(torch.arange(3), None, (3,)), 0, FlashCPU())


@pytest.mark.parametrize("backend", [FlashCPU(), Math(), Eager()], ids=lambda backend: backend.name)
def test_on_fake_tensors_as_on_real_ones(backend: Attention) -> None:
    """Live bytes while a store is made, filled up and asked are the same."""
    peaks = []
    for mode in (FakeTensorMode(), nullcontext()):
        meter = LiveMeter()
        with mode:
            keys, values = torch.zeros(2, 1, 2, 5000, 32).unbind()
            queries, new = torch.zeros(1, 4, 1, 32), torch.zeros(1, 2, 1, 32)
            with meter:
                store = made(keys, values, 40, backend=backend)
                store.pretend(38)
                store.append(new, new)
                out = store.attend(queries, 0.3, PLAIN)
        peaks.append((meter.peak_bytes, meter.live["cache"], out.shape))
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("bits", [2, 4])
def test_new_rows_are_not_rounded_before_their_queries_are_answered(bits: int) -> None:
    """However a text is cut: what is among the newest rows of a query is as it was given."""
    keys, values, queries = drawn(1, 2, 44, 24), drawn(1, 2, 44, 16, seed=1), drawn(1, 2, 40, 24, seed=2)
    exact = Eager().attend(queries, keys, values, 0.3)[0]
    kind = Quantized(bits=bits, group=8, residual=16)
    rows = Selection(torch.arange(4).expand(2, -1))
    store = kind(keys[:, :, :4], values[:, :, :4], rows, 40, FlashCPU())
    store.append(keys[:, :, 4:], values[:, :, 4:])
    assert torch.allclose(store.attend(queries, 0.3, PLAIN), exact, atol=1e-5)
    store.append(keys[:, :, :1], values[:, :, :1])
    all_keys, all_values = (torch.cat((rows, rows[:, :, :1]), 2) for rows in (keys, values))
    again = Eager().attend(queries[:, :, :1], all_keys, all_values, 0.3)[0]
    assert not torch.allclose(store.attend(queries[:, :, :1], 0.3, PLAIN), again, atol=1e-3)
