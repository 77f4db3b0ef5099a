"""Every supported architecture against the plain model, and those that are refused by name.

`TIDEKV_WRITE_DOCS=1 pytest tests/test_architectures.py -k table` makes docs/architectures.md again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

from tests.architectures import ARCHITECTURES, tiny_architecture, tiny_config
from tests.builders import write_hugging_face
from tests.cli_runner import run_cli
from tests.conftest import ROOT
from tests.planning import method, plan_settings, uniform
from tests.references import CutCache, cache_keyword, logits_after, storage_bytes
from tidekv_cli.architectures import OLDEST, REFUSED, SINCE, SUPPORTED, check_slots, release_needed
from tidekv_cli.assembly import engine_settings
from tidekv_cli.engine.adapter import ModelAdapter
from tidekv_cli.engine.backends import attention_backend
from tidekv_cli.engine.flash_cpu import FlashCPU
from tidekv_cli.engine.prefill import PrefillSettings
from tidekv_cli.engine.sampling import SamplingSettings
from tidekv_cli.engine.selectors.snapkv import SnapKV
from tidekv_cli.engine.session import Session
from tidekv_cli.engine.turning import Turning
from tidekv_cli.errors import ModelError
from tidekv_cli.memory_model import MemoryModel
from tidekv_cli.model_spec import has_experts, spec_from_config
from tidekv_cli.simulate import simulate

LENGTH, NEW = 90, 6
HERE = [kind for kind in SUPPORTED if release_needed(kind, __version__) is None]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prompt_ids(seed: int = 1) -> list[int]:
    return torch.randint(1, 128, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()


def settings(chunk: int, budget: int = LENGTH) -> PrefillSettings:
    return PrefillSettings("tide", SnapKV(window=8), uniform(budget), FlashCPU(), chunk, 64, NEW)


@torch.no_grad()
def plain(model: Any, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Last logits and greedy tokens of the model as it comes, with its own cache."""
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    fed, tokens, first = torch.tensor([ids]), [], torch.empty(0)
    for _ in range(NEW):
        logits = model(input_ids=fed, use_cache=True, **{cache_keyword(model): cache}).logits[0, -1]
        first = first if tokens else logits
        tokens.append(int(logits.argmax()))
        fed = torch.tensor([[tokens[-1]]])
    return first, tokens


@pytest.mark.parametrize("kind", HERE)
def test_equals_the_plain_model(kind: str) -> None:
    model, ids = tiny_architecture(kind), prompt_ids()
    logits, tokens = plain(model, ids)
    session = Session(model, frozenset())
    for chunk in (32, 7):  # neither divides the prompt
        prompt, _ = session.prefill(ids, settings(chunk))
        error = ((prompt.logits - logits).abs().max() / logits.abs().max()).item()
        assert error < 1e-5
        assert list(session.generate(prompt, SamplingSettings(), NEW)) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", HERE)
def test_places_as_positions_are_refused_before_weights_are_there(kind: str) -> None:
    """By name or by the simulation, exactly where the model itself would refuse them."""
    model = tiny_architecture(kind)
    config = {**model.config.to_dict(), "architectures": [SUPPORTED[kind]]}
    case = plan_settings(
        config,
        method=method("online", "streaming"),
        axis_settings={"sinks": 4, "positions": "slot"},
        dtype="float32",
        budget_tokens=40,
        device_kind="cpu",
    )
    planned = refuses(lambda: check_slots(config)) or refuses(lambda: simulate(case, 60))
    assert planned == refuses(lambda: Turning(ModelAdapter(model)))


def refuses(step: Callable[[], Any]) -> bool:
    try:
        step()
    except ModelError as error:
        assert "positions=slot" in error.message and error.hint == "use positions=absolute"
        return True
    return False


@torch.no_grad()
def plain_with_kept_rows(model: Any, ids: list[int], kept: list[torch.Tensor], tokens: list[int]) -> list[torch.Tensor]:
    """Logits after each of `tokens` where the plain model's cache is cut to the rows that were kept."""
    model.set_attn_implementation("eager")
    cache = CutCache(config=model.config)
    logits_after(model, cache, ids, 0)
    for layer, rows in zip(cache.layers, kept, strict=True):
        if layer.keys.shape[2] == len(ids):  # a layer with a window of its own keeps what it keeps
            picked = rows[None, :, :, None]
            layer.keys = layer.keys.gather(2, picked.expand(-1, -1, -1, layer.keys.shape[-1]))
            layer.values = layer.values.gather(2, picked.expand(-1, -1, -1, layer.values.shape[-1]))
    return [logits_after(model, cache, [token], position) for position, token in enumerate(tokens, len(ids))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HERE)
