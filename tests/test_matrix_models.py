"""The matrix on the embedded model, and on models whose layers have windows, chunks, sinks or other rotations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import __version__

from tests.architectures import tiny_architecture
from tests.matrix import LEGAL, NEW, Scored, Subject, layers_watched
from tests.planning import marked
from tests.references import plain_greedy, plain_logits
from tidekv_cli.architectures import SUPPORTED, release_needed
from tidekv_cli.engine.masks import Visible
from tidekv_cli.loading import LoadedModel
from tidekv_cli.methods import METHODS, Method

# Windows in some layers and soft-caps, rotations that move, chunks, windows in all, no rotations in some, sinks.
KINDS = ("gemma2", "phimoe", "llama4_text", "mistral", "smollm3", "gpt_oss")
LENGTH, BUDGET = 90, 40
SMALL = {"window": 8, "pool_kernel": 5, "group": 16, "residual": 16}
TOKENS, KEPT = 192, 64


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if "kind" in request.fixturenames else threads)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Tried:
    """A model, and what the plain one says of a prompt that nothing is evicted from."""

    subject: Subject
    ids: Sequence[int]
    logits: torch.Tensor
    tokens: list[int]


@cache
def tried(kind: str) -> Tried:
    if release_needed(kind, __version__) is not None:
        pytest.skip("needs a newer transformers")
    model = tiny_architecture(kind)
    ids = torch.randint(1, 128, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    model.set_attn_implementation("eager")
    return subject_of(model, {**model.config.to_dict(), "architectures": [SUPPORTED[kind]]}, ids)


def subject_of(model: Any, config: dict[str, Any], ids: Sequence[int]) -> Tried:
    plain = plain_logits(model, ids, "eager"), plain_greedy(model, ids, NEW, "eager")
    windows = Subject(model, config, ()).session.adapter.visibles()
    return Tried(Subject(model, config, [window_of(visible) for visible in windows]), ids, *plain)


def window_of(visible: Visible) -> int | None:
    """Its window; 0 where another rule says which keys are seen, as in chunks."""
    return 0 if visible.function is not None else visible.window


def check(case: Tried, method: Method, budget: int, chunk: int, **values: int) -> Scored:
    """Exact sums and rows where `budget` is short, and the plain model where it is not. The former, unanswered."""
    subject, ids = case.subject, case.ids
    with layers_watched() as computed:
        found = subject.prefilled(method, ids, budget, chunk, **values)
    subject.assert_exact(found.prompt, method, len(ids), budget)
    subject.assert_computed(found.prompt, computed)
    whole = subject.prefilled(method, ids, len(ids) + NEW, chunk, **values).prompt
    assert torch.allclose(whole.logits, case.logits, atol=1e-5 * float(case.logits.abs().max()))
    if method.kv_store != "quantized":
        assert subject.answer(whole) == case.tokens
    return found


@pytest.mark.parametrize("method", LEGAL, ids=lambda method: method.name)
@pytest.mark.parametrize("kind", marked(KINDS, 3))
def test_models_of_other_kinds(kind: str, method: Method) -> None:
    case = tried(kind)
    assert len(case.subject.answer(check(case, method, BUDGET, 32, **SMALL).prompt)) == NEW


@pytest.fixture(scope="module")
def embedded(embedded_model: LoadedModel, document_ids: list[int]) -> Tried:
    config = {**embedded_model.model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
    return subject_of(embedded_model.model, config, document_ids[:TOKENS])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_the_embedded_model(method: Method, embedded: Tried) -> None:
    """By either layer-major schedule too: where they keep the same rows, logits after them agree."""
    found = check(embedded, method, KEPT, 80)
    if method.schedule == "tide":
        oneshot = embedded.subject.prefilled(Method("", "oneshot", *method.axes[1:], ""), embedded.ids, KEPT)
        if not found.assert_keeps_as(oneshot) and method.kv_store != "quantized":
            after, expected = (embedded.subject.session.follow(one.prompt, [7, 9]) for one in (found, oneshot))
            assert torch.allclose(after, expected, atol=1e-5 * float(expected.abs().max()))
