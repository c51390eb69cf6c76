"""Logits processors, sampling, log-probabilities, draft verification, vectorised over slots."""

from __future__ import annotations
