"""What is built around CUDA's kernels, with stand-ins that keep to the kernels' own conventions, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.architectures import tiny_architecture
from tests.planning import uniform
from tests.test_attention import RULES, by_definition
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.attention import PLAIN, Attention, Eager, Rule
from tidekv_cli.engine.backends import attention_backend, failure, simulated_backend
from tidekv_cli.engine.decode import next_logits, sampling_weights
from tidekv_cli.engine.flash_cuda import Efficient, Flash
from tidekv_cli.engine.masks import Visible
from tidekv_cli.engine.meter import LiveMeter
from tidekv_cli.engine.prefill import LayerMajorPrefill, PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.errors import UsageError

CPU = torch.device("cpu")


def flash(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """As flash kernels: one head size, bottom-right causal, grouped heads."""
    assert queries.shape[3] == keys.shape[3] == values.shape[3] <= 256 and keys.shape[3] % 8 == 0
    assert queries.shape[1] % keys.shape[1] == 0 and (window is None or 0 < window < keys.shape[2])
    return Eager().attend(queries, keys, values, scale, Rule(Visible(window), softcap))


def without_caps(*arguments: Any) -> tuple[Tensor, Tensor]:
    assert arguments[-1] is None
    return flash(*arguments)


def efficient(queries: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """As torch's memory-efficient kernel: no groups, causal from the upper left, LSE rounded up to 32 rows."""
    assert queries.shape[1] == keys.shape[1] == values.shape[1]
    logits = queries.float() @ keys.float().transpose(2, 3) * scale
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[2:]).triu(1).bool(), float("-inf"))
    lse = torch.full((*queries.shape[:2], -(-queries.shape[2] // 32) * 32), float("inf"))
    lse[:, :, : queries.shape[2]] = logits.logsumexp(-1)
    return (logits.softmax(-1) @ values.float()).to(queries.dtype), lse


BACKENDS = [Flash("flash-attn", flash, True), Flash("sdpa", without_caps, False), Efficient(efficient)]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("rule", [PLAIN, *RULES])
@pytest.mark.parametrize(("rows", "length", "width"), [(1, 40, 8), (5, 5, 8), (30, 70, 8), (30, 70, 4), (1, 1, 8)])
def test_every_rule_is_what_it_says(backend: Attention, rule: Rule, rows: int, length: int, width: int) -> None:
    torch.manual_seed(rows)
    queries, keys = torch.randn(1, 6, rows, 8), torch.randn(1, 2, length, 8)
    values = torch.randn(1, 2, length, width)
    out, lse = backend.attend(queries, keys, values, 0.3, rule)
    expected, expected_lse = by_definition(queries, keys, values, rule)
    assert out.shape == expected.shape and (out - expected).abs().max() < 1e-5
    assert lse.shape == expected_lse.shape and (lse - expected_lse).abs().max() < 1e-5


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("size", [6, 264])
def test_head_sizes_that_a_kernel_refuses(backend: Attention, size: int) -> None:
    """Layers of other sizes than the rest of the model's are done without the kernel."""
    queries, keys, values = torch.randn(1, 4, 9, size), torch.randn(1, 2, 30, size), torch.randn(1, 2, 30, size)
    out, _ = backend.attend(queries, keys, values, 0.1)
    assert torch.allclose(out, Eager().attend(queries, keys, values, 0.1)[0], atol=1e-5)


def test_past_keys_are_never_repeated() -> None:
    queries, keys, values = torch.randn(1, 32, 16, 8), torch.randn(1, 2, 4000, 8), torch.randn(1, 2, 4000, 8)
    meter = LiveMeter()
    with meter:
        simulated_backend("efficient", "cuda").attend(queries, keys, values, 0.3)
    assert meter.peak_bytes < 32 * 4000 * 8, "less than a copy of the keys for every head"


def test_a_trial_finds_what_is_wrong() -> None:
    heads = (6, 2, 16)
    for backend in BACKENDS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert failure(backend, CPU, dtype, heads) is None

    def upper_left(queries: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        rows = queries.shape[2]
        return flash(queries, keys[:, :, :rows], values[:, :, :rows], rest[0], None, None)

    def base_two(*arguments: Any) -> tuple[Tensor, Tensor]:
        out, lse = flash(*arguments)
        return out, lse * 1.4427

    def windowless(*arguments: Any) -> tuple[Tensor, Tensor]:
        return flash(*arguments[:4], None, None)

    def nothing(queries: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.full_like(queries, float("nan")), torch.zeros(queries.shape[:3])

    for wrong in (upper_left, base_two, windowless, nothing):
        assert "is off by" in str(failure(Flash("x", wrong, True), CPU, torch.float32, heads)), wrong.__name__

    def capless(*arguments: Any) -> tuple[Tensor, Tensor]:
        return flash(*arguments[:5], None)

    assert failure(Flash("x", capless, True), CPU, torch.float32, heads) is None
    assert "is off by" in str(failure(Flash("x", capless, True), CPU, torch.float32, heads, softcap=True))

    def refusing(*_: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("no kernel image is available\nand more")

    assert failure(Flash("x", refusing, True), CPU, torch.float32, heads) == "no kernel image is available"


def test_a_trial_of_what_is_not_installed() -> None:
    backend = attention_backend("flash-attn", "cuda")
    assert failure(backend, CPU, torch.bfloat16, (4, 2, 16)) == "No module named 'flash_attn'"
    assert failure(attention_backend("sdpa", "cuda"), CPU, torch.bfloat16, (4, 2, 16)) is not None


def test_a_trial_that_runs_out_of_memory_is_no_refusal() -> None:
    def full(*_: Any) -> tuple[Tensor, Tensor]:
        raise RuntimeError("CUDA out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        failure(Flash("x", full, True), CPU, torch.float32, (4, 2, 16))


def test_by_name() -> None:
    for name in ("sdpa", "math", "eager"):
        assert attention_backend(name, "cpu").name == name
    for name in ("flash-attn", "sdpa", "efficient", "math", "eager"):
        assert attention_backend(name, "cuda").name == simulated_backend(name, "cuda").name == name
    for name in ("flash-attn", "efficient"):
        with pytest.raises(UsageError, match=name):
            attention_backend(name, "cpu")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("rule", [PLAIN, Rule(Visible(9)), Rule(Visible(9), 2.0)])
def test_what_is_simulated_has_the_same_shapes(backend: Attention, rule: Rule) -> None:
    queries, keys, values = torch.randn(1, 6, 30, 8), torch.randn(1, 2, 70, 8), torch.randn(1, 2, 70, 8)
    real = backend.attend(queries, keys, values, 0.3, rule)
    simulated = simulated_backend(backend.name, "cuda").attend(queries, keys, values, 0.3, rule)
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in simulated]


def on_meta(model: Any) -> Any:
    """The model's shapes on another device than the CPU, where what is made on the CPU by mistake raises."""
    with torch.no_grad():
        return model.to("meta")


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "qwen3", "phi3"])
@pytest.mark.parametrize("name", ["flash-attn", "sdpa", "efficient", "math", "eager"])
def test_all_stays_on_the_models_device(kind: str, name: str) -> None:
    adapter = ModelAdapter(on_meta(tiny_architecture(kind).to(torch.bfloat16)))
    ids = torch.zeros(1, 90, dtype=torch.long, device="meta")
    for schedule in ("tide", "oneshot"):
        backend = simulated_backend(name, "cuda")
        settings = PrefillSettings(schedule, SnapKV(window=8), uniform(30), backend, 32, 16, 4)
        prompt = LayerMajorPrefill(adapter, ids, settings).run()
        held = [prompt.logits, *prompt.kept, *(store.keys for store in prompt.cache)]
        weights = sampling_weights(next_logits(adapter, prompt, [0]), SamplingSettings(1.0, 0.5))
        assert {tensor.device.type for tensor in (*held, weights)} == {"meta"}
