"""What only a GPU can show; deselected where there is none. `benchmarks/gpu.py` goes further."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.planning import uniform
from tests.references import plain_logits
from tidekv_cli.engine.backends import attention_backend, failure
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session

pytestmark = pytest.mark.gpu
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("heads", [(8, 2, 64), (9, 3, 64), (32, 8, 128), (8, 1, 256)])
@pytest.mark.parametrize("name", ["sdpa", "efficient", "math", "eager"])
def test_backends_give_what_plain_attention_does(name: str, heads: tuple[int, int, int]) -> None:
    for dtype in HALVES if name == "sdpa" else (*HALVES, torch.float32):
        assert failure(attention_backend(name, "cuda"), torch.device("cuda"), dtype, heads, softcap=True) is None


@pytest.mark.parametrize("name", ["efficient", "math", "eager"])
@pytest.mark.parametrize("schedule", ["tide", "oneshot"])
def test_the_whole_cache_gives_the_plain_models_logits(tiny_model: Any, name: str, schedule: str) -> None:
    ids = list(range(100)) * 3
    expected = plain_logits(tiny_model(), ids)
    settings = PrefillSettings(schedule, SnapKV(), uniform(len(ids)), attention_backend(name, "cuda"), 64, 64, 4)
    prompt, _ = Session(tiny_model().to("cuda"), frozenset()).prefill(ids, settings)
    assert (prompt.logits.cpu() - expected).abs().max() <= 1e-4 * expected.abs().max()
