"""What an instance is: a configuration, the facts that an engine would have found, and the time of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.llm_args import LlmArgs
from headrace.hub.read_shape import read_shape
from headrace.runtime.forecast import Spread, forecast
from headrace.seam import EngineFacts
from headrace.simulate.cost import Calibration, Cost, cost_of
from headrace.simulate.devices import peak_of


@dataclass(frozen=True, slots=True)
class Model:
    """Of every instance of a fleet."""

    args: LlmArgs
    facts: EngineFacts
    cost: Cost
    dtype: str
    """Of what is not quantised."""
    num_gpus: int
    """Of one instance."""


def model_of(args: LlmArgs, config: Mapping[str, Any], spread: Spread, calibration: Calibration) -> Model:
    """From a config (as `read_config` gives it), without weights or a device.

    Raises:
        ValueError: a setting that is not modelled, or that contradicts the model; or nothing fits.
    """
    if spread.ranks.pipeline > 1:
        raise ValueError("pipeline_parallel_size: pipelines are not simulated: use --tp_size")
    if spread.ranks.attention_data:
        raise ValueError("enable_attention_dp: it is not simulated: leave it out")
    if args.speculative_config is not None:
        raise ValueError("speculative_config: speculation is not simulated: leave it out")
    peak = peak_of(spread.device.name)
    planned = forecast(args, read_shape(config), spread)
    if planned.problem:
        raise MemoryError(planned.problem)
    facts = planned.stages[0].facts
    cost = cost_of(
        planned.shape,
        config,
        groups=facts.groups,
        ranks=spread.ranks,
        storage=planned.storage,
        dtype=planned.dtype,
        peak=peak,
        calibration=calibration,
    )
    return Model(args, facts, cost, planned.dtype, spread.ranks.count)
