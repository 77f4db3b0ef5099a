"""What is planned for each named method is what it takes, and lines over the length agree with simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.architectures import tiny_config
from tests.builders import tiny_causal_model
from tests.planning import plan_settings
from tests.references import storage_bytes
from tidekv_cli.architectures import SUPPORTED
from tidekv_cli.assembly import engine_settings
from tidekv_cli.engine.backends import attention_backend
from tidekv_cli.engine.budgets.cake import Cake
from tidekv_cli.engine.session import Session
from tidekv_cli.memory_model import MemoryModel
from tidekv_cli.methods import METHODS
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.simulate import simulate

CAKE = [name for name, method in METHODS.items() if method.policy_info.layers.name == "cake"]
# In what they allocate; every other method is like one of them.
UNLIKE = ("tidekv-snapkv", "tidekv-adakv", "tidekv-cake", "tidekv-h2o", "kivi", "block-snapkv", "streaming-llm")
SMALL = {"window": 8, "group": 16, "residual": 32}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(name: str, config: Any, **changes: Any) -> PlanSettings:
    method = METHODS[name]
    names = {parameter.name for parameter in method.parameters}
    values = method.settings({key: value for key, value in SMALL.items() if key in names})
    case = plan_settings(
        config,
        method=method,
        axis_settings=values,
        window=method.selector_info.build(values).window,
        dtype="float32",
        chunk_size=32,
        score_block=64,
        budget_tokens=40 if method.selector_info.budgeted else None,
        max_new_tokens=5,
        device_kind="cpu",
    )
    return replace(case, **changes)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kept", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_takes_what_is_simulated(name: str, kept: bool) -> None:
    model = tiny_causal_model(num_hidden_layers=6, vocab_size=128, max_position_embeddings=4096)
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    case = settings(name, config, record_kept=kept)
    for length in (300, 90, 30):
        ids = torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(1)).tolist()
        engine = engine_settings(case, length, attention_backend("sdpa", "cpu"))
        prompt, live = Session(model, frozenset()).prefill(ids, engine)
        phases = simulate(case, length)
        weights = storage_bytes(model.parameters())
        simulated = max(sum(phase.values()) for phase in phases[:-1]) - weights
        if name in CAKE:  # as if all layers were alike and the first had held everything
            assert live - weights <= 1.01 * simulated <= 1.25 * (live - weights)
        else:
            assert live - weights == pytest.approx(simulated, rel=0.01)
        held = sum(store.nbytes for store in prompt.cache)
        marks = (
            0
            if not kept
            else sum(storage_bytes(layer if isinstance(layer, list) else [layer]) for layer in prompt.kept)
        )
        assert held + marks == pytest.approx(phases[-1]["cache"], rel=0.02)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in UNLIKE else pytest.mark.long) for name in METHODS],
)
def test_lines_agree_with_simulation(name: str) -> None:
    config = tiny_causal_model(num_hidden_layers=6, vocab_size=128, max_position_embeddings=4096).config.to_dict() | {
        "architectures": ["LlamaForCausalLM"]
    }
    case = settings(name, config, chunk_size=256, score_block=256, dtype="bfloat16")
    for device_kind in ("cpu", "cuda"):
        model = MemoryModel(replace(case, device_kind=device_kind), None)
        start = model.lines[0]
        for length in (start // 2, start + 1, start + 777, 3 * start + 5):
            predicted, simulated = model.peak(length), model.simulated(length)
            above = sum(predicted.values()) - sum(simulated.values())
            transient = sum(simulated.values()) - simulated["cache"] - simulated["weights"]
            groups = 255 * simulated["cache"] // length if METHODS[name].kv_store == "quantized" else 0
            blocks = 512 * 40 if device_kind == "cuda" else 0  # that round up
            assert 0 <= above <= transient / 100 + groups + blocks


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        pytest.param("tidekv-kivi", {"residual": 96, "group": 32}, marks=pytest.mark.slow),
        pytest.param("tidekv-kivi", {"residual": 1024}, marks=pytest.mark.long),
        pytest.param("kivi", {"residual": 4096, "bits": 2}, marks=pytest.mark.long),
        pytest.param("tidekv-keydiff", {}, marks=pytest.mark.slow),
        pytest.param("keydiff", {}, marks=pytest.mark.slow),
    ],
)
def test_lines_know_the_parameters(name: str, changes: dict[str, int]) -> None:
    """Rounding in other steps, and score blocks much longer than chunks."""
    config = tiny_causal_model(num_hidden_layers=6, vocab_size=128, max_position_embeddings=4096).config.to_dict()
    case = settings(name, config | {"architectures": ["LlamaForCausalLM"]}, chunk_size=256, score_block=2048)
    case = replace(case, axis_settings={**case.axis_settings, **changes}, dtype="bfloat16")
    model = MemoryModel(case, None)
    start = model.lines[0]
    for length in (start // 2, start + 1, start + 777, 2 * start + 5):
        predicted, simulated = model.peak(length), model.simulated(length)
        above = sum(predicted.values()) - sum(simulated.values())
        transient = sum(simulated.values()) - simulated["cache"] - simulated["weights"]
        row = 2 * case.spec.layers * case.spec.kv_heads * case.spec.head_dim * 2
        steps = (
            model.regimes.step * row if model.regimes.step > 1 else 0
        )  # as if the newest rows were as many as can be
        assert 0 <= above <= transient / 100 + steps


# Of the layers of a model: late ones are worth all, or early ones, or those in the middle.
UNEQUAL = [[1, 1e-2, 1e-9, 1e-9, 1e-9, 1e3], [1, 1, 0.1, 1e-6, 1e-6, 1], [1e6, 1, 1, 1, 1, 1], [1, 1, 1e4, 1e4, 1, 1]]


@pytest.mark.parametrize("name", CAKE)
@pytest.mark.parametrize("preferences", UNEQUAL)
@pytest.mark.parametrize(("length", "budget"), [(600, 100), (1000, 400), (200, 120)])
def test_layers_that_are_unlike_take_no_more_than_is_planned(
    name: str, preferences: list[float], length: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_causal_model(num_hidden_layers=6, vocab_size=128, max_position_embeddings=4096)
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    case = settings(name, config, budget_tokens=budget)
    ids = torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    planned = max(sum(phase.values()) for phase in simulate(case, length))
    given = iter(preferences)
    monkeypatch.setattr(Cake, "preference", lambda policy, view: next(given))
    engine = engine_settings(case, length, attention_backend("sdpa", "cpu"))
    prompt, live = Session(model, frozenset()).prefill(ids, engine)
    assert live <= planned <= 1.5 * live
    assert sum(store.length for store in prompt.cache) == 6 * min(budget, length)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tidekv-cake", "tidekv-pyramidkv"])
@pytest.mark.parametrize(("kind", "changes"), [("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}), ("mistral", {})])
def test_lines_bend_where_budgets_do(name: str, kind: str, changes: dict[str, Any]) -> None:
    """With few layers before a kind ends, and with layers whose window hides nothing yet."""
    config = tiny_config(kind, num_hidden_layers=12, sliding_window=4096, max_position_embeddings=8192, **changes)
    case = settings(name, config.to_dict() | {"architectures": [SUPPORTED[kind]]}, budget_tokens=128, chunk_size=16)
    model, before = MemoryModel(case, None), 0
    for length in (1000, 1400, 1500, 2500, 3500, 6000, 7000):
        predicted, simulated = (sum(found.values()) for found in (model.peak(length), model.simulated(length)))
        assert simulated <= predicted <= 1.01 * simulated, length
        assert predicted >= before or (kind == "mistral" and length == 6000)
        before = predicted
