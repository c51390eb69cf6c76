"""What requests may ask of this server, and what they get unasked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["RequestRules"]


@dataclass(frozen=True, kw_only=True)
class RequestRules:
    """As the configuration has them."""

    thinking_budgets: Mapping[str, int] = field(default_factory=dict[str, int])
    """Most tokens of reasoning by effort, where a request gives none; `default` is for no effort."""
    clamps_max_tokens: bool = False
    """More new tokens than the context has room for are as many as it has room for, instead of an error."""
    takes_templates: bool = False
    """A request may bring its own chat template."""
