"""Experts chosen by a table of token ids (Roller et al. 2021); the router only weighs their results."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.layers.experts import Experts
from headrace.layers.factory import LayerFactory
from headrace.layers.norm import Norm
from headrace.layers.port import Act
from headrace.layers.recurrent import SmallWeights
from headrace.layers.weights import Slot


class HashedExperts:
    """Experts whose choice is the token's row of a table."""

    def __init__(self, experts: Experts, table: SmallWeights) -> None:
        self.experts = experts
        self.table = table

    def feed_from(self, norm: Norm) -> None:
        """As `Experts.feed_from`."""
        self.experts.feed_from(norm)

    def __call__(self, act: Act, ids: Tensor) -> Tensor:
        """([tokens, hidden], [tokens] int64) -> [tokens, hidden], partial"""
        return self.experts.run(act.data, act.data, chosen=self.table["experts"][ids])


def hashed_experts(factory: LayerFactory, name: str, experts: Experts, *, vocab_size: int) -> HashedExperts:
    """Parameter `{name}.table.experts`, int64 [vocab, experts a token]."""
    shape = (vocab_size, experts.routing.top_k)
    table = SmallWeights(
        f"{name}.table",
        {"experts": [Slot("", shape)]},
        dtypes={"experts": torch.int64},
        device=factory.device,
        init="zero",
    )
    factory.modules.append(table)
    return HashedExperts(experts, table)