def test_an_evicted_run_equals_one_that_evicts_in_the_plain_model(kind: str) -> None:
    model, ids = tiny_architecture(kind), prompt_ids()
    session = Session(model, frozenset())
    prompt, _ = session.prefill(ids, settings(32, budget=40))
    tokens = list(session.generate(prompt, SamplingSettings(), NEW))
    expected = plain_with_kept_rows(model, ids, prompt.kept, tokens)
    assert tokens[1:] == [int(logits.argmax()) for logits in expected[:-1]]
    lengths = {rows.shape[1] for rows in prompt.kept}
    assert lengths <= {40, 23, LENGTH} and (40 in lengths or kind in ("mistral", "phi3", "starcoder2"))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["chunked", "online"])
@pytest.mark.parametrize("kind", HERE)
def test_token_major_schedules_equal_the_plain_model(kind: str, schedule: str) -> None:
    model, ids = tiny_architecture(kind), prompt_ids()
    logits, tokens = plain(model, ids)
    session = Session(model, frozenset())
    for chunk in (32, 7):
        prompt, _ = session.prefill(ids, replace(settings(chunk), schedule=schedule))
        assert ((prompt.logits - logits).abs().max() / logits.abs().max()).item() < 1e-5
        assert list(session.generate(prompt, SamplingSettings(), NEW)) == tokens


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["tide", "chunked", "online"])
@pytest.mark.parametrize("kind", HERE)
def test_takes_what_is_simulated(kind: str, schedule: str) -> None:
    model = tiny_architecture(kind)
    config = {**model.config.to_dict(), "architectures": [SUPPORTED[kind]]}
    case = plan_settings(
        config,
        method=method(schedule),
        dtype="float32",
        chunk_size=32,
        score_block=64,
        budget_tokens=40,
        max_new_tokens=2,
        device_kind="cpu",
    )
    engine = engine_settings(case, LENGTH, attention_backend("sdpa", "cpu"))
    _, live = Session(model, frozenset()).prefill(prompt_ids(), engine)
    phases = simulate(case, LENGTH)[:-1]
    weights = storage_bytes(model.parameters())
    assert phases[0]["weights"] == weights
    simulated = max(sum(phase.values()) for phase in phases) - weights
    assert live - weights == pytest.approx(simulated, rel=0.01)


def test_each_name_is_one_of_transformers() -> None:
    assert all(KNOWN[kind] == SUPPORTED[kind] for kind in HERE)
    assert not SUPPORTED.keys() & REFUSED.keys() and SINCE.keys() <= SUPPORTED.keys()
    assert ARCHITECTURES.keys() <= SUPPORTED.keys() | REFUSED.keys()
    assert len(SUPPORTED) >= 50 and len(HERE) >= 45


@pytest.mark.parametrize("kind", SINCE)
def test_older_releases_of_transformers_are_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ".".join(map(str, SINCE[kind]))
    config = {"architectures": [SUPPORTED[kind]], "model_type": kind}
    monkeypatch.setattr("tidekv_cli.model_spec.version", lambda _: "5.4.9")
    with pytest.raises(ModelError, match=f"{SUPPORTED[kind]}, which needs a newer transformers: {needed} or later"):
        spec_from_config(config, kind)
    for enough in (f"{needed}.0", f"{needed}.0.dev0", "6.0.0"):
        assert release_needed(kind, enough) is None


def test_the_command_names_an_older_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = '{"architectures": ["OPTForCausalLM"], "model_type": "opt"}'
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    monkeypatch.setattr("tidekv_cli.model_spec.version", lambda _: "5.5.0")
    result = run_cli("run", str(ROOT / "examples" / "garden.txt"), "-m", str(tmp_path))
    result.assert_error(3, "OPTForCausalLM", "needs a newer transformers", "5.5.0", "pip install")


@pytest.mark.parametrize("kind", HERE)
def test_a_config_of_each_is_taken(kind: str) -> None:
    config = tiny_config(kind)
    spec = spec_from_config({**config.to_dict(), "architectures": [SUPPORTED[kind]]}, kind)
    assert (spec.layers, spec.vocab_size) == (config.num_hidden_layers, config.vocab_size)


