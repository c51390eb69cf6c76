"""Checks of the machine itself: memory, processor, limits, folders, network."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.llm_args import LlmArgs
from headrace.doctor.facts import Facts, Folder
from headrace.doctor.finding import Finding

GIB = 1 << 30
MIN_FREE_BYTES = 2 * GIB
"""Of main memory: what a process with PyTorch takes before a model."""
MIN_SHARED_BYTES = GIB
MIN_OPEN_FILES = 4096
WANTED_OPEN_FILES = 65_536
MIN_PROCESSES = 512
MIN_FOLDER_BYTES = GIB
SHARED_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse", "glusterfs", "afs")
"""Beginnings of the names of file systems that other machines see too, or that are slow in the same way."""


def num_ranks(args: LlmArgs) -> int:
    return args.tensor_parallel_size * args.pipeline_parallel_size * args.context_parallel_size


def memory(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    has = facts.memory
    text = f"{gib(has.free_bytes)} of {gib(has.total_bytes)} GiB can be taken"
    if has.free_bytes < MIN_FREE_BYTES:
        yield Finding("system.memory", "problem", text, "end other programs, or raise the container's memory limit")
    else:
        yield Finding("system.memory", "ok", text)
    if has.swap_used_bytes > GIB:
        yield Finding(
            "system.swap",
            "warning",
            f"{gib(has.swap_used_bytes)} GiB are swapped out: an engine that is swapped stalls for seconds",
            "end other programs, or turn swap off (swapoff -a)",
        )


def shared_memory(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    has_bytes = facts.memory.shared_bytes
    is_needed = max(num_ranks(args), len(facts.gpus)) > 1
    text = f"/dev/shm has {has_bytes / GIB:.2f} GiB"
    if has_bytes >= MIN_SHARED_BYTES or not is_needed:
        yield Finding("system.shared_memory", "ok", text)
        return
    yield Finding(
        "system.shared_memory",
        "problem" if num_ranks(args) > 1 else "warning",
        f"{text}: NCCL exchanges data of several GPUs there and ends with a bus error when it is full",
        "start the container with --ipc=host or --shm-size=16g (Kubernetes: an emptyDir of medium Memory on /dev/shm)",
    )


def limits(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    files, most = facts.limits.open_files, facts.limits.max_open_files
    if files < MIN_OPEN_FILES:
        remedy = f"ulimit -n {min(most, WANTED_OPEN_FILES)} before the start"
        if most < MIN_OPEN_FILES:
            remedy = f"raise the hard limit: LimitNOFILE={WANTED_OPEN_FILES} in the systemd unit, or limits.conf"
        yield Finding("system.open_files", "warning", f"{files} open files: each client's connection is one", remedy)
    else:
        yield Finding("system.open_files", "ok", f"{files} open files" if files < 1 << 40 else "no limit of open files")
    processes = facts.limits.processes
    if processes is not None and processes < MIN_PROCESSES:
        yield Finding(
            "system.processes",
            "warning",
            f"{processes} threads and processes for the whole container: an engine and its server take hundreds",
            "raise the limit (docker run --pids-limit 4096, Kubernetes: podPidsLimit)",
        )


def processor(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    cpu = facts.processor
    found = [
        name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16") if name in cpu.features
    ]
    text = (
        f"{cpu.model}, {cpu.num_usable:g} of {cpu.num_cores} cores, {', '.join(found) or 'no vector extensions known'}"
    )
    yield Finding("system.processor", "ok", text)
    if cpu.architecture in ("x86_64", "AMD64") and cpu.features and "avx2" not in cpu.features:
        yield Finding(
            "system.vectors",
            "warning",
            "no AVX2: models on the CPU are several times slower",
            "serve on another machine, or let the virtual machine pass the host's CPU on (cpu: host)",
        )
    if cpu.num_usable < 2:
        yield Finding(
            "system.cores",
            "warning",
            f"{cpu.num_usable:g} cores: the server and the engine take turns",
            "give the container at least 2 (4 with a GPU)",
        )
    if cpu.load > cpu.num_usable / 2:
        yield Finding(
            "system.load",
            "note",
            f"load average {cpu.load:.1f} on {cpu.num_usable:g} cores: others work here, which slows a server down and "
            "makes what is measured vary",
            "see who (ps aux --sort=-%cpu | head), and measure when they are done",
        )
    if cpu.num_nodes > 1 and cpu.num_allowed_nodes > 1:
        yield Finding(
            "system.numa",
            "note",
            f"{cpu.num_nodes} NUMA nodes, and this process may run on {cpu.num_allowed_nodes}: memory may be far from"
            " the cores, or from the GPU",
            "numactl --cpunodebind=0 --membind=0 headrace serve ... (the node of the GPU: nvidia-smi topo -m)",
        )
    if cpu.governor == "powersave":
        yield Finding(
            "system.governor",
            "note",
            "the cores' governor is powersave: times vary with their clocks",
            "cpupower frequency-set -g performance",
        )


def folders(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    for folder in facts.folders:
        yield from _folder(folder, facts, several=num_ranks(args) > 1)


def _folder(folder: Folder, facts: Facts, *, several: bool) -> Iterator[Finding]:
    what = f"{folder.path} ({folder.purpose})"
    move = f"set {folder.variable} to another folder"
    compiles = folder.variable in ("HEADRACE_CACHE", "TRITON_CACHE_DIR")
    needed = folder.variable != "TRITON_CACHE_DIR" or facts.has_gpu_hardware
    if not folder.is_writable:
        level = "problem" if folder.variable == "TMPDIR" else "warning" if needed else "note"
        yield Finding("folders.writable", level, f"{what} can't be written", f"change its owner, or {move}")
    elif folder.free_bytes < MIN_FOLDER_BYTES and needed:
        free = f"{folder.free_bytes / GIB:.2f} GiB free"
        yield Finding("folders.space", "warning", f"{what}: {free}", f"make room, or {move}")
    elif compiles and not folder.runs_code and needed:
        yield Finding(
            "folders.noexec",
            "problem",
            f"{what} is mounted noexec: compiled kernels can't be loaded",
            f"mount it without noexec, or {move}",
        )
    elif folder.variable == "TRITON_CACHE_DIR" and is_shared(folder.file_system) and needed:
        yield Finding(
            "folders.shared",
            "problem" if several else "warning",
            f"{what} is on {folder.file_system}: ranks that compile at once there read half-written kernels",
            "set TRITON_CACHE_DIR to a folder on a local disk",
        )
    elif folder.variable == "HF_HOME" and is_shared(folder.file_system):
        yield Finding(
            "folders.network",
            "note",
            f"{what} is on {folder.file_system}: models load at its pace",
            "keep the model on a local disk where starts matter",
        )
    else:
        yield Finding("folders.writable", "ok", f"{what}, {gib(folder.free_bytes)} GiB free")


def is_shared(file_system: str) -> bool:
    return file_system.startswith(SHARED_FILE_SYSTEMS)


def network(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    address = facts.address
    place = f"{address.host}:{address.port}"
    if address.problem:
        yield Finding(
            "network.port",
            "problem",
            f"{place} can't be listened on: {address.problem}",
            f"end what has it (ss -ltnp sport = :{address.port}), or name another with --port",
        )
    else:
        yield Finding("network.port", "ok", f"{place} is free" if address.port else f"{address.host} has free ports")
    if not facts.knows_its_name and num_ranks(args) > 1:
        yield Finding(
            "network.name",
            "warning",
            "this machine's own name does not resolve",
            "add it to /etc/hosts",
        )
    proxies = [name for name in ("http_proxy", "HTTP_PROXY") if facts.variables.get(name)]
    exempt = facts.variables.get("no_proxy", facts.variables.get("NO_PROXY", ""))
    if proxies and "localhost" not in exempt and exempt != "*":
        yield Finding(
            "network.proxy",
            "note",
            f"{proxies[0]} is set: clients here reach localhost through the proxy",
            "export no_proxy=localhost,127.0.0.1",
        )


def gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f}"
