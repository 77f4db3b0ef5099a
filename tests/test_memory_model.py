"""Lines through two simulated lengths against simulating the length itself."""

from __future__ import annotations

import json
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import tiny_config
from tests.planning import llama_8b, marked, method, plan_settings
from tidekv_cli.memory_model import MemoryModel
from tidekv_cli.plan_settings import PlanSettings

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 128,
        "sliding_window": None,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "head_dim": 64,
        "use_sliding_window": False,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"],
        "model_type": "gemma",
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


def drawn(draw: random.Random) -> PlanSettings:
    """Settings that nothing but chance has chosen."""
    name = draw.choice(sorted(SHAPES))
    heads = SHAPES[name]["num_attention_heads"] * SHAPES[name]["head_dim"]
    config = {
        "vocab_size": draw.choice([1000, 32000]),
        "hidden_size": draw.choice([heads, 2 * heads]),
        "intermediate_size": draw.choice([512, 3000]),
        "num_hidden_layers": draw.choice([3, 4, 26]),
        "max_position_embeddings": 1 << 20,
        "rms_norm_eps": 1e-6,
        **SHAPES[name],
    }
    schedule, selector = draw.choice(["tide", "tide", "oneshot"]), draw.choice(["snapkv", "snapkv", "streaming", "all"])
    kind = draw.choice(["cpu", "cuda"])
    return plan_settings(
        config,
        method=method(schedule, selector),
        dtype=draw.choice(["float32", "bfloat16"]),
        attention=draw.choice(["sdpa", "sdpa", "eager"]),
        chunk_size=draw.choice([64, 256, 1000, 2048]),
        score_block=draw.choice([500, 2048]),
        budget_tokens=None if selector == "all" else draw.choice([64, 1000, 4096]),
        max_new_tokens=draw.choice([1, 256]),
        device_kind=kind,
        record_kept=draw.random() < 0.3,
    )


def check(settings: PlanSettings, length: int) -> None:
    """Never below the simulation, and at most 1 % of the transient part above it.

    On a card, where all of the cache grows with the prompt, beside it the rounding to blocks: of each tensor of the
    cache up to two, for lines are rounded up too, and of 16 others.
    """
    model = MemoryModel(settings, None)
    predicted, simulated = model.peak(length), model.simulated(length)
    above = sum(predicted.values()) - sum(simulated.values())
    transient = sum(simulated.values()) - simulated["cache"] - simulated["weights"]
    grows = settings.device_kind == "cuda" and settings.budget_tokens is None
    blocks = 512 * (2 * 2 * settings.spec.layers + 16) if grows else 0
    assert 0 <= above <= transient / 100 + blocks, (settings, length, predicted, simulated)


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 6, 7])
def test_lines_agree_with_simulation(seed: int) -> None:
    draw = random.Random(seed)
    check(drawn(draw), draw.randrange(1, 20_000))


@pytest.mark.parametrize("seed", marked(range(100, 152), 20))
def test_lines_agree_with_simulation_everywhere(seed: int) -> None:
    """Four lengths of each: before the lines, just on them, and anywhere."""
    draw = random.Random(seed)
    settings = drawn(draw)
    start, step = MemoryModel(settings, None).lines
    longest = 6000 if settings.attention == "eager" else 60_000
    for length in (
        draw.randrange(1, start),
        start + 3 * step + 1,
        *(start + draw.randrange(longest) for _ in range(2)),
    ):
        check(settings, min(length, longest))


def test_real_shapes_at_known_lengths() -> None:
    for length in (32768, 50_001, 131072):
        check(plan_settings(llama_8b()), length)


def test_peaks_never_fall_with_the_length() -> None:
    model = MemoryModel(plan_settings(llama_8b()), None)
    start, _ = model.lines
    lengths = sorted({start, start + 1, *range(start, 200_000, 7919)})
    peaks = [sum(model.peak(length).values()) for length in lengths]
    assert all(one <= two for one, two in pairwise(peaks))


def test_figures_are_kept_for_the_next_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = plan_settings(llama_8b())
    first = MemoryModel(settings, tmp_path).peak(50_000)
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text(encoding="utf-8"))
    assert len(kept["samples"]) == 2 and kept["windows"] == [] and kept["bends"] is False

    def never(*_: Any) -> Any:
        raise AssertionError("simulated again")

    monkeypatch.setattr("tidekv_cli.simulate.simulate", never)
    again = MemoryModel(settings, tmp_path)
    assert again.peak(50_000) == first
    assert again.peak(90_000) != first
    with pytest.raises(AssertionError, match="again"):
        MemoryModel(plan_settings(llama_8b(), max_new_tokens=2), tmp_path).peak(50_000)


