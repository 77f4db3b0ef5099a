"""Memory of token-major schedules: lines over the length, and what happens when it runs out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planning import GIB, llama_8b, marked, method, plan_settings
from tests.test_fitting import fitter
from tests.test_memory_model import check, drawn
from tests.test_out_of_memory import BUDGET, SAYINGS, FailAt, prompt_ids, same
from tests.test_out_of_memory import settings as out_of_memory_settings
from tidekv_cli.engine.session import Session
from tidekv_cli.errors import is_out_of_memory
from tidekv_cli.fitting import raising_flags
from tidekv_cli.memory_model import MemoryModel


@pytest.fixture(autouse=True)
def _short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is when memory is said to have run out."""
    monkeypatch.setattr("tidekv_cli.errors.memory_is_short", lambda: True)


@pytest.mark.parametrize("schedule", ["chunked", "online"])
@pytest.mark.parametrize("seed", [1, *marked(range(100, 120), 5)])
def test_lines_agree_with_simulation(schedule: str, seed: int) -> None:
    """Before the lines, just on them, and anywhere."""
    draw = random.Random(seed)
    settings = drawn(draw)
    settings = replace(settings, method=method(schedule, settings.method.selector), attention="sdpa")
    settings = replace(settings, budget_tokens=None) if schedule == "chunked" else settings
    start, step = MemoryModel(settings, None).lines
    for length in (draw.randrange(1, start), start + 1, start + 3 * step + 1, start + draw.randrange(60_000)):
        check(settings, length)


def test_what_a_token_of_the_prompt_takes() -> None:
    """Keys and values of 32 layers in the one, an id in the other."""
    whole = plan_settings(llama_8b(), method=method("chunked", "all"), budget_tokens=None, device_kind="cpu")
    online = plan_settings(llama_8b(), method=method("online"), device_kind="cpu")
    for settings, token in ((whole, 128 * 1024 + 8), (online, 8)):
        model = MemoryModel(settings, None)
        peaks = [sum(model.peak(length).values()) for length in (40_000, 41_000)]
        assert peaks[1] - peaks[0] == 1000 * token


@pytest.mark.parametrize("schedule", ["chunked", "online"])
@pytest.mark.parametrize("step", [35, pytest.param(7, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.long)])
def test_memory_that_runs_out_at_every_site(tiny_model: Callable[..., Any], schedule: str, step: int) -> None:
    """In the first chunk and in a later one. An answer in `chunked`, an error in `online`; then a right answer."""
    session, ids = Session(tiny_model(num_hidden_layers=3), frozenset()), prompt_ids()[:544]
    session.adapter.visibles()
    case = out_of_memory_settings(schedule)
    untouched = FailAt(0, MemoryError())
    with untouched:
        expected, _ = session.prefill(ids, case)
    half = len(untouched.sites) // 2
    first = {(number > half, *site): number for number, site in reversed(list(enumerate(untouched.sites, 1)))}
    assert len(first) > 80
    answers = tried = 0
    for number in sorted(first.values())[::step]:
        found, tried = None, tried + 1
        try:
            with FailAt(number, SAYINGS[number % len(SAYINGS)]):
                found, _ = session.prefill(ids, case)
        except (MemoryError, RuntimeError) as error:
            assert is_out_of_memory(error), number
        if found is not None:
            answers += 1
            assert same(found, expected), number
        again, _ = session.prefill(ids, case)
        assert torch.equal(again.logits, expected.logits), number
        assert all(torch.equal(a, b) for a, b in zip(again.kept, expected.kept, strict=True)), number
    assert tried >= 3
    # What is outside any chunk, as the ids, cannot be tried again.
    assert answers >= tried * 0.9 if schedule == "chunked" else answers == 0


def test_a_ceiling_is_met_with_a_smaller_chunk(tiny_model: Callable[..., Any]) -> None:
    session, ids = Session(tiny_model(num_hidden_layers=3, intermediate_size=512), frozenset()), prompt_ids()
    wide, most = session.prefill(ids, out_of_memory_settings("chunked"))
    narrow, least = session.prefill(ids, out_of_memory_settings("chunked", chunk=256))
    assert least < most and same(narrow, wide)
    seen: list[tuple[int, int]] = []
    found, peak = session.prefill(
        ids,
        out_of_memory_settings("chunked"),
        lambda done, total: seen.append((done, total)),
        ceiling_bytes=(least + most) // 2,
    )
    assert least <= peak <= (least + most) // 2 and same(found, wide) and seen[-1] == (4, 4)
    (lowered,) = found.lowered
    assert lowered.startswith("chunk_size 512 -> 256: ") and "bytes of live tensors are more than" in lowered
    with pytest.raises(MemoryError, match="live tensors"):
        session.prefill(ids, out_of_memory_settings("chunked"), ceiling_bytes=least - 1)
    assert same(session.prefill(ids, out_of_memory_settings("chunked"))[0], wide)


def test_online_does_not_change_its_chunk(tiny_model: Callable[..., Any]) -> None:
    session, ids = Session(tiny_model(num_hidden_layers=3), frozenset()), prompt_ids()
    case = out_of_memory_settings("online", chunk=300)
    expected, most = session.prefill(ids, case)
    with pytest.raises(MemoryError, match="live tensors"):
        session.prefill(ids, case, ceiling_bytes=most - 1)
    said = iter([None, "only a little is left", None, None])
    found, _ = session.prefill(ids, case, shortage=lambda tokens: next(said))  # once more after what is unused is back
    assert found.lowered == () and same(found, expected)
    with pytest.raises(MemoryError, match="nothing is left"):
        session.prefill(ids, case, shortage=lambda tokens: "nothing is left")
    assert all(store.length == BUDGET for store in found.cache)


@pytest.mark.slow
def test_what_is_lowered_to_fit(tmp_path: Path) -> None:
    """The chunk where it changes nothing else, never that of `online`."""
    chunked = plan_settings(llama_8b(), method=method("chunked", "all"), budget_tokens=None, free_bytes=16 * GIB)
    assert fitter(tmp_path, chunked, None).plan(chunked, 60_000).settings.chunk_size == 256
    online = plan_settings(llama_8b(), method=method("online"), free_bytes=15 * GIB)
    plan = fitter(tmp_path, online).plan(online, 60_000)
    assert plan.settings.chunk_size == 2048 and plan.settings.budget_tokens == 256


def test_what_is_offered_instead() -> None:
    """Another schedule, or another chunk, only where it ends with the same cache."""
    chunked = plan_settings(llama_8b(), method=method("chunked", "all"), budget_tokens=None)
    online = plan_settings(llama_8b(), method=method("online"))
    assert raising_flags(chunked) == ["--schedule tide", "--chunk-size 256"]
    assert raising_flags(online) == ["--budget 256"]
    assert raising_flags(replace(online, method=method("oneshot"))) == ["--schedule tide", "--budget 256"]
