"""Which kernels run experts: what the names of `moe_config.backend` mean here."""

from __future__ import annotations

import logging

from headrace import plugins
from headrace.kernels.moe.port import MoeBackend

log = logging.getLogger("headrace.layers")

_said: set[str] = set()
"""Names that the log has told about: layers ask one after another."""

OWN_BACKENDS = {"VANILLA": "torch", "TRITON": "triton"}
"""`moe_config.backend` -> the plug-in it names; every other name of the reference means the fastest one here."""

REFERENCE_BACKENDS = frozenset(
    {"CUTLASS", "CUTEDSL", "CUTEDSL_FC12", "TRTLLM", "DEEPGEMM", "DENSEGEMM", "MARLIN", "MEGAMOE_DEEPGEMM"}
    | {"MEGAMOE_CUTEDSL"}
)
"""Names of the reference's kernels, none of which is here."""


def find_backend(name: str, device_type: str) -> MoeBackend:
    """The backend that `moe_config.backend` means on this device.

    Raises:
        ValueError: TRITON without a GPU, or a name that is neither the reference's nor a plug-in's.
    """
    fastest = "triton" if device_type == "cuda" else "cpu"
    wanted = name.upper()
    if wanted == "FIXED":  # `deterministic`
        return plugins.load("kernels.moe", "fixed" if fastest == "triton" else fastest)()
    if wanted == "AUTO":
        return plugins.load("kernels.moe", fastest)()
    if wanted in REFERENCE_BACKENDS:
        if wanted not in _said:
            _said.add(wanted)
            log.info("moe_config.backend: %s is %r here", wanted, fastest)
        return plugins.load("kernels.moe", fastest)()
    found = OWN_BACKENDS.get(wanted, name.lower())
    if found == "triton" and device_type != "cuda":
        raise ValueError("moe_config.backend: TRITON needs a GPU: use AUTO")
    return plugins.load("kernels.moe", found)()
