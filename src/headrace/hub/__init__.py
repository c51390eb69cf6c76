"""Models on disk: names to files, files to configs, tokenizers' raw material and tensors. No torch."""

from __future__ import annotations
