"""All checks, in the order of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from headrace.config.llm_args import LlmArgs
from headrace.doctor import backends, gpu, software, system
from headrace.doctor.facts import Facts
from headrace.doctor.finding import Finding

Check = Callable[[Facts, LlmArgs], Iterator[Finding]]

CHECKS: tuple[Check, ...] = (
    software.python,
    software.libraries,
    software.combinations,
    software.compiler,
    software.variables,
    gpu.driver,
    gpu.build,
    gpu.devices,
    system.processor,
    system.memory,
    system.shared_memory,
    system.limits,
    system.folders,
    system.network,
)
"""Of the machine and what is installed."""

BACKENDS: tuple[Check, ...] = (
    backends.device,
    backends.attention,
    backends.experts,
    backends.products,
    backends.graphs,
    backends.grammars,
)
"""Which kernels would run; these need PyTorch."""


def examine(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    """What every check finds on this machine with these settings."""
    for check in CHECKS:
        yield from check(facts, args)
    if facts.torch.version:
        for check in BACKENDS:
            yield from check(facts, args)
