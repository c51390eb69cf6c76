"""What one call of the sampler works on and brings."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headrace.sampling.logprobs import HostLogprobs
from headrace.sampling.rows import RowGroup
from headrace.sampling.state import RowParams
from headrace.seam import RowLogprobs


class Report(NamedTuple):
    group: RowGroup
    logprobs: HostLogprobs


class Raw(NamedTuple):
    """Raw logits kept for a report; the others may be read where they are."""

    group: RowGroup
    logits: Tensor  # [rows of the group, vocab]


@dataclass(frozen=True)
class Sampled:
    """What one call brought, row by row. Tensors stay on the device; reading `logprobs` waits for its copy."""

    tokens: Tensor  # [rows] int64
    done: Tensor  # [rows] bool: a stop id, or the sequence has its full length; false where the host chooses
    errors: dict[int, str]
    """By row: this row's work failed; its token means nothing and isn't in the slot's history."""
    reports: list[Report]
    num_logprobs: NDArray[np.int32]  # [rows] top K wanted, -1 for none

    @cached_property
    def logprobs(self) -> dict[int, RowLogprobs]:
        """By row, for the slots that asked: one position each."""
        found: dict[int, RowLogprobs] = {}
        for report in self.reports:
            host = report.logprobs.wait()
            for place, row in enumerate(report.group.host.tolist()):
                columns = slice(0, 1 + int(self.num_logprobs[row]))
                at = slice(place, place + 1)
                found[row] = RowLogprobs(host.ids[at, columns], host.values[at, columns], host.ranks[at])
        return found


@dataclass(frozen=True, slots=True)
class StepRows:
    """One call's rows: what the host knows of them, and their parameters on the device."""

    slots: NDArray[np.int64]  # [rows]
    features: NDArray[np.int32]  # [rows]
    any_features: int
    params: RowParams
    lengths: Tensor  # [rows] int64
    pending: Tensor | None  # [rows, n] int64, padded with -1
    errors: dict[int, str] = field(default_factory=dict)

    def where(self, feature: int) -> RowGroup:
        return RowGroup.where(self.features & feature != 0, self.lengths.device)
