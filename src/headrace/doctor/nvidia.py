"""The driver and its devices, from `nvidia-smi` and the driver's library: known also where PyTorch can't reach them."""

from __future__ import annotations

import csv
import ctypes
import io
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace.doctor.facts import Driver, Gpu
from headrace.doctor.requirements import version_of

QUERY_TIMEOUT_S = 20
MIB = 1 << 20
NEEDED = ("index", "name", "driver_version", "memory.total", "memory.free", "compute_cap")
OPTIONAL: Mapping[str, Sequence[str]] = {
    "link_gen": ("pcie.link.gen.max",),
    "link_width": ("pcie.link.width.max",),
    "errors": ("ecc.errors.uncorrected.volatile.total",),
    "slowdown": ("clocks_event_reasons.hw_slowdown", "clocks_throttle_reasons.hw_slowdown"),
    "persistence": ("persistence_mode",),
    "mig": ("mig.mode.current",),
}
"""Key -> what drivers of several ages call it; a driver that knows none of them leaves it out."""

Query = Callable[[Sequence[str]], list[list[str]]]
"""Names of fields -> a row for each device. Raises OSError: there is no driver, or it does not know a field."""


def query_smi(fields: Sequence[str]) -> list[list[str]]:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=True)
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(done.stdout)) if row]


def gather_gpus(query: Query = query_smi, *, newest_cuda: str | None = None) -> tuple[Driver | None, tuple[Gpu, ...]]:
    """The driver and its devices; (None, ()) where there is no driver."""
    try:
        rows = query(NEEDED)
    except OSError:
        return None, ()
    more = {key: _column(query, names, len(rows)) for key, names in OPTIONAL.items()}
    gpus = tuple(_gpu(row, {key: column[place] for key, column in more.items()}) for place, row in enumerate(rows))
    cuda = _newest_cuda() if newest_cuda is None else newest_cuda
    return Driver(rows[0][2] if rows else "", cuda), gpus


def has_hardware(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether a display or compute device of this maker is on the bus."""
    for device in devices.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def _column(query: Query, names: Sequence[str], num_rows: int) -> list[str]:
    for name in names:
        try:
            found = [row[0] for row in query([name])]
        except OSError:
            continue
        if len(found) == num_rows:
            return found
    return [""] * num_rows


def _gpu(row: Sequence[str], more: Mapping[str, str]) -> Gpu:
    index, name, _, total, free, capability = row
    return Gpu(
        index=int(index),
        name=name,
        memory_bytes=(_number(total) or 0) * MIB,
        free_bytes=(_number(free) or 0) * MIB,
        capability=version_of(capability),
        link_gen=_number(more["link_gen"]),
        link_width=_number(more["link_width"]),
        uncorrected_errors=_number(more["errors"]),
        is_throttled=more["slowdown"] == "Active",
        is_persistent={"Enabled": True, "Disabled": False}.get(more["persistence"]),
        is_partitioned=more["mig"] == "Enabled",
    )


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _newest_cuda() -> str:
    """Of the driver's own library; "" where it can't be asked."""
    number = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return ""
    except (OSError, AttributeError):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"
