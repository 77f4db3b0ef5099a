"""Every legal schedule × selector × policy × store on a random model: what must hold of each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.builders import tiny_causal_model
from tests.planning import plan_settings
from tests.references import plain_greedy, plain_logits
from tidekv_cli.assembly import engine_settings
from tidekv_cli.axes import POLICIES, SCHEDULES, SELECTORS, STORES
from tidekv_cli.engine.backends import attention_backend
from tidekv_cli.engine.prefill import Prefilled
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.session import Session
from tidekv_cli.engine.stores.dense import DenseStore
from tidekv_cli.methods import Method, conflict

LAYERS, KV_HEADS, LENGTH, BUDGET, WINDOW, NEW = 3, 2, 150, 40, 8, 4
ALL = [Method(" × ".join(axes), *axes, "") for axes in product(SCHEDULES, SELECTORS, POLICIES, STORES)]
LEGAL = [method for method in ALL if conflict(method) is None]
LAYER_MAJOR = [method for method in LEGAL if method.schedule == "tide"]
SMALL = {"window": WINDOW, "pool_kernel": 5, "group": 16, "residual": 16}  # so that little tells


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def model() -> Any:
    return tiny_causal_model(num_hidden_layers=LAYERS, vocab_size=128, max_position_embeddings=4096)


@cache
def session() -> Session:
    return Session(model(), frozenset())


def prompt_ids(length: int = LENGTH) -> list[int]:
    return torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def prefilled(
    method: Method, ids: Sequence[int], budget: int = BUDGET, chunk: int = 32, block: int = 64, **changed: int
) -> Prefilled:
    names = {parameter.name for parameter in method.parameters}
    values = {name: value for name, value in {**SMALL, **changed}.items() if name in names}
    case = plan_settings(
        model().config.to_dict() | {"architectures": ["LlamaForCausalLM"]},
        method=method,
        axis_settings=method.settings(values),
        dtype="float32",
        chunk_size=chunk,
        score_block=block,
        budget_tokens=budget if method.selector_info.budgeted else None,
        max_new_tokens=NEW,
        record_kept=True,
    )
    return session().prefill(ids, engine_settings(case, len(ids), attention_backend("sdpa", "cpu")))[0]


def answer(prompt: Prefilled) -> list[int]:
    return list(session().generate(prompt, SamplingSettings(), NEW))


def by_head(kept: Tensor | list[Tensor]) -> list[Tensor]:
    return kept if isinstance(kept, list) else list(kept.unbind())


def rows(prompt: Prefilled) -> list[Tensor]:
    """Positions of every layer and head."""
    return [head for layer in prompt.kept for head in by_head(layer)]


def assert_exact(prompt: Prefilled, method: Method, length: int, budget: int) -> None:
    """The budget to the row, in positions that ascend and exist."""
    stay = min(budget, length) if method.selector_info.budgeted else length
    assert sum(store.length for store in prompt.cache) == LAYERS * stay
    found = rows(prompt)
    assert sum(len(head) for head in found) == LAYERS * KV_HEADS * stay
    for head in found:
        assert head.dtype == torch.int64 and (head.diff() > 0).all()
        assert len(head) == 0 or int(head[-1]) < length
    if method.budget_policy == "uniform":
        assert {len(head) for head in found} == {stay}


@cache
def whole_cache(schedule: str, selector: str) -> list[DenseStore]:
    """All rows, computed in the same chunks."""
    same = Method("", schedule, selector, "uniform", "dense", "")
    return [store for store in prefilled(same, prompt_ids(), budget=LENGTH).cache if isinstance(store, DenseStore)]


@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
def test_the_budget_is_exact_and_rows_are_those_of_the_full_cache(method: Method) -> None:
    prompt = prefilled(method, prompt_ids())
    assert_exact(prompt, method, LENGTH, BUDGET)
    if method.schedule in ("tide", "oneshot") and isinstance(prompt.cache[0], DenseStore):
        for store, full, kept in zip(prompt.cache, whole_cache(*method.axes[:2]), prompt.kept, strict=True):
            assert isinstance(store, DenseStore)
            for head, positions in enumerate(by_head(kept)):
                assert torch.equal(store.keys[0, head], full.keys[0, head, positions])
                assert torch.equal(store.values[0, head], full.values[0, head, positions])
    assert len(answer(prompt)) == NEW


@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
def test_a_budget_of_the_whole_prompt_is_the_plain_model(method: Method) -> None:
    ids = prompt_ids(60)
    prompt = prefilled(method, ids, budget=1000)
    expected = plain_logits(model(), ids)
    assert torch.allclose(prompt.logits, expected, atol=1e-5 * float(expected.abs().max()))
    if method.kv_store != "quantized":
        assert answer(prompt) == plain_greedy(model(), ids, NEW)


@pytest.mark.parametrize("method", LAYER_MAJOR, ids=lambda method: method.name)
def test_schedules_chunks_and_blocks_change_nothing(method: Method) -> None:
    """Across them scores are rounded otherwise, so one row in a hundred may differ; on equal rows logits agree."""
    oneshot = Method("", "oneshot", *method.axes[1:], "")
    first = prefilled(method, prompt_ids())
    after = session().follow(first, [7, 9])
    for other in (
        prefilled(method, prompt_ids(), chunk=7),
        prefilled(method, prompt_ids(), block=16),
        prefilled(method, prompt_ids(), chunk=500, block=500),
        prefilled(oneshot, prompt_ids()),
    ):
        pairs = list(zip(rows(first), rows(other), strict=True))
        differing = sum(len(set(a.tolist()) ^ set(b.tolist())) for a, b in pairs)
        assert differing <= LAYERS * KV_HEADS * BUDGET // 100
        if differing == 0 and method.kv_store != "quantized":
            logits = session().follow(other, [7, 9])
            assert torch.allclose(logits, after, atol=1e-5 * float(after.abs().max()))


@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
def test_short_prompts(method: Method) -> None:
    window, budget = 4, 10
    for length in range(1, window + budget + 3):
        prompt = prefilled(method, prompt_ids(length), budget=budget, chunk=3 if length % 2 else 64, window=window)
        assert_exact(prompt, method, length, budget)
        assert len(answer(prompt)) == NEW


@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
def test_a_prompt_leaves_nothing_for_the_next(method: Method) -> None:
    alone = answer(prefilled(method, prompt_ids()))
    answer(prefilled(method, prompt_ids(90)[::-1]))
    assert answer(prefilled(method, prompt_ids())) == alone


@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
def test_several_tokens_follow_as_they_would_one_by_one(method: Method) -> None:
    one, several = prefilled(method, prompt_ids(), bits=8), prefilled(method, prompt_ids(), bits=8)
    follow = [5, 9, 31, 7, 2, 77]
    for token in follow:
        last = session().follow(one, [token])
    together = session().follow(several, follow)
    # Rows that grow too old while several tokens come are rounded before the first of these has seen them.
    tolerance = 1e-2 if method.kv_store == "quantized" else 2e-5
    assert torch.allclose(last, together, atol=tolerance * float(last.abs().max()))
    assert [store.length for store in one.cache] == [store.length for store in several.cache]


def test_every_axis_is_in_it() -> None:
    for place, names in enumerate((SCHEDULES, SELECTORS, POLICIES, STORES)):
        assert {method.axes[place] for method in LEGAL} == set(names)
    assert len(LEGAL) > 100


@pytest.mark.parametrize("method", [method for method in ALL if method not in LEGAL], ids=lambda method: method.name)
def test_what_does_not_go_together_says_why(method: Method) -> None:
    against = conflict(method)
    assert against is not None and all(len(words) > 10 for words in against)
    assert any(axis in " ".join(against) for axis in method.axes)
