"""What a beam search is asked to do, of a caller's parameters."""

from __future__ import annotations

from typing import Any, cast

from headrace.front.errors import RequestError
from headrace.params import SamplingParams
from headrace.types import BeamSearch

__all__ = ["beam_of"]

EARLY_STOPPING: dict[Any, int] = {None: 1, "never": 2}

_NEUTRAL_IN_BEAM: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0, 1),
    "top_p": (None, 0, 1),
    "top_k": (None, 0, -1, 1),
    "min_p": (None, 0),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "bad": (None, []),
    "bad_token_ids": (None, []),
    "logprobs": (None, 0),
    "prompt_logprobs": (None,),
    "logits_processor": (None, []),
    "return_generation_logits": (False,),
}


def beam_of(params: SamplingParams, *, max_width: int) -> BeamSearch | None:
    """None: no beam search. Raises RequestError: too wide, or a parameter that has no meaning there."""
    if not params.use_beam_search:
        return None
    width = params.num_sequences
    if width > max_width:
        raise RequestError(
            f"the beam width is {width} and max_beam_width is {max_width}: start with --max_beam_width {width} or more",
            param="best_of" if params.best_of else "n",
        )
    for name, neutral in _NEUTRAL_IN_BEAM.items():
        if getattr(params, name) not in neutral:
            raise RequestError(f"{name} has no meaning in beam search: leave it unset", param=name)
    return BeamSearch(
        width=width,
        num_return=params.n,
        length_penalty=params.length_penalty or 0.0,
        early_stopping=int(EARLY_STOPPING.get(params.early_stopping, cast("int", params.early_stopping))),
        diversity_rate=params.beam_search_diversity_rate or 0.0,
    )
