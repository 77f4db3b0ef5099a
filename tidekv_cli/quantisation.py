"""Quantised checkpoints: which are unpacked to plain weights while they load, and why others are refused.

A model with its weights unpacked takes what the unquantised one takes; it is planned as that. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from tidekv_cli.errors import ModelError

# Methods that transformers unpacks by itself, without a GPU, another package or code from the hub.
UNPACKED = ("fp8", "mxfp4")
# Releases from which on that is proven; older ones lack what it is done with.
NEEDED = {"torch": (2, 6), "transformers": (5, 24)}

_NEEDS = "its layers need the package {}, which is not used here"
_GPU = "its layers run on a GPU only, with the package {}"
# By `quant_method`: what is lacking.
REFUSED: dict[str, str] = {
    "aqlm": _NEEDS.format("aqlm"),
    "auto-round": _NEEDS.format("auto-round"),
    "awq": _NEEDS.format("gptqmodel"),
    "bitnet": "its ternary weights are unpacked anew in every step by compiled code",
    "bitsandbytes": _NEEDS.format("bitsandbytes"),
    "compressed-tensors": _NEEDS.format("compressed-tensors"),
    "eetq": _GPU.format("kernels"),
    "fbgemm_fp8": _GPU.format("fbgemm-gpu"),
    "fouroversix": _NEEDS.format("fouroversix"),
    "fp_quant": _GPU.format("fp_quant"),
    "gemma": "its layers are not plain linear layers",
    "gptq": _NEEDS.format("gptqmodel"),
    "higgs": _GPU.format("flute-kernel"),
    "hqq": _NEEDS.format("hqq"),
    "metal": "its layers run on Apple's GPUs only",
    "mxfp8": "not every version of transformers that is supported here reads its scales",
    "nvfp4": _GPU.format("kernels"),
    "quanto": _NEEDS.format("optimum-quanto"),
    "quark": _NEEDS.format("amd-quark"),
    "sinq": _NEEDS.format("sinq"),
    "spqr": _GPU.format("spqr_quant"),
    "torchao": _NEEDS.format("torchao"),
    "vptq": _GPU.format("vptq"),
}


def outdated() -> str | None:
    """The package that is too old here to unpack anything, None if none is."""
    for package, needed in NEEDED.items():
        installed = version(package)
        if tuple(int(part) for part in installed.split(".")[:2]) < needed:
            return f"{package} {'.'.join(map(str, needed))} or newer, and {installed} is installed"
    return None


def check_quantisation(config: Mapping[str, Any], source: str) -> None:
    """Raise `ModelError`, naming method and reason, for weights that are quantised in a way that is not unpacked."""
    given = config.get("quantization_config")
    given = config.get("compression_config") if given is None else given
    if given is None:
        return
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if method is None and isinstance(given, Mapping):
        if given.get("load_in_4bit") or given.get("load_in_8bit"):  # what bitsandbytes wrote before it had a name
            method = "bitsandbytes"
        elif "compression_config" in config:
            method = "compressed-tensors"
    if method in UNPACKED:
        old = outdated()
        if old is not None:
            raise ModelError(
                f"{source} is quantised with {method}, which needs {old}",
                "install that, or use unquantised safetensors",
            )
        return
    why = REFUSED.get(method, "the method is not known") if isinstance(method, str) else "it does not say how"
    raise ModelError(
        f"{source} is quantised with {method or 'an unnamed method'}, which is not supported: {why}",
        "use the model's unquantised safetensors, or a GGUF file of it",
    )
