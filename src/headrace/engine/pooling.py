"""Hidden states that leave the engine: of a row's last token, or summed over the row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headrace.engine.batch import Wanted
from headrace.engine.staging import Upload, stage
from headrace.seam import LAST_HIDDEN, SUM_HIDDEN, Section, SectionResult

__all__ = ["Pooled"]

NO_NUMBERS = "the hidden states are no numbers (NaN): the weights are damaged, or float16 is too small; try bfloat16"


class Pooled:
    """What the rows of one section give, on its way to the host."""

    def __init__(self, section: Section, wanted: Wanted, hidden: Tensor) -> None:
        """Args: hidden: [wanted tokens, hidden] after the last norm."""
        rows = np.flatnonzero(section.flags & (LAST_HIDDEN | SUM_HIDDEN))
        counts = np.where(section.flags[rows] & SUM_HIDDEN, section.num_tokens[rows], 1).astype(np.int64)
        # A row's wanted tokens stand one after another and end with its last one.
        of_token = np.repeat(np.arange(len(rows)), counts)
        inside = np.arange(counts.sum()) - (np.cumsum(counts) - counts)[of_token]
        tokens = (wanted.at[rows] - counts + 1)[of_token] + inside
        at, row = stage([tokens, of_token], hidden.device)
        sums = torch.zeros((len(rows), hidden.shape[1]), dtype=torch.float32, device=hidden.device)
        self._rows: list[int] = rows.tolist()
        self._upload = Upload(sums.index_add_(0, row, hidden[at].float()))

    @staticmethod
    def is_wanted(section: Section) -> bool:
        return bool((section.flags & (LAST_HIDDEN | SUM_HIDDEN)).any())

    def add_to(self, result: SectionResult) -> SectionResult:
        """The result of the same rows, with their hidden states. Waits for the device."""
        found = dict(zip(self._rows, self._upload.wait()))
        bad = [row for row, values in found.items() if not np.isfinite(values).all()]
        return replace(result, hidden=found, errors={**dict.fromkeys(bad, NO_NUMBERS), **result.errors})
