"""Quantised checkpoints: unpacked to what they stand for and planned as that, or refused by name at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from tests.architectures import tiny_architecture
from tests.builders import tiny_causal_model
from tests.cli_runner import run_cli
from tests.quantised import write_fp8, write_mxfp4
from tidekv_cli.errors import ModelError
from tidekv_cli.loading import load_model
from tidekv_cli.model_spec import inspect_model
from tidekv_cli.quantisation import REFUSED, UNPACKED, check_quantisation, outdated


def fp8(**kind: Any) -> Callable[[Path], dict[str, torch.Tensor]]:
    return lambda path: write_fp8(path, tiny_causal_model(vocab_size=512), **kind)


WRITERS = {
    "fp8": fp8(),
    "fp8 wide blocks": fp8(block=(8, 32)),
    "fp8 high blocks": fp8(block=(32, 16)),
    "fp8 rows": fp8(block=(1, 32)),
    "fp8 tensors": fp8(block=None),
    "fp8 scalars": fp8(block=None, scale_shape=()),
    "fp8 static": fp8(block=None, scale_shape=(), static=True),
    "fp8 static blocks": fp8(static=True),
    "fp8 experts": lambda path: write_fp8(path, tiny_causal_model("qwen3_moe", vocab_size=512, **EXPERTS)),
    "mxfp4": lambda path: write_mxfp4(path, tiny_architecture("gpt_oss", vocab_size=512)),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WRITERS if outdated() is None else [])
def test_unpacked_weights_are_what_is_stored(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    meant = WRITERS[kind](tmp_path / "model")
    found = dict(load_model(inspect_model(tmp_path / "model"), dtype).model.named_parameters())
    assert found.keys() == meant.keys()
    for name, weight in found.items():
        assert weight.dtype == dtype and torch.equal(weight, meant[name].to(dtype)), name
        assert type(weight) is torch.nn.Parameter


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "fp8 experts", "fp8 static", "mxfp4"] if outdated() is None else [])
def test_the_command_plans_what_they_take(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path / "model")
    (tmp_path / "doc.txt").write_text("The tide turns twice a day. " * 12, encoding="utf-8")
    flags = ("--raw", "-n", "4", "--budget", "64", "--chunk-size", "64", "--score-block", "64", "--json")
    result = run_cli("run", str(tmp_path / "doc.txt"), "-m", str(tmp_path / "model"), *flags)
    assert result.code == 0 and result.document["result"]["tokens"] > 0, result.err
    found = result.document
    assert found["memory"]["live_peak_bytes"] == found["plan"]["bytes"]["peak"] - found["plan"]["bytes"]["reserve"]


def test_each_method_of_transformers_is_named() -> None:
    methods = {name.removesuffix("_4bit").removesuffix("_8bit") for name in AUTO_QUANTIZER_MAPPING} - {"gguf"}
    assert methods <= {*UNPACKED, *REFUSED} and not set(UNPACKED) & REFUSED.keys()


@pytest.mark.parametrize("method", REFUSED)
def test_others_are_refused_by_name(method: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_quantisation({"quantization_config": {"quant_method": method, "bits": 4}}, "some/model")
    assert all(word in caught.value.message for word in ("some/model", method, REFUSED[method]))
    assert "GGUF" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"quantization_config": {"load_in_4bit": True}}, "bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, "an unnamed method"),
        ({"quantization_config": {"quant_method": "new"}}, "new, which is not supported: the method is not known"),
        ({"quantization_config": {"quant_method": ["awq"]}}, "does not say how"),
        ({"quantization_config": "awq"}, "awq"),
        ({"quantization_config": [4]}, "does not say how"),
        ({"quantization_config": {}}, "does not say how"),
        ({"compression_config": {"format": "pack-quantized"}}, "compressed-tensors"),
    ],
)
def test_configs_that_name_none(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        check_quantisation(config, "some/model")


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_what_is_not_quantised(config: dict[str, Any]) -> None:
    check_quantisation(config, "some/model")


def test_scales_that_are_lost(tmp_path: Path) -> None:
    path = tmp_path / "model"
    write_fp8(path, tiny_causal_model())
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match="weight_scale_inv"):
        load_model(inspect_model(path), torch.float32)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_packages_that_are_too_old_are_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidekv_cli.quantisation.version", lambda name: "2.5.0" if name == package else "99.1")
    for method in UNPACKED:
        with pytest.raises(ModelError, match=f"needs {package} .* 2.5.0 is installed"):
            check_quantisation({"quantization_config": {"quant_method": method}}, "m")
