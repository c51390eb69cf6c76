"""Text to tokens and back: tokenizers, chat templates, incremental detokenising, stop strings. No torch."""

from __future__ import annotations
