"""A name for all that changes K and V besides tokens and adapters. Blocks kept on disk are found again under it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.hub.source import ModelSource
from headrace.hub.weights import safetensors_files
from headrace.seam import GroupSpec

NUM_SAMPLES = 32
SAMPLE_BYTES = 16 << 10


def fingerprint(
    config: Mapping[str, Any], source: ModelSource, groups: Sequence[GroupSpec], *, load_format: str, **facts: object
) -> str:
    """The same after a restart and on every rank; another one when weights, dtypes, shapes or this program change.

    Args:
        facts: what else counts: dtype, tokens a block, number of ranks, device, backend.
    """
    shapes = [dataclasses.asdict(group) for group in groups]
    said = [__version__, config, shapes, facts, _weights(source) if load_format == "auto" else load_format]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def _weights(source: ModelSource) -> list[list[object]]:
    paths = [source.path] if source.kind == "gguf" else sorted(safetensors_files(source))
    return [identity(path) for path in paths]


def identity(path: Path) -> list[object]:
    """Of a weight file: name, size, time of change, and a digest of its header and of samples of its data.

    Reading all of it would take as long as loading. Who changes few bytes between the samples changes the time.
    """
    about = path.stat()
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for at in range(NUM_SAMPLES + 1):
            file.seek(max(about.st_size - SAMPLE_BYTES, 0) * at // NUM_SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return [path.name, about.st_size, about.st_mtime_ns, digest.hexdigest()]
