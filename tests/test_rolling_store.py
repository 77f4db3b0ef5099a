"""Sinks and recent rows that make room for new ones: against attention over the rows that each query should see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.planning import uniform
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.attention import PLAIN, Eager, Rule
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors import shared_by_heads
from tidekv_cli.engine.selectors.streaming import Streaming
from tidekv_cli.engine.session import Session
from tidekv_cli.engine.stores.rolling import RollingStore
from tidekv_cli.engine.turning import Turning
from tidekv_cli.errors import ModelError

HEADS, GROUPS, SIZE, SCALE = 2, 3, 16, 0.25


def seen_by(position: int, limit: int, sinks: int) -> list[int]:
    """Positions of the rows that a query at `position` sees, its own among them."""
    first = range(min(sinks, position + 1))
    return sorted({*first, *range(max(position - (limit - sinks) + 1, 0), position + 1)})


def expected(queries: Tensor, keys: Tensor, values: Tensor, rows: list[int], rule: Rule) -> Tensor:
    """One query's attention over some rows."""
    return Eager().attend(queries, keys[:, :, rows], values[:, :, rows], SCALE, rule)[0]


def drawn(count: int, length: int) -> Tensor:
    return torch.randn(1, count, length, SIZE)


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("limit", [5, 12, 40])
@pytest.mark.parametrize("steps", [[1] * 60, [3, 1, 7, 20, 1, 1, 40], [64]])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_each_query_sees_what_was_held_at_its_time(
    sinks: int, limit: int, steps: list[int], softcap: float | None
) -> None:
    torch.manual_seed(limit + sinks)
    rule = Rule(softcap=softcap, sinks=torch.randn(HEADS * GROUPS) if sinks else None)
    length = sum(steps)
    queries, keys, values = drawn(HEADS * GROUPS, length), drawn(HEADS, length), drawn(HEADS, length)
    store = RollingStore(keys, values, limit, sinks, limit, FlashCPU())
    start = 0
    for step in steps:
        now = slice(start, start + step)
        store.append(keys[:, :, now], values[:, :, now])
        found = store.attend(queries[:, :, now], SCALE, rule)
        for row, position in enumerate(range(start, start + step)):
            want = expected(queries[:, :, position : position + 1], keys, values, seen_by(position, limit, sinks), rule)
            assert torch.allclose(found[:, :, row : row + 1], want, atol=1e-5)
        start += step
        assert store.length == min(start, limit)


def test_it_goes_on_after_a_prompt_and_stays_as_it_is_in_size() -> None:
    torch.manual_seed(0)
    length, limit, sinks, slack = 400, 24, 4, 5
    queries, keys, values = drawn(HEADS * GROUPS, length), drawn(HEADS, length), drawn(HEADS, length)
    rows = torch.tensor([*range(sinks), *range(100 - (limit - sinks), 100)])
    prompt = keys[:, :, :100], values[:, :, :100]
    store = RollingStore.of(*prompt, shared_by_heads(rows, HEADS), slack, FlashCPU(), sinks, limit)
    nbytes = store.nbytes
    assert nbytes == 2 * HEADS * (limit + slack) * SIZE * 4 and (store.length, store.added) == (limit, 0)
    for position in range(100, length):
        now = slice(position, position + 1)
        store.append(keys[:, :, now], values[:, :, now])
        want = expected(queries[:, :, now], keys, values, seen_by(position, limit, sinks), PLAIN)
        assert torch.allclose(store.attend(queries[:, :, now], SCALE, PLAIN), want, atol=1e-5)
    assert (store.length, store.prompt_length, store.added, store.nbytes) == (limit, limit, length - 100, nbytes)


def settings(budget: int, selector: Any, slack: int = 8, schedule: str = "tide") -> PrefillSettings:
    return PrefillSettings(schedule, selector, uniform(budget), FlashCPU(), 16, 64, slack)


