"""Looks at this machine. Every question that can't be answered has an answer that says so; none of them fails."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import resource
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.config.machine import free_memory_bytes, total_memory_bytes
from headrace.doctor.facts import (
    Address,
    Compiler,
    Facts,
    Limits,
    Memory,
    Processor,
    Requirement,
    TorchBuild,
)
from headrace.doctor.folders import gather_folders
from headrace.doctor.nvidia import gather_gpus, has_hardware
from headrace.doctor.requirements import normal, read

LIBRARIES = (
    "headrace", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "fastapi",
    "uvicorn", "pyzmq", "llguidance", "xgrammar", "flashinfer-python", "fla-core", "gguf", "lm-eval", "matplotlib",
    "grpcio", "opentelemetry-sdk",
)  # fmt: skip
"""In the order of the report."""
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "TRITON_INTERPRET", "TRITON_CACHE_DIR", "NCCL_P2P_DISABLE", "NCCL_DEBUG",
    "LD_PRELOAD", "CC", "http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY",
    "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "TRTLLM_ENABLE_RENDER_ENDPOINTS",
)  # fmt: skip


def gather(*, host: str, port: int) -> Facts:
    """This machine and this Python. Compiles the CPU kernels if they have not been yet, as any engine would."""
    driver, gpus = gather_gpus()
    libraries = _libraries()
    return Facts(
        python=tuple(sys.version_info[:3]),
        libraries=libraries,
        requirements=tuple(_requirements()),
        torch=_torch(),
        driver=driver,
        gpus=gpus,
        has_gpu_hardware=bool(gpus) or has_hardware(),
        memory=_memory(),
        processor=_processor(),
        limits=_limits(),
        folders=gather_folders(),
        address=_address(host, port),
        compiler=_compiler(),
        knows_its_name=_knows_its_name(),
        variables={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _libraries() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _requirements() -> Iterator[Requirement]:
    """Of Headrace and of PyTorch, as far as they are about packages that are listed."""
    known = {normal(name) for name in LIBRARIES}
    for owner in ("headrace", "torch"):
        try:
            lines = importlib.metadata.requires(owner) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        yield from (each for each in read(owner, lines) if each.name in known)


def _torch() -> TorchBuild:
    try:
        import torch
    except Exception as error:  # a build for other libraries fails in any way
        return TorchBuild("", error=f"{type(error).__name__}: {' '.join(str(error).split())}")
    version, cuda = str(torch.__version__), torch.version.cuda or ""
    if not cuda:
        return TorchBuild(version)
    try:
        return TorchBuild(version, cuda, tuple(torch.cuda.get_arch_list()), torch.cuda.is_available())
    except Exception as error:  # a driver that went away says so here
        return TorchBuild(version, cuda, error=f"{type(error).__name__}: {' '.join(str(error).split())}")


def _memory() -> Memory:
    swap = {key: _meminfo(key) for key in ("SwapTotal", "SwapFree")}
    try:
        shared_bytes = shutil.disk_usage("/dev/shm").total
    except OSError:
        shared_bytes = 0
    return Memory(total_memory_bytes(), free_memory_bytes(), swap["SwapTotal"] - swap["SwapFree"], shared_bytes)


def _meminfo(name: str) -> int:
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _processor() -> Processor:
    from headrace.kernels._native import processor_features

    usable = os.sched_getaffinity(0)
    nodes = [
        _cpu_list(path.read_text()) for path in Path("/sys/devices/system/node").glob("node[0-9]*/cpulist")
    ]  # empty where the system does not tell
    nodes = [cores for cores in nodes if cores]
    model = [line.split(":", 1)[1].strip() for line in _text("/proc/cpuinfo").splitlines() if line[:10] == "model name"]
    return Processor(
        model=model[0] if model else platform.processor() or "unknown",
        architecture=platform.machine(),
        features=processor_features(),
        num_cores=os.cpu_count() or len(usable),
        num_usable=min(float(len(usable)), _quota()),
        num_nodes=max(len(nodes), 1),
        num_allowed_nodes=max(sum(1 for cores in nodes if cores & usable), 1),
        governor=_text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip(),
        load=os.getloadavg()[0],
    )


def _quota() -> float:
    """Cores that the control group (version 2) grants."""
    words = _text("/sys/fs/cgroup/cpu.max").split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else float("inf")


def _cpu_list(text: str) -> set[int]:
    """`0-3,8` as a set."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _limits() -> Limits:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = _text("/sys/fs/cgroup/pids.max").strip()
    return Limits(_limit(soft), _limit(hard), int(processes) if processes.isdigit() else None)


def _limit(value: int) -> int:
    return sys.maxsize if value == resource.RLIM_INFINITY else value


def _address(host: str, port: int) -> Address:
    if port == 0:
        return Address(host, port)
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM,
                                                                   flags=socket.AI_PASSIVE):  # fmt: skip
            with socket.socket(family, kind, protocol) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind(place)
    except OSError as error:
        return Address(host, port, error.strerror or str(error))
    return Address(host, port)


def _compiler() -> Compiler:
    from headrace.kernels._native import library

    named = os.environ.get("CC", "").split()
    path = shutil.which(named[0]) if named else shutil.which("cc") or shutil.which("gcc")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    with _last_warning("headrace.kernels._native") as said:
        problem = "" if library() is not None else "unknown"
    return Compiler(path or "", headers.exists(), (said[-1] if said else problem) if problem else "")


@contextmanager
def _last_warning(name: str) -> Iterator[list[str]]:
    """What a logger says meanwhile, in place of its usual output."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(str(record.args[-1]) if isinstance(record.args, tuple) and record.args else record.getMessage())

    logger = logging.getLogger(name)
    handler, propagates = Keep(logging.WARNING), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield said
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


def _knows_its_name() -> bool:
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return False
    return True


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
