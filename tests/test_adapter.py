"""Record and replay equals the plain model, for every supported architecture, and cleans up after itself."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from tests.planning import uniform
from tests.references import plain_greedy, plain_logits, plain_steps_with_kept_rows
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.attention import Eager
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session
from tidekv_cli.errors import ModelError

LENGTH = 150


def settings(chunk: int, budget: int = LENGTH, schedule: str = "tide", attention: Any = None) -> PrefillSettings:
    return PrefillSettings(schedule, SnapKV(), uniform(budget), attention or FlashCPU(), chunk, 64, 64)


@pytest.fixture
def ids() -> list[int]:
    return torch.randint(0, 128, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_no_eviction_equals_the_plain_model(tiny_model: Callable[..., Any], ids: list[int], model_type: str) -> None:
    model = tiny_model(model_type)
    logits, tokens = plain_logits(model, ids), plain_greedy(model, ids, 64)
    session = Session(model, frozenset())
    runs = [settings(chunk) for chunk in (1, 7, 64, LENGTH)]
    runs += [settings(64, schedule="oneshot"), settings(64, attention=Eager())]  # C says nothing to oneshot
    for run in runs:
        prompt, _ = session.prefill(ids, run)
        assert ((prompt.logits - logits).abs().max() / logits.abs().max()).item() <= 1e-5
        assert list(session.generate(prompt, SamplingSettings(), 64)) == tokens


@pytest.mark.parametrize("shape", [{"num_attention_heads": 4, "num_key_value_heads": 4}, {"num_key_value_heads": 1}])
@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_head_counts_and_scaled_rope(
    tiny_model: Callable[..., Any], ids: list[int], shape: dict[str, int], rope: str
) -> None:
    scaling: dict[str, Any] = {"rope_type": rope, "rope_theta": 10000.0, "factor": 4.0}
    if rope == "llama3":
        scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    if rope == "yarn":
        scaling |= {"original_max_position_embeddings": 64}
    model = tiny_model(rope_parameters=scaling, **shape)
    logits = plain_logits(model, ids)
    prompt, _ = Session(model, frozenset()).prefill(ids, settings(16))
    assert ((prompt.logits - logits).abs().max() / logits.abs().max()).item() <= 1e-5


def test_taps_are_removed_after_an_exception(tiny_model: Callable[..., Any], ids: list[int]) -> None:
    model = tiny_model()
    session = Session(model, frozenset())
    logits = plain_logits(model, ids)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken layer")

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        session.prefill(ids, settings(64))
    hook.remove()
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)
    assert torch.equal(plain_logits(model, ids), logits)
    prompt, _ = session.prefill(ids, settings(64))
    assert torch.allclose(prompt.logits, logits, rtol=1e-4, atol=1e-4)


def test_a_failed_token_leaves_the_session_usable(tiny_model: Callable[..., Any], ids: list[int]) -> None:
    model = tiny_model()
    expected = plain_greedy(model, ids, 8)
    session = Session(model, frozenset())
    stream = session.generate(session.prefill(ids, settings(64))[0], SamplingSettings(), 8)
    assert next(stream) == expected[0]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("broken layer")

    hook = model.model.layers[0].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        next(stream)
    hook.remove()
    prompt, _ = session.prefill(ids, settings(64))
    assert list(session.generate(prompt, SamplingSettings(), 8)) == expected


def test_two_adapters_do_not_disturb_each_other(tiny_model: Callable[..., Any], ids: list[int]) -> None:
    first, second = tiny_model(seed=1), tiny_model(seed=2)
    sessions = [Session(model, frozenset()) for model in (first, second)]
    prompts = [session.prefill(ids, settings(32))[0] for session in sessions]
    streams = [s.generate(p, SamplingSettings(), 8) for s, p in zip(sessions, prompts, strict=True)]
    mixed = [[next(stream) for stream in streams] for _ in range(8)]
    for model, tokens in zip((first, second), zip(*mixed, strict=True), strict=True):
        assert plain_greedy(model, ids, 8) == list(tokens)


def test_registry_entries_go_with_the_adapter(tiny_model: Callable[..., Any]) -> None:
    gc.collect()  # adapters of other tests that wait in reference cycles
    before = set(AttentionInterface._global_mapping)
    model = tiny_model()
    found = model.config._attn_implementation
    adapter = ModelAdapter(model)
    assert len(set(AttentionInterface._global_mapping) - before) == 1
    del adapter
    gc.collect()
    assert set(AttentionInterface._global_mapping) == before
    assert model.config._attn_implementation == found


@pytest.mark.parametrize("window", [2, 3, 16, 33, 149, 150, 1000])
@pytest.mark.parametrize("chunk", [1, 7, 33, 150, 500])
def test_sliding_windows(tiny_model: Callable[..., Any], ids: list[int], window: int, chunk: int) -> None:
    model = tiny_model("mistral", sliding_window=window)
    logits, tokens = plain_logits(model, ids), plain_greedy(model, ids, 20)
    session = Session(model, frozenset())
    for run in (settings(chunk), settings(chunk, schedule="oneshot"), settings(chunk, attention=Eager())):
        prompt, _ = session.prefill(ids, run)
        assert ((prompt.logits - logits).abs().max() / logits.abs().max()).item() <= 1e-5
        assert {store.length for store in prompt.cache} == {min(window - 1, LENGTH)}
        assert list(session.generate(prompt, SamplingSettings(), 20)) == tokens


@pytest.mark.parametrize("length", [40, 63, 64, 65, 150])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotations_that_see_the_whole_prompt(
    tiny_model: Callable[..., Any], ids: list[int], kind: str, length: int
) -> None:
    """Beyond the original window of 64 and short of it, whatever prompt came before."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rope |= {"short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [2.0 + n / 4 for n in range(8)]}

    def fresh() -> Any:
        return tiny_model(rope_parameters=dict(rope), max_position_embeddings=64 if kind == "dynamic" else 256)

    logits, tokens = plain_logits(fresh(), ids[:length]), plain_greedy(fresh(), ids[:length], 20)
    session = Session(fresh(), frozenset())
    for chunk in (7, 64):
        session.prefill(ids, settings(64))
        prompt, _ = session.prefill(ids[:length], settings(chunk))
        assert ((prompt.logits - logits).abs().max() / logits.abs().max()).item() <= 1e-5
        assert list(session.generate(prompt, SamplingSettings(), 20)) == tokens
    assert all("forward" not in vars(module) for module in session.adapter.model.modules())


