"""Hidden states as embeddings: cut to the wanted length and scaled to length one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headrace.front.builder import RequestOptions
from headrace.front.desk import Asked, Desk
from headrace.front.errors import RequestError, RequestFailed
from headrace.front.progress import wait_all
from headrace.front.prompts import is_one_prompt
from headrace.params import SamplingParams

__all__ = ["Pooling", "check_dimensions", "embed", "pooling_of", "to_embedding"]

Pooling = Literal["last", "mean"]


def pooling_of(given: str) -> Pooling:
    """Raises RequestError: there is no such kind."""
    if given not in get_args(Pooling):
        raise RequestError(f"pooling must be 'last' or 'mean', got {given[:40]!r}", param="pooling")
    return "last" if given == "last" else "mean"


def check_dimensions(dimensions: int | None, hidden_size: int) -> None:
    """Raises RequestError: the engine gives no embeddings, or none of so many numbers."""
    if not hidden_size:
        raise RequestError("this model gives no embeddings: serve a decoder model", code="unsupported_model")
    if dimensions is not None and not 1 <= dimensions <= hidden_size:
        raise RequestError(
            f"dimensions must be from 1 to {hidden_size}, the model's hidden size, got {dimensions}", param="dimensions"
        )


def to_embedding(data: bytes, *, dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """float32 [dimensions] of a `Delta.embedding`; its first numbers, which models are trained to put the most into."""
    values = np.frombuffer(data, "<f4")[:dimensions].astype(np.float32)
    if not normalize:
        return values
    length = float(np.linalg.norm(values))
    return (values / length).astype(np.float32) if length > 0 else values


def embed(desk: Desk, inputs: Any, *, pooling: str, dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """[dimensions] of one prompt, or [prompts, dimensions] of a list.

    Raises:
        RequestError: bad input in any prompt.
        RequestFailed: the engine could not finish some.
    """
    check_dimensions(dimensions, desk.hidden_size)
    single = is_one_prompt(inputs)
    prompts: Sequence[Any] = [inputs] if single else list(inputs)
    params = SamplingParams(max_tokens=1, detokenize=False)
    options = RequestOptions(pooling=pooling_of(pooling))
    outputs = desk.submit(Asked(prompt, params, options) for prompt in prompts)
    wait_all(outputs, show_progress=not single)
    failed = [output for output in outputs if output.error is not None]
    if failed:
        raise RequestFailed(f"{len(failed)} of {len(prompts)} embeddings failed: {failed[0].error}", outputs=outputs)
    rows = [to_embedding(output.embedding, dimensions=dimensions, normalize=normalize) for output in outputs]
    return rows[0] if single else np.stack(rows) if rows else np.zeros((0, dimensions or desk.hidden_size), np.float32)
