"""Simulation: the figures of the known shapes, the paper's own arithmetic, and what a real run takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.planning import GIB, method, plan_settings
from tests.references import storage_bytes
from tidekv_cli.assembly import engine_settings
from tidekv_cli.catalog import shape_of
from tidekv_cli.engine.backends import attention_backend
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.session import Session
from tidekv_cli.few_layers import few_layers
from tidekv_cli.memory_model import MemoryModel
from tidekv_cli.plan import Planner
from tidekv_cli.plan_settings import PlanSettings
from tidekv_cli.simulate import simulate

WEIGHTS = 14.958  # GiB


def peak_gib(settings: PlanSettings, length: int) -> float:
    return Planner(replace(settings, free_bytes=None), exact=True).plan(length).bytes.peak / GIB


@pytest.mark.parametrize(("length", "known"), [(32768, 19.10), (65536, 22.75), (131072, 30.04)])
def test_oneshot_snapkv_takes_what_is_known(length: int, known: float) -> None:
    assert peak_gib(plan_settings(method=method("oneshot")), length) == pytest.approx(known, rel=0.005)


@pytest.mark.parametrize(
    ("length", "chunk", "most"),
    [(32768, 2048, 16.04), (65536, 2048, 16.42), (131072, 2048, 17.17), (65536, 512, 16.26)],
)
def test_tide_stays_below_the_prototype(length: int, chunk: int, most: float) -> None:
    assert WEIGHTS < peak_gib(plan_settings(chunk_size=chunk), length) <= most


def test_items_of_llama_8b_are_the_known_figures() -> None:
    plan = Planner(plan_settings(), exact=True).plan(65536)
    planned = plan.bytes
    assert plan.cache_bytes == GIB // 2 + 32 * 4096  # and room for one new token
    assert planned.weights / GIB == pytest.approx(WEIGHTS, abs=0.001)
    assert planned.bridge == GIB // 2
    assert planned.active_kv == GIB // 4
    assert planned.cache == 30 * (GIB // 64 + 4096)  # the peak is in the last layer but one, before it is evicted


@pytest.mark.parametrize(
    ("name", "length", "chunk"),
    [
        ("llama-3.1-8b", 32768, 2048),
        ("llama-3.1-8b", 65536, 512),
        ("llama-3.1-8b", 131072, 2048),
        pytest.param("llama-3.2-3b", 65536, 2048, marks=pytest.mark.slow),
        ("llama-3.2-1b", 65536, 2048),
    ],
)
def test_the_papers_equations(name: str, length: int, chunk: int) -> None:
    """Eq. (1): KV_res + Hidden + Act + Temp. A Llama's Act is three rows of each width a token of the chunk.

    In the tide that chunk is C, and Hidden is the bridge; with the whole prompt as the chunk it is SnapKV.
    """
    config = shape_of(name)
    assert config is not None
    hidden, wide, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    kv, item = config["num_key_value_heads"] * config["head_dim"], 2
    row = 2 * kv * item
    cache, bridge, active = (layers - 1) * 4096 * row, length * hidden * item, length * row
    activations = item * (3 * hidden + 3 * wide)  # embedding, residual and its norm; gate, up and their product
    tide = cache + bridge + active + chunk * activations
    whole = cache + 4096 * row + bridge + length * activations
    settings = plan_settings(config, chunk_size=chunk)
    assert transient(settings, length) == pytest.approx(tide, rel=0.03)
    assert transient(plan_settings(config, method=method("oneshot")), length) == pytest.approx(whole, rel=0.03)


def transient(settings: PlanSettings, length: int) -> int:
    return live_bytes(MemoryModel(settings, None).simulated(length))


def live_bytes(items: dict[str, int]) -> int:
    """Of all but the weights."""
    return sum(items.values()) - items["weights"]


CASES = [
    # schedule, dtype, attention, length, chunk, block, budget
    ("tide", "float32", "sdpa", 700, 64, 64, 80),
    ("tide", "bfloat16", "sdpa", 700, 256, 512, 200),
    ("tide", "float32", "eager", 300, 64, 128, 100),
    ("tide", "float32", "sdpa", 90, 512, 2048, 40),
    ("tide", "float32", "sdpa", 700, 128, 256, None),
    ("oneshot", "float32", "sdpa", 700, 64, 64, 80),
    ("oneshot", "bfloat16", "eager", 250, 64, 128, 100),
    ("chunked", "float32", "sdpa", 700, 64, 64, None),
    ("chunked", "bfloat16", "eager", 250, 64, 64, None),
    ("chunked", "float32", "sdpa", 90, 512, 64, None),
    ("online", "float32", "sdpa", 700, 64, 64, 80),
    ("online", "bfloat16", "sdpa", 700, 256, 512, 200),
    ("online", "float32", "eager", 300, 64, 128, 100),
    ("online", "float32", "sdpa", 90, 512, 2048, 40),
    ("online", "float32", "sdpa", 130, 50, 64, 100),
    ("online", "float32", "sdpa", 700, 16, 64, 400),
]


@pytest.mark.parametrize("kept", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("schedule", "dtype", "attention", "length", "chunk", "block", "budget"), CASES)
def test_a_real_run_takes_what_is_simulated(
    tiny_model: Callable[..., Any],
    schedule: str,
    dtype: str,
    attention: str,
    length: int,
    chunk: int,
    block: int,
    budget: int | None,
    kept: bool,
) -> None:
    model = tiny_model(num_hidden_layers=6).to(getattr(torch, dtype))
    settings = plan_settings(
        model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]},
        method=method(schedule),
        dtype=dtype,
        attention=attention,
        chunk_size=chunk,
        score_block=block,
        budget_tokens=budget,
        max_new_tokens=5,
        device_kind="cpu",
        record_kept=kept,
    )
    ids = torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    engine = engine_settings(settings, length, attention_backend(attention, "cpu"))
    prompt, live_peak = Session(model, frozenset()).prefill(ids, engine)
    prefill = simulate(settings, length)[:-1]  # the last phase is decoding
    simulated = max(live_bytes(phase) for phase in prefill)
    measured = live_peak - storage_bytes(model.parameters())
    assert measured == pytest.approx(simulated, abs=512)
    cached = sum(store.nbytes for store in prompt.cache) + storage_bytes(prompt.kept)
    assert simulate(settings, length)[-1]["cache"] == cached


@pytest.mark.parametrize("schedule", ["tide", "oneshot", "chunked", "online"])
@pytest.mark.parametrize("layers", [3, 4, 9])
def test_what_is_left_out_changes_nothing(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, schedule: str, layers: int
) -> None:
    """Equal to the byte to a simulation of every layer and every chunk."""
    config = tiny_model().config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers}
    settings = plan_settings(config, method=method(schedule), budget_tokens=100, chunk_size=64, score_block=128)
    few = simulate(settings, 700)
    few_layers.cache_clear()
    monkeypatch.setattr("tidekv_cli.few_layers._kind", lambda layer, config, index, count: index)
    monkeypatch.setattr("tidekv_cli.simulate._representative", lambda chunks, tail: list(chunks))
    monkeypatch.setattr("tidekv_cli.token_major_phases._representative", list)
    whole = simulate(settings, 700)
    few_layers.cache_clear()
    assert max(sum(phase.values()) for phase in few) == max(sum(phase.values()) for phase in whole)
    if schedule in ("tide", "oneshot"):
        assert len(whole) == 2 * layers + 2
        assert few[:2] == whole[:2] and few[-6:] == whole[-6:]
    else:
        assert len(whole) == layers + 2
        assert few[0] == whole[0] and few[-4:] == whole[-4:]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_real_answer_takes_what_is_simulated(tiny_model: Callable[..., Any], attention: str) -> None:
    """To its last token, with sampling: where the answer and not the prefill is the highest moment too."""
    new = 200
    model = tiny_model(vocab_size=20_000, num_hidden_layers=3)
    settings = plan_settings(
        model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]},
        dtype="float32",
        attention=attention,
        chunk_size=64,
        score_block=64,
        budget_tokens=80,
        max_new_tokens=new,
        device_kind="cpu",
    )
    engine = engine_settings(settings, 150, attention_backend(attention, "cpu"))
    session = Session(model, frozenset())
    prompt, _ = session.prefill(list(range(150)), engine)
    meter = LiveMeter()
    meter.watch([*model.parameters(), *model.buffers(), prompt.logits])
    meter.watch(tensor for store in prompt.cache for tensor in (store.keys, store.values))
    with meter:
        tokens = list(session.generate(prompt, SamplingSettings(temperature=0.7, top_p=0.9, seed=1), new))
    assert len(tokens) == new
    simulated = live_bytes(simulate(settings, 150)[-1])
    measured = meter.peak_bytes - storage_bytes(model.parameters())
    assert 0.99 * simulated <= measured <= simulated + 512
