"""Configs that contradict themselves: told of as the model's damage, before any weight is read, and only that."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.architectures import tiny_config
from tests.planning import plan_settings
from tidekv_cli.architectures import SUPPORTED
from tidekv_cli.errors import ModelError
from tidekv_cli.model_spec import spec_from_config
from tidekv_cli.plan import Planner

LEFT_OUT = object()


def planned(kind: str, **changes: Any) -> int:
    """The planned peak of a prompt for a tiny model of that config."""
    config = {**tiny_config(kind).to_dict(), "architectures": [SUPPORTED[kind]], **changes}
    config = {key: value for key, value in config.items() if value is not LEFT_OUT}
    settings = plan_settings(spec=spec_from_config(config, "test"), config=config)
    return Planner(settings).plan(5000).bytes.peak


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mixtral", {"num_local_experts": 0}, "mixtral model describes none that can be run"),
        ("mixtral", {"num_experts_per_tok": 9}, "mixtral model describes none that can be run"),
        ("gpt_oss", {"num_local_experts": 0}, "gpt_oss model describes none"),
        ("mistral", {"num_key_value_heads": LEFT_OUT}, "4 attention heads cannot share 8"),
        ("mistral", {"sliding_window": 0}, "sliding_window: 0; it must be a whole number, at least 1"),
        ("mistral", {"sliding_window": -1}, "sliding_window: -1"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size: 0"),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size"),
        ("llama", {"hidden_act": "nonsense"}, "nonsense"),
        ("llama", {"rope_parameters": {"rope_type": "odd", "rope_theta": 1e4}}, "is of type odd, which is not known"),
        ("llama", {"quantization_config": {}}, "it does not say how"),
        ("llama", {"num_hidden_layers": 100_000}, "num_hidden_layers: 100000; it must be at most 1024"),
    ],
)
def test_damage_is_named(
    kind: str, changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    with pytest.raises(ModelError, match=words):
        planned(kind, **changes)
    assert not caplog.records and not recwarn.list, "torch tells of a fault at length before it raises it"


def test_a_window_that_is_switched_off() -> None:
    assert planned("qwen2", use_sliding_window=False, sliding_window=None, layer_types=None) > 0
    assert planned("qwen2", use_sliding_window=False, sliding_window=0, layer_types=None) > 0


@pytest.mark.slow
def test_plans_of_several_threads() -> None:
    settings = plan_settings()
    wanted = [replace(settings, chunk_size=size) for size in (256, 512, 768, 1024)]
    found: dict[int, int] = {}

    def plan(number: int) -> None:
        found[number] = Planner(wanted[number]).plan(9000).bytes.peak

    threads = [threading.Thread(target=plan, args=(number,)) for number in range(len(wanted))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: Planner(one).plan(9000).bytes.peak for number, one in enumerate(wanted)}
