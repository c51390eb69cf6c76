"""What checks know of a machine: plain values, gathered once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a package asks of another."""

    owner: str
    """The package that asks, with the extra it asks for (`headrace[eval]`)."""
    name: str
    bounds: tuple[tuple[str, str], ...]
    """Operator and version: (">=", "2.11")."""
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed PyTorch."""

    version: str
    cuda: str = ""
    """Version of CUDA it was built for; empty for a CPU build."""
    arches: tuple[str, ...] = ()
    """Architectures it has code for: `sm_90`, `compute_100`."""
    sees_gpu: bool = False
    error: str = ""
    """Why it can't be imported or can't reach the GPUs."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device, as the driver reports it. None is what it does not tell."""

    index: int
    name: str
    memory_bytes: int
    free_bytes: int
    capability: Version
    link_gen: int | None = None
    """Of PCI Express, the best that device and slot can do."""
    link_width: int | None = None
    uncorrected_errors: int | None = None
    is_throttled: bool = False
    """By heat or power, in hardware."""
    is_persistent: bool | None = None
    is_partitioned: bool = False
    """Multi-instance mode."""


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's kernel driver."""

    version: str
    cuda: str
    """The newest CUDA that it runs; empty if it does not say."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Main memory, in bytes."""

    total_bytes: int
    free_bytes: int
    """What this process may still take, its control group considered."""
    swap_used_bytes: int
    shared_bytes: int
    """Size of /dev/shm; 0 if there is none."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The CPU."""

    model: str
    architecture: str
    features: frozenset[str]
    num_cores: int
    num_usable: float
    """Cores that this process gets: by affinity, and by its control group's quota."""
    num_nodes: int = 1
    """NUMA nodes."""
    num_allowed_nodes: int = 1
    """Nodes whose cores this process may run on."""
    governor: str = ""
    load: float = 0.0
    """Processes that ran or waited for a core, on average over the last minute."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the system lets one process have."""

    open_files: int
    max_open_files: int
    """The hard limit, up to which a process may raise its own."""
    processes: int | None = None
    """Threads and processes of the control group; None without a limit."""


@dataclass(frozen=True, slots=True)
class Folder:
    """Where something is kept."""

    purpose: str
    variable: str
    """The variable that moves it."""
    path: str
    is_writable: bool
    free_bytes: int
    file_system: str = ""
    runs_code: bool = True
    """Not mounted noexec."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server would listen."""

    host: str
    port: int
    problem: str = ""
    """Why it can't."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """What compiles kernels here."""

    c: str
    """Path of the C compiler; empty if there is none."""
    has_python_headers: bool
    native_problem: str = ""
    """Why the CPU kernels are not there; empty when they are."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One machine, one Python environment."""

    python: Version
    libraries: Mapping[str, str]
    """Installed packages that matter, with their versions."""
    requirements: tuple[Requirement, ...]
    torch: TorchBuild
    driver: Driver | None
    gpus: tuple[Gpu, ...]
    has_gpu_hardware: bool
    """The machine has NVIDIA devices, with or without a driver that works."""
    memory: Memory
    processor: Processor
    limits: Limits
    folders: tuple[Folder, ...]
    address: Address
    compiler: Compiler
    knows_its_name: bool = True
    """The machine's own name resolves."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables that change how things run."""

    @property
    def on_gpu(self) -> bool:
        """Whether engines would run on one."""
        return self.torch.sees_gpu and bool(self.gpus)
