"""Experts on a latent: routed experts see a projection of a token, and their sum is projected back (Nemotron 3 Nano,
NVIDIA 2025; with a norm between, Kimi-K3, Moonshot AI 2026). Router and shared expert see the whole of it."""

from __future__ import annotations

from torch import Tensor

from headrace.layers.factory import LayerFactory
from headrace.layers.linear import Linear
from headrace.layers.norm import Norm
from headrace.layers.port import Act


class PlainLatent:
    """Both ways are linear, so the sum over ranks may come behind them."""

    def __init__(self, down: Linear, up: Linear, *, size: int) -> None:
        self.down = down
        self.up = up
        self.size = size

    def into(self, act: Act) -> Tensor:
        """[tokens, hidden] -> [tokens, size]"""
        return self.down(act)

    def back(self, summed: Tensor) -> Tensor:
        """[tokens, size], partial -> [tokens, hidden], partial"""
        return self.up(Act(summed))


class NormedLatent(PlainLatent):
    """The sum over experts and ranks is normed; then each rank multiplies its share of the features."""

    def __init__(self, down: Linear, up: Linear, *, size: int, norm: Norm, share: tuple[int, int]) -> None:
        super().__init__(down, up, size=size)
        self.norm = norm
        self.share = share

    def back(self, summed: Tensor) -> Tensor:
        """[tokens, size], partial -> [tokens, hidden], partial"""
        start, stop = self.share
        return self.up(Act(self.norm.reduced(summed)[:, start:stop].contiguous()))


def experts_latent(
    factory: LayerFactory, name: str, *, hidden_size: int, size: int | None, norm_eps: float | None = None
) -> PlainLatent | None:
    """Modules `{name}.into_latent`, `{name}.from_latent` and, with a `norm_eps`, `{name}.latent_norm`; without a size
    none: experts see the whole of a token."""
    if size is None:
        return None
    down = factory.linear(f"{name}.into_latent", hidden_size, size)
    if norm_eps is None:
        return PlainLatent(down, factory.linear(f"{name}.from_latent", size, hidden_size), size=size)
    share = factory.parallel.share(size)
    return NormedLatent(
        down,
        factory.row(f"{name}.from_latent", size, hidden_size, share=share, bias=False),
        size=size,
        norm=factory.norm(f"{name}.latent_norm", size, eps=norm_eps),
        share=share,
    )
