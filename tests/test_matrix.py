"""Every legal schedule × selector × policy × store on a random model: what must hold of each of them.

Generation from quantised rows is not compared with the plain model's: it is another computation, whose bound
tests/test_quantized_store.py states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from tests.builders import tiny_causal_model
from tests.matrix import ALL, LEGAL, NEW, Scored, Subject, layers_watched
from tests.references import plain_greedy, plain_logits
from tidekv_cli.axes import POLICIES, SCHEDULES, SELECTORS, STORES
from tidekv_cli.engine.prefill import Prefilled
from tidekv_cli.methods import Method, conflict

LAYERS, KV_HEADS, LENGTH, BUDGET, WINDOW = 3, 2, 150, 40, 8
FIELDS = {
    "schedule": "schedule",
    "selector": "selector",
    "budget-policy": "budget_policy",
    "kv-store": "kv_store",
}
LAYER_MAJOR = [method for method in LEGAL if method.schedule == "tide"]
SMALL = {"window": WINDOW, "pool_kernel": 5, "group": 16, "residual": 16}  # so that little tells


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def subject() -> Subject:
    model = tiny_causal_model(num_hidden_layers=LAYERS, vocab_size=128, max_position_embeddings=4096)
    return Subject(model, model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}, [None] * LAYERS)


def prompt_ids(length: int = LENGTH) -> list[int]:
    return torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def prefilled(
    method: Method, ids: Sequence[int], budget: int = BUDGET, chunk: int = 32, block: int = 64, **changed: int
) -> Prefilled:
    return subject().prefilled(method, ids, budget, chunk, block, **{**SMALL, **changed}).prompt


def scored(method: Method, chunk: int = 32, block: int = 64, attention: str = "sdpa") -> Scored:
    return subject().prefilled(method, prompt_ids(), BUDGET, chunk, block, attention, **SMALL)


def answer(prompt: Prefilled) -> list[int]:
    return subject().answer(prompt)


@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
def test_the_budget_is_exact_and_rows_are_those_that_were_computed(method: Method) -> None:
    with layers_watched() as computed:
        prompt = prefilled(method, prompt_ids())
    subject().assert_exact(prompt, method, LENGTH, BUDGET)
    subject().assert_computed(prompt, computed)
    assert len(answer(prompt)) == NEW


@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
def test_a_budget_of_the_whole_prompt_is_the_plain_model(method: Method) -> None:
    ids = prompt_ids(60)
    prompt = prefilled(method, ids, budget=1000)
    expected = plain_logits(subject().model, ids)
    assert torch.allclose(prompt.logits, expected, atol=1e-5 * float(expected.abs().max()))
    if method.kv_store != "quantized":
        assert answer(prompt) == plain_greedy(subject().model, ids, NEW)


@pytest.mark.parametrize("method", LAYER_MAJOR, ids=lambda method: method.name)
def test_schedules_chunks_and_blocks_change_nothing(method: Method) -> None:
    """Where the sets are equal, logits after them agree."""
    oneshot = Method("", "oneshot", *method.axes[1:], "")
    first = scored(method)
    after = subject().session.follow(first.prompt, [7, 9])
    for other in (
        scored(method, chunk=7),
        scored(method, block=16),
        scored(method, chunk=500, block=500),
        scored(oneshot),
    ):
        if not first.assert_keeps_as(other) and method.kv_store != "quantized":
            logits = subject().session.follow(other.prompt, [7, 9])
            assert torch.allclose(logits, after, atol=1e-5 * float(after.abs().max()))


@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
def test_short_prompts(method: Method) -> None:
    window, budget = 4, 10
    for length in range(1, window + budget + 3):
        prompt = prefilled(method, prompt_ids(length), budget=budget, chunk=3 if length % 2 else 64, window=window)
        subject().assert_exact(prompt, method, length, budget)
        assert len(answer(prompt)) == NEW


@pytest.mark.slow
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
        last = subject().session.follow(one, [token])
    together = subject().session.follow(several, follow)
    # Rows that grow too old while several tokens come are rounded before the first of these has seen them.
    tolerance = 1e-2 if method.kv_store == "quantized" else 2e-5
    assert torch.allclose(last, together, atol=tolerance * float(last.abs().max()))
    assert [store.length for store in one.cache] == [store.length for store in several.cache]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["math", "eager"])
@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
def test_other_backends_follow_likewise(method: Method, attention: str) -> None:
    """Several tokens after the prompt, one, and several again."""
    first, other = scored(method), scored(method, attention=attention)
    if not first.assert_keeps_as(other):
        for tokens in ([5, 9, 31], [7], [2, 77]):
            expected, found = (subject().session.follow(one.prompt, tokens) for one in (first, other))
            # Codes of quantised rows may fall on the other side of a border.
            tolerance = 2e-2 if method.kv_store == "quantized" else 2e-5
            assert torch.allclose(found, expected, atol=tolerance * float(expected.abs().max()))


def test_every_axis_is_in_it() -> None:
    for place, names in enumerate((SCHEDULES, SELECTORS, POLICIES, STORES)):
        assert {method.axes[place] for method in LEGAL} == set(names)
    assert len(LEGAL) > 100


@pytest.mark.parametrize("method", [method for method in ALL if method not in LEGAL], ids=lambda method: method.name)
def test_what_does_not_go_together_says_why(method: Method) -> None:
    """And the ways out that are named lead, one after another, to a point that can be."""
    for _ in range(5):
        against = conflict(method)
        if against is None:
            return
        reason, way = against
        assert len(reason) > 20 and any(re.search(rf"\b{axis}\b", reason) for axis in method.axes)
        flag, value = re.search(r"--(schedule|selector|budget-policy|kv-store) ([a-z-]+)", way).groups()
        method = replace(method, **{FIELDS[flag]: value})
    raise AssertionError(method)