@torch.no_grad()
def test_slots_are_positions_of_a_prompt_cut_to_what_is_held(tiny_model: Callable[..., Any]) -> None:
    """With one layer, keys depend on tokens and positions alone: so a short prompt of the same tokens tells."""
    model = tiny_model(num_hidden_layers=1)
    ids = torch.randint(1, 128, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    follow = [5, 9, 31, 7]
    for sinks, budget in ((4, 20), (1, 9), (0, 12)):
        session = Session(model, frozenset())
        prompt, _ = session.prefill(ids, settings(budget, Streaming(sinks, "slot")))
        found = [session.follow(prompt, [token]) for token in follow]
        together = session.follow(session.prefill(ids, settings(budget, Streaming(sinks, "slot")))[0], follow)
        assert torch.allclose(together, found[-1], atol=1e-5)
        model.set_attn_implementation("eager")
        for count, logits in enumerate(found, start=1):
            text = [*ids, *follow[:count]]
            held = torch.tensor([[*text[:sinks], *text[-(budget - sinks) :]]])
            plain = model(input_ids=held).logits[0, -1]
            assert torch.allclose(logits, plain, atol=1e-5 * float(plain.abs().max()))


def test_generation_is_bounded(tiny_model: Callable[..., Any]) -> None:
    session = Session(tiny_model(), frozenset())
    for positions in ("absolute", "slot"):
        prompt, _ = session.prefill(list(range(1, 60)), settings(16, Streaming(4, positions)))
        nbytes = [store.nbytes for store in prompt.cache]
        assert len(list(session.generate(prompt, SamplingSettings(), 300))) == 300
        assert [store.nbytes for store in prompt.cache] == nbytes and {store.length for store in prompt.cache} == {16}
        with pytest.raises(ValueError, match="has been generated from"):
            next(session.generate(prompt, SamplingSettings(), 1))


def test_a_budget_above_the_prompt_rolls_later(tiny_model: Callable[..., Any]) -> None:
    session, ids = Session(tiny_model(), frozenset()), list(range(1, 41))
    whole, _ = session.prefill(ids, settings(1000, Streaming(4)))
    tokens = list(session.generate(whole, SamplingSettings(), 30))
    prompt, _ = session.prefill(ids, settings(50, Streaming(4)))
    assert list(session.generate(prompt, SamplingSettings(), 10)) == tokens[:10]
    assert prompt.cache[0].length == 49 and whole.cache[0].length == 69


def test_a_layer_that_does_not_rotate_is_not_turned(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("smollm3", num_hidden_layers=2, pad_token_id=0, no_rope_layers=[1, 0], no_rope_layer_interval=2)
    turning = Turning(Session(model, frozenset()).adapter)
    assert [turning.of(layer) is turning for layer in range(2)] == [True, False]


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_move_have_no_slots(tiny_model: Callable[..., Any], kind: str) -> None:
    scale = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **(scale if kind == "longrope" else {})}
    session = Session(tiny_model(head_dim=16, rope_parameters=rope), frozenset())
    with pytest.raises(ModelError, match="positions=slot"):
        session.prefill(list(range(1, 60)), settings(16, Streaming(4, "slot")))


@pytest.mark.parametrize("schedule", ["tide", "online"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_sinks_of_a_short_prompt_come_later(tiny_model: Callable[..., Any], schedule: str, length: int) -> None:
    """As if the tokens that follow had been in the prompt."""
    session, ids = Session(tiny_model(), frozenset()), list(range(1, 41))
    short, _ = session.prefill(ids[:length], settings(12, Streaming(4), 64, schedule))
    whole, _ = session.prefill(ids[:8], settings(12, Streaming(4), 64, schedule))
    for token in ids[length:8]:
        logits = session.follow(short, [token])
    assert torch.allclose(logits, whole.logits, atol=1e-5 * float(logits.abs().max()))
    for token in ids[8:]:
        one, other = session.follow(short, [token]), session.follow(whole, [token])
        assert torch.allclose(one, other, atol=1e-5 * float(one.abs().max()))


def test_a_token_that_is_embedded_as_nothing_says_nothing_of_rotations(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model()
    model.get_input_embeddings().weight.data[1] = 0
    turning = Turning(ModelAdapter(model))
    assert all(turning.of(layer) is not None for layer in range(len(model.model.layers)))


def test_room_is_for_what_is_ever_held(tiny_model: Callable[..., Any]) -> None:
    """Whatever is said of new tokens, and after many that came at once."""
    session, ids = Session(tiny_model(), frozenset()), list(range(1, 101))
    for schedule in ("tide", "online"):
        prompt, _ = session.prefill(ids, settings(40, Streaming(4), 10_000, schedule))
        store = prompt.cache[0]
        before = store.nbytes
        row = before // (40 + 64)
        assert before == (40 + 64) * row and row == 2 * store.keys.shape[1] * store.keys.shape[3] * 4
        session.follow(prompt, [3] * 120)
        session.follow(prompt, [3] * 120)
        assert store.nbytes > before
        for token in range(2, 72):
            session.follow(prompt, [token])
        assert store.nbytes == before and store.length == 40
