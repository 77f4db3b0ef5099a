"""The embedded model, the real thing: equal to the plain model without eviction, to the dense reference with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning import marked, uniform
from tests.references import Recorder, dense_snapkv, heads_that_differ, plain_greedy, plain_logits
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session

TOKENS = 2100


def settings(chunk: int, block: int, budget: int, selector: Any = None, schedule: str = "tide") -> PrefillSettings:
    return PrefillSettings(schedule, selector or SnapKV(), uniform(budget), FlashCPU(), chunk, block, 64)


@pytest.fixture(scope="module")
def reference(embedded_model: Any, document_ids: list[int]) -> tuple[Any, list[int]]:
    """The plain model's logits and 64 greedy tokens on the prompt."""
    ids = document_ids[:TOKENS]
    return plain_logits(embedded_model.model, ids), plain_greedy(embedded_model.model, ids, 64)


def check_equal_to_plain(session: Session, ids: list[int], chunk: int, block: int, reference: tuple[Any, Any]) -> None:
    logits, tokens = reference
    prompt, _ = session.prefill(ids, settings(chunk, block, budget=len(ids)))
    assert ((prompt.logits - logits).abs().max() / logits.abs().max()).item() <= 1e-5
    assert list(session.generate(prompt, SamplingSettings(), len(tokens))) == tokens


def test_a_short_prompt_without_eviction_equals_the_plain_model(embedded_model: Any, document_ids: list[int]) -> None:
    ids = document_ids[:600]
    plain = plain_logits(embedded_model.model, ids), plain_greedy(embedded_model.model, ids, 16)
    check_equal_to_plain(Session(embedded_model.model, frozenset()), ids, 256, 64, plain)


@pytest.mark.parametrize("block", marked([64, 2048], 1))
@pytest.mark.parametrize("chunk", [64, 512, 2048, TOKENS])
def test_without_eviction_equals_the_plain_model(
    embedded_model: Any, document_ids: list[int], reference: Any, chunk: int, block: int
) -> None:
    session = Session(embedded_model.model, frozenset())
    check_equal_to_plain(session, document_ids[:TOKENS], chunk, block, reference)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["tide", "oneshot"])
@pytest.mark.parametrize("block", [64, 2048])
@pytest.mark.parametrize(("pooling", "kernel"), [("max", 7), ("avg", 5)])
def test_kept_sets_equal_the_dense_reference(
    embedded_model: Any, document_ids: list[int], pooling: Any, kernel: int, block: int, schedule: str
) -> None:
    recorder = Recorder(SnapKV(pool=pooling, pool_kernel=kernel))
    session = Session(embedded_model.model, frozenset())
    prompt, _ = session.prefill(document_ids[:TOKENS], settings(512, block, 256, recorder, schedule))
    assert len(recorder.views) == 30
    for view, kept in zip(recorder.views, prompt.kept, strict=True):
        assert (kept == dense_snapkv(view, 256, kernel=kernel, pooling=pooling)).all()


@pytest.mark.slow
def test_kept_sets_across_chunk_sizes_and_schedules(embedded_model: Any, document_ids: list[int]) -> None:
    session = Session(embedded_model.model, frozenset())
    runs = []
    for schedule, chunk in (("tide", 512), ("tide", 64), ("tide", 2048), ("oneshot", 512)):
        runs.append(Recorder(SnapKV()))
        session.prefill(document_ids[:TOKENS], settings(chunk, 2048, 256, runs[-1], schedule))
    for other in runs[1:]:
        differing, total = heads_that_differ(runs[0], other)
        print(f"{differing} of {total} heads differ")
        assert differing <= total / 100


@pytest.mark.slow
def test_the_second_prompt_is_what_a_fresh_session_gives(embedded_model: Any, document_ids: list[int]) -> None:
    session = Session(embedded_model.model, frozenset())
    session.prefill(document_ids[:900], settings(256, 512, 128))
    again, again_peak = session.prefill(document_ids[900:1500], settings(128, 512, 96))
    del session
    fresh, fresh_peak = Session(embedded_model.model, frozenset()).prefill(
        document_ids[900:1500], settings(128, 512, 96)
    )
    assert (again.logits == fresh.logits).all()
    assert all((a == b).all() for a, b in zip(again.kept, fresh.kept, strict=True))
    assert again_peak == fresh_peak
