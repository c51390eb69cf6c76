"""Checks of what is installed: Python, libraries and their combinations, the compiler, environment variables."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.llm_args import LlmArgs
from headrace.doctor.facts import Facts
from headrace.doctor.finding import Finding, Level
from headrace.doctor.requirements import is_met, text_of, version_of

PYTHONS = ((3, 10), (3, 12))
FIRST_UNTRIED_TORCH = (2, 14)


def python(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    text = "Python " + ".".join(map(str, facts.python))
    first, last = PYTHONS
    if facts.python[:2] < first:
        yield Finding("software.python", "problem", f"{text}: 3.10 is the oldest that works", "install Python 3.12")
    elif facts.python[:2] > last:
        yield Finding("software.python", "note", f"{text}: tested are 3.10 to 3.12", "take 3.12 if anything fails")
    else:
        yield Finding("software.python", "ok", text)


def libraries(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    """Each package within the bounds of those that need it; what nobody needs here is only listed."""
    if not facts.torch.version:
        yield Finding(
            "software.torch",
            "problem",
            f"PyTorch can't be imported: {facts.torch.error}",
            "install it again: pip install --force-reinstall torch",
        )
    elif version_of(facts.torch.version) >= FIRST_UNTRIED_TORCH:
        yield Finding(
            "software.torch",
            "note",
            f"PyTorch {facts.torch.version} is newer than any that was tried",
            "pip install 'torch<2.14' if anything fails",
        )
    if not facts.requirements:
        yield Finding(
            "software.libraries",
            "note",
            "Headrace is not installed as a package: no bounds are known",
            "pip install -e .",
        )
    has_problem = False
    for each in facts.requirements:
        installed = facts.libraries.get(each.name)
        if installed is None and not each.is_optional and each.owner == "headrace":
            has_problem = True
            yield Finding(
                "software.missing", "problem", f"{each.name} is not installed", f"pip install '{text_of(each)}'"
            )
        elif installed is not None and not is_met(each, installed):
            has_problem = True
            level = "problem" if each.owner == "headrace" else "warning"
            yield Finding(
                "software.bounds",
                level,
                f"{each.name} {installed}, and {each.owner} wants {text_of(each)}",
                f"pip install '{text_of(each)}'",
            )
    if not has_problem:
        listed = ", ".join(f"{name} {version}" for name, version in facts.libraries.items())
        yield Finding("software.libraries", "ok", listed)


def combinations(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    """Pairs that are each fine and fail together."""
    has_triton = "triton" in facts.libraries
    if facts.on_gpu and not has_triton:
        yield Finding(
            "software.triton",
            "problem",
            "a GPU and no Triton, which compiles the GPU's kernels",
            "pip install triton, in the release that PyTorch's CUDA build names",
        )
    if facts.on_gpu and facts.variables.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield Finding(
            "software.triton",
            "problem",
            "TRITON_INTERPRET is set: kernels would run in an interpreter",
            "unset TRITON_INTERPRET",
        )
    if args.guided_decoding_backend == "xgrammar" and "xgrammar" not in facts.libraries:
        yield Finding(
            "software.xgrammar",
            "problem",
            "guided_decoding_backend is xgrammar, which is not installed",
            "pip install 'headrace[grammar]', or leave the setting out",
        )
    if args.model_impl == "transformers" and "transformers" not in facts.libraries:
        yield Finding(
            "software.transformers",
            "problem",
            "model_impl is transformers, which is not installed",
            "pip install 'headrace[transformers]'",
        )


def compiler(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    has = facts.compiler
    if facts.on_gpu and not has.c:
        yield Finding(
            "software.compiler",
            "problem",
            "no C compiler: Triton needs one to start its kernels",
            "apt-get install gcc, or set CC",
        )
    elif facts.on_gpu and not has.has_python_headers:
        yield Finding(
            "software.compiler",
            "problem",
            "no Python.h: Triton can't compile what starts its kernels",
            "apt-get install python3-dev (of this Python's version)",
        )
    elif has.native_problem:
        yield Finding(
            "software.native",
            "note" if facts.on_gpu else "warning",
            f"the CPU kernels are not compiled, slower torch code runs: {has.native_problem}",
            "apt-get install gcc, or set CC" if not has.c else "mend what the message names",
        )
    else:
        yield Finding("software.compiler", "ok", f"{has.c or 'no C compiler'}, the CPU kernels are compiled")


ADVICE: tuple[tuple[str, Level, str, str], ...] = (
    ("CUDA_LAUNCH_BLOCKING", "warning", "every kernel waits for the one before it", "unset CUDA_LAUNCH_BLOCKING"),
    ("PYTORCH_NO_CUDA_MEMORY_CACHING", "warning", "every tensor is asked of the driver",
     "unset PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ("NCCL_P2P_DISABLE", "note", "GPUs exchange data through main memory", "unset NCCL_P2P_DISABLE"),
    ("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "note", "it has no effect here", "unset it"),
    ("TRTLLM_ENABLE_RENDER_ENDPOINTS", "note", "/render is always there", "unset it"),
)  # fmt: skip
"""Variable, level, what it does, what to do about it."""


def variables(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    for name, level, effect, remedy in ADVICE:
        if facts.variables.get(name, "0") not in ("", "0"):
            yield Finding("software.variables", level, f"{name} is set: {effect}", remedy)
    if not facts.on_gpu:
        return
    settings = facts.variables.get("PYTORCH_ALLOC_CONF") or facts.variables.get("PYTORCH_CUDA_ALLOC_CONF")
    if not settings:
        yield Finding(
            "software.allocator",
            "note",
            "PYTORCH_ALLOC_CONF is not set: long runs with very different lengths can fragment the GPU's memory",
            "after an out-of-memory error with much 'reserved but unallocated':"
            " PYTORCH_ALLOC_CONF=max_split_size_mb:8192",
        )
