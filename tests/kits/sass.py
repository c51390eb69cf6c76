"""What is wrong with a GPU's instructions can be seen without one."""

from __future__ import annotations

import re

_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")
_TO_UNIFORM = ("R2UR", "S2UR", "CS2UR", "LDCU", "VOTEU", "REDUX")
_WIDTHS = {".64": 2, ".128": 4, "WIDE": 2}


def unwritten(sass: str) -> list[str]:
    """Lines of nvdisasm's text that read a uniform register before any line wrote it.

    ptxas 12.8 (of Triton 3.6's and 3.7's wheels) makes such ones of right PTX: an address of a tensor product's operand
    in shared memory is then whatever the register held. 12.9 and 13.1 do not.
    """
    written: set[int] = set()
    found: list[str] = []
    for line in sass.splitlines():
        if re.match(r"\s*\.section", line):
            written = set()
        match = _LINE.match(line)
        if match is None:
            continue
        name, rest = match.groups()
        first, _, others = rest.partition(",")
        into = re.fullmatch(r"UR(\d+)", first.strip())
        is_write = into is not None and (name.startswith("U") or name.split(".")[0] in _TO_UNIFORM)
        if any(register not in written for register in _read(name, others if is_write else rest)):
            found.append(line.strip())
        if is_write and into is not None:
            width = max([count for mark, count in _WIDTHS.items() if mark in name], default=1)
            written.update(range(int(into[1]), int(into[1]) + width))
    return found


def _read(name: str, sources: str) -> set[int]:
    read = {int(register) for register in re.findall(r"(?<!gdesc\[)UR(\d+)", sources)}
    if name.startswith("U") and name.endswith(".64"):
        read |= {register + 1 for register in read}
    for place in re.findall(r"gdesc\[UR(\d+)\]", sources):
        # Descriptors of two operands; the left one may be in registers, and its descriptor is anything then.
        is_shared = re.match(r"R\d+, *gdesc", sources) is not None
        read |= {int(place) + at for at in (range(4) if is_shared else (2, 3))}
    return read
