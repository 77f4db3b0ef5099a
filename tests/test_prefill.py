"""What is always true of a prefill: kept rows, budgets, short prompts, schedules, and what stays alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.planning import uniform
from tests.references import (
    Recorder,
    dense_scores,
    heads_that_differ,
    plain_logits,
    plain_scores,
    plain_steps_with_kept_rows,
    storage_bytes,
)
from tidekv_cli.engine.chunks import chunk_borders
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import LayerMajorPrefill, PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors.keep_all import KeepAll
from tidekv_cli.engine.selectors.recent import Recent
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session

SCHEDULES = ["tide", "oneshot"]
SELECTORS = [SnapKV(window=8), SnapKV(window=8, sinks=3, pool="avg", pool_kernel=5), Recent(), Recent(sinks=4)]


def settings(selector: Any, budget: int, chunk: int = 32, schedule: str = "tide", slack: int = 4) -> PrefillSettings:
    return PrefillSettings(schedule, selector, uniform(budget), FlashCPU(), chunk, 64, slack)


def random_ids(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def test_chunk_borders() -> None:
    assert chunk_borders(10, 4, 8) == [(0, 4), (4, 8), (8, 10)]
    assert chunk_borders(10, 4, 7) == [(0, 4), (4, 7), (7, 10)]
    assert chunk_borders(10, 2, 5) == [(0, 2), (2, 4), (4, 5), (5, 7), (7, 9), (9, 10)]
    assert chunk_borders(1, 512, 0) == [(0, 1)]
    assert chunk_borders(5, 5, 0) == [(0, 5)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("selector", SELECTORS, ids=str)
@pytest.mark.parametrize("chunk", [5, 32, 200])
def test_kept_rows_are_rows_of_the_full_cache(
    tiny_model: Callable[..., Any], selector: Any, chunk: int, schedule: str
) -> None:
    session, ids = Session(tiny_model(), frozenset()), random_ids(200)
    full, _ = session.prefill(ids, settings(selector, 200, chunk, schedule))
    evicted, _ = session.prefill(ids, settings(selector, 40, chunk, schedule))
    assert sum(store.length for store in evicted.cache) == 40 * 2
    for whole, store, kept in zip(full.cache, evicted.cache, evicted.kept, strict=True):
        assert kept.shape == (2, 40) and (kept.diff() > 0).all()
        sinks = getattr(selector, "sinks", 0)
        assert (kept[:, :sinks] == torch.arange(sinks)).all()
        recent = max(selector.window, 1)
        assert (kept[:, -recent:] == torch.arange(200 - recent, 200)).all()
        for head in range(2):
            assert torch.equal(store.keys[0, head], whole.keys[0, head, kept[head]])
            assert torch.equal(store.values[0, head], whole.values[0, head, kept[head]])
    assert torch.equal(full.logits, evicted.logits)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("selector", SELECTORS, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_smallest_and_largest_budgets(
    tiny_model: Callable[..., Any], selector: Any, kv_heads: int, schedule: str
) -> None:
    session, ids = Session(tiny_model(num_key_value_heads=kv_heads), frozenset()), random_ids(60)
    full, _ = session.prefill(ids, settings(selector, 60, schedule=schedule))
    for budget in (selector.mandatory_tokens, selector.mandatory_tokens + 1, 59, 60, 61):
        evicted, _ = session.prefill(ids, settings(selector, budget, schedule=schedule))
        for whole, store, kept in zip(full.cache, evicted.cache, evicted.kept, strict=True):
            assert kept.shape == (kv_heads, min(budget, 60)) and (kept.diff() > 0).all()
            for head in range(kv_heads):
                assert torch.equal(store.keys[0, head], whole.keys[0, head, kept[head]])
                assert torch.equal(store.values[0, head], whole.values[0, head, kept[head]])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("selector", [*SELECTORS, KeepAll()], ids=str)
def test_short_prompts(tiny_model: Callable[..., Any], selector: Any, schedule: str) -> None:
    model = tiny_model()
    session = Session(model, frozenset())
    budget = 14
    for length in [*range(1, 8 + budget + 3)]:
        ids = random_ids(length)
        for chunk in (3, 512):
            prompt, _ = session.prefill(
                ids, settings(selector, 10**6 if selector == KeepAll() else budget, chunk, schedule)
            )
            expected = length if selector == KeepAll() else min(length, budget)
            assert [store.length for store in prompt.cache] == [expected] * 2
            logits = plain_logits(model, ids)
            assert ((prompt.logits - logits).abs().max() / logits.abs().max()).item() <= 1e-5
            assert len(list(session.generate(prompt, SamplingSettings(), 2))) == 2


@pytest.mark.parametrize(("schedule", "chunk"), [("tide", 5), ("tide", 64), ("tide", 300), ("oneshot", 64)])
@pytest.mark.parametrize(("pooling", "kernel"), [("max", 7), ("avg", 5)])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_what_is_kept_is_what_the_plain_model_attends_to(
    tiny_model: Callable[..., Any], model_type: str, pooling: Any, kernel: int, chunk: int, schedule: str
) -> None:
    model, ids, window = tiny_model(model_type), random_ids(300), 8
    exact = plain_scores(model, ids, window, kernel, pooling)
    recorder = Recorder(SnapKV(window=window, pool=pooling, pool_kernel=kernel))
    prompt, _ = Session(model, frozenset()).prefill(ids, settings(recorder, 60, chunk, schedule))
    for scores, view, kept in zip(exact, recorder.views, prompt.kept, strict=True):
        assert view.observation is not None and view.observation.queries.shape == (4, window, 16)
        prefix = len(ids) - window
        noise = (dense_scores(view.keys, view.observation, prefix, kernel, pooling) - scores).abs().max()
        assert noise <= 1e-5 * scores.max()
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, kept[:, :-window], True)
        worst = scores.masked_fill(~chosen, float("inf")).amin(1)
        assert (worst >= scores.masked_fill(chosen, 0.0).amax(1) - 2 * noise).all()


def test_kept_sets_across_chunk_sizes_and_schedules(tiny_model: Callable[..., Any]) -> None:
    session, ids = Session(tiny_model(), frozenset()), random_ids(700)
    runs = []
    for schedule, chunk in (("tide", 64), ("tide", 5), ("tide", 333), ("tide", 700), ("oneshot", 64)):
        runs.append(Recorder(SnapKV()))
        session.prefill(ids, settings(runs[-1], 100, chunk, schedule))
    for other in runs[1:]:
        assert heads_that_differ(runs[0], other)[0] == 0


@pytest.mark.parametrize("selector", SELECTORS, ids=str)
def test_decoding_after_eviction_equals_eviction_in_the_plain_model(
    tiny_model: Callable[..., Any], selector: Any
) -> None:
    model, ids = tiny_model(), random_ids(120)
    session = Session(model, frozenset())
    prompt, _ = session.prefill(ids, settings(selector, 30))
    adapter = session.adapter
    tokens = random_ids(6, seed=3)  # two more than the slack
    adapter.bind(prompt.cache)
    for count, expected in enumerate(plain_steps_with_kept_rows(model, ids, prompt.kept, tokens)):
        with torch.no_grad():
            found = adapter.step(torch.tensor([[tokens[count]]]), len(ids) + count)
        assert ((found - expected).abs().max() / expected.abs().max()).item() <= 1e-5
        assert [store.length for store in prompt.cache] == [31 + count] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_but_the_result_stays_alive(tiny_model: Callable[..., Any], schedule: str) -> None:
    model = tiny_model()
    session, ids = Session(model, frozenset()), torch.tensor([random_ids(300)])
    meter = LiveMeter()
    meter.watch([ids, *model.parameters(), *model.buffers()])
    before = meter.live_bytes
    with meter:
        prompt = LayerMajorPrefill(session.adapter, ids, settings(SnapKV(), 64, 32, schedule)).run()
    held = sum(store.nbytes for store in prompt.cache) + storage_bytes([*prompt.kept, prompt.logits])
    assert meter.live_bytes - before == held


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layer", [0, 1])
def test_a_failed_prefill_leaves_nothing_alive(tiny_model: Callable[..., Any], schedule: str, layer: int) -> None:
    model = tiny_model()
    session, ids = Session(model, frozenset()), torch.tensor([random_ids(300)])
    meter = LiveMeter()
    meter.watch([ids, *model.parameters(), *model.buffers()])
    before = meter.live_bytes

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken layer")

    hook = model.model.layers[layer].mlp.register_forward_pre_hook(fail)
    with meter:
        try:
            LayerMajorPrefill(session.adapter, ids, settings(SnapKV(), 64, 32, schedule)).run()
        except RuntimeError as error:
            assert str(error) == "broken layer"
        else:
            pytest.fail("the layer did not run")
    hook.remove()
    assert meter.peak_bytes > before and meter.live_bytes == before


def test_only_bridge_and_active_kv_grow_with_the_prompt(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    session = Session(model, frozenset())

    def peak(length: int) -> int:
        return session.prefill(random_ids(length), settings(SnapKV(), 64, 32))[1]

    token = 64 * 4 + 2 * 2 * 16 * 4 + 8  # bridge row, K and V rows of 2 heads, id
    assert peak(1600) - peak(800) == 800 * token


def test_the_second_prompt_is_what_a_fresh_session_gives(tiny_model: Callable[..., Any]) -> None:
    used = Session(tiny_model(), frozenset())
    used.prefill(random_ids(500), settings(SnapKV(), 64))
    again, again_peak = used.prefill(random_ids(90, seed=1), settings(SnapKV(), 48))
    fresh, fresh_peak = Session(tiny_model(), frozenset()).prefill(random_ids(90, seed=1), settings(SnapKV(), 48))
    assert torch.equal(again.logits, fresh.logits) and again_peak == fresh_peak
    assert all(torch.equal(a, b) for a, b in zip(again.kept, fresh.kept, strict=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_progress_reaches_its_total(tiny_model: Callable[..., Any], schedule: str) -> None:
    seen: list[tuple[int, int]] = []
    Session(tiny_model(), frozenset()).prefill(
        random_ids(100), settings(SnapKV(), 64, 32, schedule), lambda done, total: seen.append((done, total))
    )
    assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
    assert seen[-1] == (len(seen), len(seen))


def test_memory_is_asked_for_again_once_what_is_unused_is_given_back(tiny_model: Callable[..., Any]) -> None:
    session, ids = Session(tiny_model(), frozenset()), list(range(1, 101))
    for schedule in ("tide", "oneshot"):
        said = iter(["only a little is left"])
        case = PrefillSettings(schedule, SnapKV(8), uniform(200), FlashCPU(), 32, 64, 4)
        prompt, _ = session.prefill(ids, case, shortage=lambda tokens, said=said: next(said, None))
        assert prompt.lowered == ()


def test_no_window_is_passed_that_hid_nothing_so_far(tiny_model: Callable[..., Any]) -> None:
    """What was kept under it would be seen for ever."""
    session = Session(tiny_model("mistral", sliding_window=64), frozenset())
    case = PrefillSettings("tide", SnapKV(8), uniform(20), FlashCPU(), 32, 64, 4)
    prompt, _ = session.prefill(list(range(1, 51)), case)
    session.follow(prompt, [1, 2, 3, 4])
    with pytest.raises(ValueError, match="more than the 54"):
        session.follow(prompt, [5])
