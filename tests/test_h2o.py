"""Column sums equal the whole matrix's, whatever the chunks, and H2O keeps the newest rows and those of highest sum."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.planning import method, plan_settings, uniform
from tests.references import storage_bytes
from tests.references_selectors import (
    BLOCKS,
    KINDS,
    SHAPES,
    attention_logits,
    check_whole_runs,
    dense_column_sums,
    dense_h2o,
    layer,
    prefilled,
    random_ids,
)
from tidekv_cli.assembly import engine_settings
from tidekv_cli.engine.backends import attention_backend
from tidekv_cli.engine.budgets.ada import AdaHeads
from tidekv_cli.engine.column_sums import ColumnSums
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.observation import Observation
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.selectors import LayerView
from tidekv_cli.engine.selectors.h2o import H2O
from tidekv_cli.engine.session import Session
from tidekv_cli.errors import UsageError
from tidekv_cli.simulate import simulate

MIB = 1 << 20


def caught(view: LayerView, borders: list[int], softcap: float | None = None) -> tuple[Tensor, Tensor]:
    """Column sums of a prompt caught in chunks, and those of the whole matrix."""
    seen, keys = view.observation, view.keys
    assert seen is not None
    length = keys.shape[1]
    lse = attention_logits(seen.queries, keys, seen.scale, softcap).logsumexp(-1).float()
    observer = ColumnSums(length)
    for start, stop in zip([0, *borders], [*borders, length], strict=True):
        queries = seen.queries[None, :, start:stop]
        observer.catch(queries, keys[None, :, :stop], lse[None, :, start:stop], start, seen.scale, softcap)
    taken = observer.take()
    assert taken.column_sums is not None and taken.column_sums.dtype == torch.float32
    return taken.column_sums, dense_column_sums(seen.queries, keys, lse, seen.scale, softcap)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "huge"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("case", range(2))
def test_sums_equal_those_of_the_whole_matrix(
    kind: str, shape: tuple[int, int], softcap: float | None, case: int
) -> None:
    draw = random.Random(f"{kind} {shape} {softcap} {case}")
    length = draw.choice([draw.randrange(1, 40), draw.randrange(200, 600)])
    view = layer(case, length, shape, length, kind)
    for chunks in (0, 1, 4):
        borders = sorted(draw.sample(range(1, length), min(chunks, length - 1)))
        found, expected = caught(view, borders, softcap)
        assert torch.allclose(found.double(), expected, rtol=3e-5, atol=1e-7)
        assert found.sum().item() == pytest.approx(shape[0] * shape[1] * length, rel=1e-4)


@pytest.mark.parametrize("limits", [(1 << 12, 64), (1 << 22, 1024), (1, 1)])
def test_sums_do_not_depend_on_the_parts(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    view = layer(0, 300, (2, 2), 300, "plain")
    monkeypatch.setattr("tidekv_cli.engine.column_sums._LOGITS", limits[0])
    monkeypatch.setattr("tidekv_cli.engine.column_sums._BLOCK", limits[1])
    found, expected = caught(view, [130])
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_huge_logits_give_numbers() -> None:
    """If not the right ones: float32 knows a logit of 1e9 to 64, so a weight may come out as infinite."""
    found, _ = caught(layer(0, 120, (2, 2), 120, "huge"), [50])
    assert not found.isnan().any()


def test_a_chunk_that_is_caught_again_counts_once() -> None:
    view = layer(1, 200, (2, 2), 200, "plain")
    seen = view.observation
    assert seen is not None and seen.lse is not None
    observer = ColumnSums(200)

    def catch(start: int, stop: int) -> None:
        assert seen is not None and seen.lse is not None
        own = slice(start, stop)
        observer.catch(seen.queries[None, :, own], view.keys[None, :, :stop], seen.lse[None, :, own], start, seen.scale)

    expected = dense_column_sums(seen.queries, view.keys, seen.lse, seen.scale)
    for _ in range(2):  # the second layer starts empty
        for start, stop in ((0, 80), (0, 40), (40, 80), (80, 180), (80, 180), (80, 130), (130, 200), (130, 200)):
            catch(start, stop)
        sums = observer.take().column_sums
        assert sums is not None and torch.allclose(sums.double(), expected, rtol=1e-5, atol=1e-7)


def test_what_fails_for_want_of_memory_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    view = layer(2, 90, (1, 2), 90, "plain")
    seen = view.observation
    assert seen is not None and seen.lse is not None
    observer = ColumnSums(90)
    expected = dense_column_sums(seen.queries, view.keys, seen.lse, seen.scale)

    def failing(*_: Any) -> None:
        raise MemoryError

    for start, stop in ((0, 30), (30, 60), (60, 90)):
        own = slice(start, stop)
        chunk = seen.queries[None, :, own], view.keys[None, :, :stop], seen.lse[None, :, own], start, seen.scale
        with monkeypatch.context() as patch:
            patch.setattr("tidekv_cli.engine.column_sums._among_themselves", failing)
            with pytest.raises(MemoryError):
                observer.catch(*chunk)
        observer.catch(*chunk)
    sums = observer.take().column_sums
    assert sums is not None and torch.allclose(sums.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [1, 100, 2048])
def test_logits_take_sixteen_mebibytes_at_most(count: int) -> None:
    with FakeTensorMode():
        keys = torch.empty(1, 8, 20_000, 128, dtype=torch.bfloat16)
        queries = torch.empty(1, 32, count, 128, dtype=torch.bfloat16)
        lse = torch.empty(1, 32, count)
        observer, meter = ColumnSums(20_000), LiveMeter()
        meter.watch([keys, queries, lse])
        before = meter.live_bytes
        with meter:
            observer.catch(queries, keys, lse, 20_000 - count, 0.1)
    sums = 8 * 20_000 * 4
    assert meter.peak_bytes - before < 16 * MIB + 2 * sums + 12 * MIB  # keys and queries in float32, and scores
    assert meter.live_bytes - before == sums


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", range(15))
def test_kept_sets_equal_the_reference(shape: tuple[int, int], case: int) -> None:
    draw = random.Random(f"{shape} {case}")
    torch.manual_seed(case)
    length, recent = draw.randrange(1, 300), draw.choice([0.0, 0.1, 0.5, 0.9, 1.0])
    budget = draw.randrange(1, length + 1)
    sums = torch.rand(shape[0], length)
    if case % 3 == 1:
        sums = (5 * sums).floor()  # plateaus
    elif case % 3 == 2:
        sums[sums < 0.3] = float("nan")
        sums[sums > 0.8] = float("inf")
    keys, nothing = torch.zeros(shape[0], length, 4), torch.zeros(shape[0] * shape[1], 0, 4)
    expected = dense_h2o(sums, budget, recent)
    for block in BLOCKS:
        seen = Observation(nothing, None, 1.0, None, sums.clone())
        kept = H2O(recent).select(LayerView(keys, seen, block), budget)
        assert torch.equal(kept.indices, expected), (block, length, budget, recent)


def test_heads_share_what_is_not_recent() -> None:
    sums = torch.tensor([[9.0, 8.0, 7.0, 6.0, 1.0, 1.0, 1.0, 1.0], [5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 9.0]])
    seen = Observation(torch.zeros(2, 0, 4), None, 1.0, None, sums)
    kept = AdaHeads(alpha=0.0).select(H2O(), LayerView(torch.zeros(2, 8, 4), seen, 3), 5)
    assert [rows.tolist() for rows in kept.by_head(kept.indices)] == [[0, 1, 2, 3, 6, 7], [0, 1, 6, 7]]
    assert kept.counts == (6, 4)


@pytest.mark.parametrize("recent", [-0.1, 1.5, float("nan")])
def test_impossible_values(recent: float) -> None:
    with pytest.raises(UsageError, match=f"recent={recent}"):
        H2O(recent)


def test_whole_prompts(tiny_model: Callable[..., Any]) -> None:
    check_whole_runs(tiny_model, H2O(), 1)


@pytest.mark.parametrize(("schedule", "chunk"), [("tide", 7), ("tide", 64), ("oneshot", 64)])
def test_what_is_kept_is_what_the_plain_model_attends_to(
    tiny_model: Callable[..., Any], schedule: str, chunk: int
) -> None:
    model, ids, budget = tiny_model(), random_ids(250), 60
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(input_ids=torch.tensor([ids]), output_attentions=True).attentions
    prompt = prefilled(model, ids, H2O(), budget, chunk, schedule)
    for layer_weights, kept in zip(weights, prompt.kept, strict=True):
        sums = layer_weights[0].double().sum(1).unflatten(0, (2, -1)).sum(1)[:, :220]
        assert (kept[:, 30:] == torch.arange(220, 250)).all()
        chosen = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, kept[:, :30], True)
        worst = sums.masked_fill(~chosen, float("inf")).amin(1)
        assert (worst >= sums.masked_fill(chosen, 0.0).amax(1) * (1 - 1e-4)).all()


def test_chunks_that_are_tried_again_change_nothing(tiny_model: Callable[..., Any]) -> None:
    """The highest moment of a chunk comes after its queries were seen, so they are seen again."""
    session, ids = Session(tiny_model(intermediate_size=2048), frozenset()), random_ids(1500)
    settings = PrefillSettings("tide", H2O(), uniform(100), FlashCPU(), 1024, 512, 4)
    plain, peak = session.prefill(ids, settings)
    lowered, _ = session.prefill(ids, settings, ceiling_bytes=peak - 2 * MIB)
    assert not plain.lowered and "chunk_size 1024 -> 512" in lowered.lowered[0]
    assert all(torch.equal(one, other) for one, other in zip(plain.kept, lowered.kept, strict=True))


def test_it_takes_hardly_more_than_snapkv() -> None:
    peaks = [
        max(sum(phase.values()) for phase in simulate(plan_settings(method=method("tide", name)), 65536, 512))
        for name in ("snapkv", "h2o")
    ]
    assert peaks[0] < peaks[1] <= peaks[0] + 64 * MIB


@pytest.mark.parametrize(("schedule", "chunk"), [("tide", 64), ("tide", 300), ("oneshot", 64)])
def test_a_real_run_takes_what_is_simulated(tiny_model: Callable[..., Any], schedule: str, chunk: int) -> None:
    model = tiny_model(num_hidden_layers=4)
    settings = plan_settings(
        model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]},
        method=method(schedule, "h2o"),
        dtype="float32",
        chunk_size=chunk,
        score_block=128,
        budget_tokens=80,
        device_kind="cpu",
    )
    engine = engine_settings(settings, 700, attention_backend("sdpa", "cpu"))
    _, live_peak = Session(model, frozenset()).prefill(random_ids(700), engine)
    simulated = max(sum(phase.values()) - phase["weights"] for phase in simulate(settings, 700)[:-1])
    assert live_peak - storage_bytes(model.parameters()) == pytest.approx(simulated, abs=512)


def test_the_part_of_the_budget_is_as_it_was_written() -> None:
    seen = Observation(torch.zeros(1, 0, 4), None, 1.0, None, torch.zeros(1, 300))
    view = LayerView(torch.zeros(1, 300, 4), seen, 64)
    assert [300 - H2O(part).rank(view, 100).stop for part in (0.29, 0.57, 0.5)] == [29, 57, 50]
