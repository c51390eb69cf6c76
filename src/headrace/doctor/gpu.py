"""Checks of GPUs: the driver, the build of PyTorch, each device."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.llm_args import LlmArgs
from headrace.doctor.facts import Facts, Gpu
from headrace.doctor.finding import Finding
from headrace.doctor.requirements import version_of
from headrace.doctor.system import gib, num_ranks

MIN_CAPABILITY = (8, 0)
"""Ampere: bfloat16 in hardware, which Triton's kernels take for granted."""
BUSY_SHARE = 0.1
"""Of a GPU's memory that others hold."""
MIN_HOST_LINK = (4, 16)
"""Generation and lanes below which blocks come back from the host about as slowly as they are computed again."""


def driver(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    """Trap: the driver is too old for the CUDA that the programs were built for."""
    torch, found = facts.torch, facts.driver
    if found is None:
        if facts.has_gpu_hardware:
            yield Finding(
                "gpu.driver",
                "problem",
                "there is an NVIDIA GPU and nvidia-smi does not answer",
                "install the driver; in a container: docker run --gpus all, with nvidia-container-toolkit",
            )
        else:
            yield Finding("gpu.driver", "ok", "no NVIDIA GPU: models run on the CPU")
        return
    newest = f", runs CUDA up to {found.cuda}" if found.cuda else ""
    have, wanted = version_of(found.cuda), version_of(torch.cuda)
    if have and wanted and have[0] < wanted[0]:
        yield Finding(
            "gpu.driver",
            "problem",
            f"driver {found.version}{newest}; this PyTorch is built for CUDA {torch.cuda}",
            "update the driver, or install the build of PyTorch for the driver's CUDA",
        )
        return
    yield Finding("gpu.driver", "ok", f"driver {found.version}{newest}")
    if have and wanted and have < wanted:
        yield Finding(
            "gpu.driver_minor",
            "warning",
            f"the driver's CUDA {found.cuda} is older than the {torch.cuda} of this PyTorch: kernels that are compiled"
            " here may not load",
            "update the driver",
        )


def build(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    """Whether PyTorch can use the GPUs that are there."""
    torch = facts.torch
    if not facts.gpus or not torch.version:
        return
    if not torch.cuda:
        yield Finding(
            "gpu.build",
            "problem",
            f"PyTorch {torch.version} is a CPU build and there are {len(facts.gpus)} GPUs",
            "install PyTorch's CUDA build, without constraints.txt: pip install torch && pip install -e .",
        )
    elif facts.variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        yield Finding("gpu.build", "problem", "CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    elif not torch.sees_gpu:
        why = f" ({torch.error})" if torch.error else ""
        yield Finding(
            "gpu.build",
            "problem",
            f"PyTorch {torch.version} sees none of the {len(facts.gpus)} GPUs{why}",
            "see gpu.driver; in a container: docker run --gpus all; after an update of the driver: reboot",
        )
    else:
        yield Finding("gpu.build", "ok", f"PyTorch {torch.version} for CUDA {torch.cuda} sees the GPUs")


def devices(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    for gpu in facts.gpus:
        text = f"GPU {gpu.index}: {gpu.name}, {gib(gpu.free_bytes)} of {gib(gpu.memory_bytes)} GiB free"
        taken = 1 - gpu.free_bytes / gpu.memory_bytes if gpu.memory_bytes else 0.0
        if taken > BUSY_SHARE:
            yield Finding(
                "gpu.memory",
                "warning",
                f"{text}: others hold {taken:.0%}",
                "see who with nvidia-smi; end them, or choose another GPU with CUDA_VISIBLE_DEVICES",
            )
        else:
            yield Finding("gpu.memory", "ok", text)
        yield from _code(gpu, facts)
        yield from _health(gpu, args)
    names = sorted({gpu.name for gpu in facts.gpus})
    if len(names) > 1 and num_ranks(args) > 1:
        yield Finding(
            "gpu.mixed",
            "warning",
            f"GPUs of several kinds ({', '.join(names)}): the slowest sets the pace",
            "choose equal ones with CUDA_VISIBLE_DEVICES",
        )
    if num_ranks(args) > len(facts.gpus) > 0:
        yield Finding(
            "gpu.count", "problem", f"{num_ranks(args)} ranks and {len(facts.gpus)} GPUs", "lower tensor_parallel_size"
        )


def _code(gpu: Gpu, facts: Facts) -> Iterator[Finding]:
    """Trap: compiled code of one generation of GPUs does not run on another."""
    if not gpu.capability:
        return
    dotted = ".".join(map(str, gpu.capability))
    if gpu.capability < MIN_CAPABILITY:
        yield Finding(
            "gpu.generation",
            "problem",
            f"GPU {gpu.index}: compute capability {dotted}, below 8.0",
            "use an A100, an L4, an RTX 30 or a later GPU",
        )
    elif facts.torch.arches and not _has_code(gpu, facts.torch.arches):
        yield Finding(
            "gpu.generation",
            "problem",
            f"GPU {gpu.index}: this PyTorch has no code for compute capability {dotted}"
            f" ({', '.join(facts.torch.arches)})",
            "install a newer build of PyTorch",
        )
    elif gpu.capability < (8, 9):
        yield Finding(
            "gpu.fp8",
            "note",
            f"GPU {gpu.index}: no FP8 in hardware (from 8.9 on, and this is {dotted})",
            "take the 16-bit checkpoint",
        )


def _has_code(gpu: Gpu, arches: tuple[str, ...]) -> bool:
    """Machine code runs on later minor versions of its major one; virtual code (`compute_`) on everything later."""
    major, minor = gpu.capability[0], gpu.capability[1] if len(gpu.capability) > 1 else 0
    for name in arches:
        kind, _, digits = name.partition("_")
        number = version_of(digits)
        if not number:
            continue
        has = divmod(number[0], 10)
        if (kind == "sm" and has[0] == major and has[1] <= minor) or (kind == "compute" and has <= (major, minor)):
            return True
    return False


def _health(gpu: Gpu, args: LlmArgs) -> Iterator[Finding]:
    if gpu.uncorrected_errors:
        yield Finding(
            "gpu.errors",
            "problem",
            f"GPU {gpu.index}: {gpu.uncorrected_errors} uncorrected memory errors",
            "reset or replace the GPU (nvidia-smi -q -d ECC,ROW_REMAPPER)",
        )
    if gpu.is_throttled:
        yield Finding(
            "gpu.throttled",
            "warning",
            f"GPU {gpu.index} is slowed down by heat or power",
            "check cooling and power (nvidia-smi -q -d PERFORMANCE)",
        )
    if gpu.is_persistent is False:
        yield Finding(
            "gpu.persistence",
            "note",
            f"GPU {gpu.index}: no persistence mode: starts wait for the driver",
            "nvidia-smi -pm 1",
        )
    if gpu.is_partitioned:
        yield Finding(
            "gpu.partitioned",
            "note",
            f"GPU {gpu.index} is in multi-instance mode: an engine gets one instance",
            "nvidia-smi -mig 0 for the whole GPU",
        )
    link = (gpu.link_gen, gpu.link_width)
    if args.kv_cache_config.host_cache_size and None not in link:
        gen, width = gpu.link_gen or 0, gpu.link_width or 0
        if gen < MIN_HOST_LINK[0] or width < MIN_HOST_LINK[1]:
            yield Finding(
                "gpu.host_link",
                "warning",
                f"GPU {gpu.index}: PCI Express {gen} x{width}: blocks may come back from the host more slowly than they"
                " are computed again",
                "leave kv_cache_config.host_cache_size out, or compare with headrace bench",
            )