@pytest.mark.parametrize("kind", sorted(REFUSED.keys() & ARCHITECTURES.keys() & KNOWN.keys()))
def test_others_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    name = KNOWN[kind]
    config = {**tiny_config(kind).to_dict(), "architectures": [name], "model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
    (tmp_path / "doc.txt").write_text("The tide turns twice a day.\n", encoding="utf-8")
    run_cli("run", str(tmp_path / "doc.txt"), "-m", str(tmp_path)).assert_error(3, name, REFUSED[kind])


def traits(kind: str) -> str:
    """What makes it unlike a Llama, read from its config."""
    config = tiny_config(kind)
    layers = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    found = [name.replace("_", " ") for name in layers]
    found += ["sliding window"] if not layers and getattr(config, "sliding_window", None) else []
    found += ["soft-cap"] if getattr(config, "attn_logit_softcapping", None) else []
    found += ["experts"] if has_experts(config.to_dict()) else []
    return ", ".join(found)


def table() -> str:
    """docs/architectures.md, without those that the installed transformers does not have."""
    supported = [f"| `{kind}` | `{SUPPORTED[kind]}` | {traits(kind)} | {since(kind)} |" for kind in sorted(HERE)]
    refused = [f"| `{kind}` | `{KNOWN[kind]}` | {why} |" for kind, why in sorted(REFUSED.items()) if kind in KNOWN]
    lines = [
        "# Architectures",
        "",
        "Made by `tests/test_architectures.py`. Each supported one is a random tiny model whose logits (relative error",
        "below 1e-5 in float32) and greedy tokens equal the plain model's, at two chunk sizes that do not divide the",
        "prompt; with eviction its tokens equal those of the plain model with the same rows cut from its cache; the",
        "simulated peak equals the measured one within 1 %. Layers with a window of their own keep it, whatever the",
        "budget. Each is refused by name where the installed transformers is older than its line says.",
        "",
        f"## Supported ({len(SUPPORTED)})",
        "",
        "| `model_type` | architecture | unlike a Llama | transformers |",
        "|---|---|---|---|",
        *supported,
        "",
        f"## Refused by name ({len(REFUSED)})",
        "",
        "| `model_type` | architecture | why |",
        "|---|---|---|",
        *refused,
        "",
    ]
    return "\n".join(lines)


def since(kind: str) -> str:
    """The oldest release that it is proven with."""
    return ".".join(map(str, SINCE.get(kind, OLDEST)))


def test_the_table_in_the_documentation() -> None:
    path = ROOT / "docs" / "architectures.md"
    if os.environ.get("TIDEKV_WRITE_DOCS"):
        path.write_text(table(), encoding="utf-8")
    absent = (SUPPORTED.keys() - set(HERE)) | (REFUSED.keys() - KNOWN.keys())
    rows = [f"| `{kind}` |" for kind in absent]
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith(tuple(rows))] == table().splitlines()
    assert sum(line.startswith("| `") for line in lines) == len(SUPPORTED) + len(REFUSED) + 2  # and the headings


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gpt_oss", "llama4_text", "mixtral", "mimo_v2_flash"])
@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_lines_hold_for_layers_of_several_kinds(kind: str, device_kind: str) -> None:
    config = {**tiny_config(kind).to_dict(), "architectures": [SUPPORTED[kind]]}
    case = plan_settings(config, chunk_size=256, score_block=256, budget_tokens=64, device_kind=device_kind)
    model = MemoryModel(case, None)
    for length in (100, model.lines[0] + 700, 9001):
        predicted, simulated = model.peak(length), model.simulated(length)
        above = sum(predicted.values()) - sum(simulated.values())
        transient = sum(simulated.values()) - simulated["cache"] - simulated["weights"]
        assert 0 <= above <= transient / 100


@pytest.mark.parametrize("kind", ["gemma2", "phi3", "mixtral", "gpt2"])
def test_the_command_takes_them(kind: str, tmp_path: Path) -> None:
    """From a directory, and the peak is the predicted one."""
    write_hugging_face(tmp_path / "model", tiny_architecture(kind, vocab_size=400))
    (tmp_path / "doc.txt").write_text("The tide turns twice a day. " * 12, encoding="utf-8")
    flags = ("--raw", "-n", "4", "--budget", "64", "--chunk-size", "64", "--score-block", "64", "--json")
    result = run_cli("run", str(tmp_path / "doc.txt"), "-m", str(tmp_path / "model"), *flags)
    assert result.code == 0, result.err
    found = result.document
    assert found["memory"]["live_peak_bytes"] == found["plan"]["bytes"]["peak"] - found["plan"]["bytes"]["reserve"]