def test_prompts_whose_rotations_moved_apart_go_on_in_turns(tiny_model: Callable[..., Any], ids: list[int]) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    expected = plain_greedy(tiny_model(rope_parameters=dict(rope), max_position_embeddings=64), ids[:70], 6)
    session = Session(tiny_model(rope_parameters=dict(rope), max_position_embeddings=64), frozenset())
    first, _ = session.prefill(ids[:70], settings(64))
    second, _ = session.prefill(ids, settings(64))
    answers = zip(*(session.generate(prompt, SamplingSettings(), 6) for prompt in (first, second)), strict=True)
    assert [token for token, _ in answers] == expected


def test_a_window_that_hides_nothing_leaves_the_budget_to_count(tiny_model: Callable[..., Any], ids: list[int]) -> None:
    """As Phi-3.5's, which is longer than its context."""
    model = tiny_model("mistral", sliding_window=LENGTH + 64)
    session = Session(model, frozenset())
    prompt, _ = session.prefill(ids, settings(64, budget=40))
    assert {store.length for store in prompt.cache} == {40}
    answer = list(session.generate(prompt, SamplingSettings(), 8))
    expected = plain_steps_with_kept_rows(model, ids, prompt.kept, answer[:-1])
    assert [int(logits.argmax()) for logits in expected] == answer[1:]
    model = tiny_model("mistral", sliding_window=LENGTH + 63)  # the last new token does not see the first one
    prompt, _ = Session(model, frozenset()).prefill(ids, settings(64, budget=40))
    assert {store.length for store in prompt.cache} == {LENGTH}


def test_a_layer_that_attends_elsewhere_is_refused(tiny_model: Callable[..., Any], ids: list[int]) -> None:
    model = tiny_model()
    session = Session(model, frozenset())
    update = session.adapter._cache.update
    session.adapter._cache.update = lambda *given, **more: tuple(t.clone() for t in update(*given, **more))
    with pytest.raises(ModelError, match="attends to other keys"):
        session.prefill(ids, settings(64))


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_adapters_on_one_model_leave_it_as_it_came(tiny_model: Callable[..., Any], first_to_go: int) -> None:
    model, before = tiny_model(), set(AttentionInterface._global_mapping)
    found = model.config._attn_implementation
    adapters = [ModelAdapter(model), ModelAdapter(model)]
    for _ in range(2):
        adapters.pop(first_to_go if len(adapters) == 2 else 0)
        gc.collect()
    assert model.config._attn_implementation == found
    assert set(AttentionInterface._global_mapping) == before
    model(torch.tensor([[1, 2, 3]]))