KEPT, START = '{"windows": [], "bends": false, "samples": ', '"START"'
REST = '"weights": 0, "cache": 0, "active_kv": 0, "scoring": 0, "bridge": 9'


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"x": []}',
        "\x00",
        f"{KEPT}{{{START}: 3}}}}",
        f"{KEPT}{{{START}: [3]}}}}",
        f'{KEPT}{{{START}: [{{"cache": "a"}}]}}}}',
        f"{KEPT}{{{START}: []}}}}",
        "[" * 200_000,
        f'{KEPT}{{{START}: [{{"workspace": -1, {REST}}}]}}}}',
        f'{KEPT}{{"5": [], {START}: [{{"workspace": 1, {REST}}}]}}}}',
        '{"windows": 3, "bends": false, "samples": {}}',
        '{"windows": ["a"], "bends": false, "samples": {"START": []}}',
        '{"windows": [], "bends": 0, "samples": {"START": []}}',
    ],
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    simulated: list[int] = []

    def stand_in(_: PlanSettings, length: int, __: int) -> list[dict[str, int]]:
        simulated.append(length)
        return [{**dict.fromkeys(("workspace", "weights", "cache", "active_kv", "scoring"), 0), "bridge": length}]

    monkeypatch.setattr("tidekv_cli.simulate.simulate", stand_in)
    settings = plan_settings(llama_8b(), device_kind="cpu")
    start, step = MemoryModel(settings, None).lines
    for expected in ([start, start + step], [], [start, start + step], []):
        assert MemoryModel(settings, tmp_path).peak(50_000)["bridge"] == 50_000
        assert sorted(simulated) == expected
        simulated.clear()
        if not expected:
            (file,) = tmp_path.iterdir()
            file.write_text(content.replace("START", str(start)), encoding="utf-8")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    assert MemoryModel(plan_settings(llama_8b()), blocked / "plans").peak(40_000)["bridge"] > 0


def test_a_pipe_and_a_directory_in_the_files_place(tmp_path: Path) -> None:
    settings = plan_settings(llama_8b(), chunk_size=256, score_block=256, budget_tokens=64)
    expected = MemoryModel(settings, tmp_path).peak(50_000)
    (file,) = tmp_path.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert MemoryModel(settings, tmp_path).peak(50_000) == expected
    file.unlink()
    file.mkdir()
    assert MemoryModel(settings, tmp_path).peak(50_000) == expected
    assert list(tmp_path.iterdir()) == [file]  # nothing half-written is left


def test_a_search_asks_for_a_little_more() -> None:
    model = MemoryModel(plan_settings(llama_8b()), None)
    start, _ = model.lines
    near = [model.near(length) for length in range(1, start + 100)]
    assert all(0 <= more - length <= length / 100 for length, more in enumerate(near, 1))
    assert len({length for length in near if length <= start}) < 1200 and near[start:] == list(
        range(start + 1, start + 100)
    )


@pytest.mark.parametrize("schedule", marked(["tide", "oneshot"], 1))
@pytest.mark.parametrize("windows", [(3000,), (700, 3000), (200_000,)])
def test_lines_end_where_a_window_begins_to_hide_something(windows: tuple[int, ...], schedule: str) -> None:
    """Before that a sliding layer's rows are a selector's business, after it they do not grow any more."""
    layers = ["sliding_attention", "full_attention"] * len(windows)
    config = {
        **tiny_config("gemma3_text", num_hidden_layers=2 * len(windows), layer_types=layers).to_dict(),
        "architectures": ["Gemma3ForCausalLM"],
        "max_position_embeddings": 131072,
        "sliding_window": windows[-1],
        "other_window": windows[0],
    }
    sizes = {"chunk_size": 256, "score_block": 256, "budget_tokens": 64, "max_new_tokens": 5}
    case = plan_settings(config, method=method(schedule), **sizes)
    model = MemoryModel(case, None)
    begin = model.lines[0]
    lengths = {begin + 100, *(window + shift for window in windows for shift in (-5, -4, begin + 900)), 40_000}
    for length in sorted(lengths):
        predicted, simulated = (sum(items.values()) for items in (model.peak(length), model.simulated(length)))
        assert 0 <= predicted - simulated <= 0.01 * simulated, length


def test_what_is_left_to_the_types_defaults_counts() -> None:
    """A config that does not state its window has one."""
    config = {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}
    model = MemoryModel(plan_settings({**config, "vocab_size": 128}), None)
    assert model.regimes.windows == (4096,) and model.bends


def test_wide_heads_bend_where_a_kernel_does_not_take_them() -> None:
    config = {**tiny_config("gemma3_text", head_dim=512).to_dict(), "architectures": ["Gemma3ForCausalLM"]}
    assert MemoryModel(plan_settings(config), None).bends
    assert not MemoryModel(plan_settings(config, device_kind="cpu"), None).bends
