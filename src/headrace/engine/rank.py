"""The device side of one rank: weights, KV pools, slot state, sampler; runs one section of each plan."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from headrace import plugins
from headrace.config.kernels import DecodeCudaGraphConfig
from headrace.config.llm_args import LlmArgs
from headrace.engine.batch import leave_out, put_back
from headrace.engine.build import build_model, known_model_types
from headrace.engine.copies import copy_bytes_per_s
from headrace.engine.device import compute_dtype, kv_cache_dtype, pick_device
from headrace.engine.fingerprint import fingerprint
from headrace.engine.groups import configured_reach, group_layers
from headrace.engine.memory import check_room, free_bytes
from headrace.engine.runner import Runner
from headrace.engine.slots import SlotState
from headrace.engine.states import state_specs
from headrace.engine.step import Outcome, Stepper
from headrace.engine.tiers import Memory
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config, read_quant_config, stated_quantisation, text_config
from headrace.hub.shape import activation_bytes
from headrace.hub.source import ModelSource
from headrace.kernels import _native
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Model
from headrace.layers.recipes import read_recipes
from headrace.log import phase
from headrace.sampling.sampler import Sampler
from headrace.seam import (
    EngineFacts,
    PoolSizes,
    Section,
    SectionResult,
    SlotInit,
    StepPlan,
    StepResult,
    ints,
)
from headrace.transfer._loading import load_worker
from headrace.transfer.port import ConnectorSetup, WorkerConnector

log = logging.getLogger("headrace.engine")


class Rank:
    """The device side of one rank; only the worker thread touches it."""

    def __init__(
        self, args: LlmArgs, source: ModelSource, parallel: ParallelContext, *, num_valid_ids: int | None
    ) -> None:
        self.args = args
        self.parallel = parallel
        self._closing = contextlib.ExitStack()
        self._closing.callback(parallel.collectives.close)
        self.device = pick_device(parallel.rank)
        config = read_config(source, model_kwargs=args.model_kwargs, known_model_types=known_model_types())
        dtype = compute_dtype(args.dtype, config, self.device)
        recipes = read_recipes(
            {"quantization_config": stated_quantisation(config)},
            hf_quant_config=read_quant_config(source.path),
            force_dynamic=args.force_dynamic_quantization,
        )
        max_len = args.max_seq_len if isinstance(args.max_seq_len, int) else None
        factory = LayerFactory(dtype=dtype, recipe=recipes, device=self.device, parallel=parallel, max_len=max_len)
        self.model: Model = build_model(config, factory)
        kv = args.kv_cache_config
        kv_dtype = kv_cache_dtype(kv.dtype, dtype, self.device, is_kv_fp8=recipes.is_kv_fp8)
        self.reach = configured_reach(kv, longest=max_len or self.model.max_position)
        self.groups = group_layers(self.model.layers, kv_dtype, reach=self.reach)
        kv.check_groups(len(self.groups))
        check_room(self.model.weight_map().weight_bytes, self.device)
        with phase("loading weights"):
            report = load_weights(self.model, source, load_format=args.load_format.value, progress=parallel.rank == 0)
        self.backend = plugins.load("attention", _backend_name(args.attn_backend, self.device))()
        self.facts = EngineFacts(
            model_type=str(config["model_type"]),
            vocab_size=self.model.vocab_size,
            num_valid_ids=min(num_valid_ids or self.model.vocab_size, self.model.vocab_size),
            max_position=self.model.max_position,
            groups=self.groups,
            weight_bytes=report.weight_bytes,
            activation_bytes=self._activation_bytes(args.max_num_tokens, config, dtype),
            free_bytes=free_bytes(self.device),
            device=self._device_name(),
            fingerprint=fingerprint(
                config,
                source,
                self.groups,
                load_format=args.load_format.value,
                dtype=str(dtype),
                tokens_per_block=args.kv_cache_config.tokens_per_block,
                num_ranks=parallel.size,
                device=self.device.type,
                backend=type(self.backend).__name__,
            ),
            copy_bytes_per_s=copy_bytes_per_s(self.device),
        )
        self.block_size = args.kv_cache_config.tokens_per_block

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu, {_native.num_threads()} threads"

    @staticmethod
    def _activation_bytes(max_num_tokens: int, config: dict[str, Any], dtype: torch.dtype) -> int:
        text = text_config(config)
        return activation_bytes(
            int(text.get("hidden_size", 0)),
            int(text.get("intermediate_size", 0)),
            max_num_tokens=max_num_tokens,
            item_bytes=dtype.itemsize,
        )

    def allocate(self, sizes: PoolSizes) -> None:
        num_slots = sizes.num_slots
        self.memory = Memory(
            self.groups,
            sizes,
            block_size=self.block_size,
            backend=self.backend,
            states=state_specs(self.model.layers),
            device=self.device,
            fingerprint=self.facts.fingerprint,
            rank=self.parallel.rank,
            connector=self._connector(),
        )
        self._closing.callback(self.memory.close)
        self.runner = Runner(
            self.model, self.backend, self.memory.pools, states=self.memory.states.layers, reach=self.reach
        )
        max_blocks = self._max_blocks(sizes)
        self.state = SlotState(num_slots, num_groups=len(self.groups), max_blocks=max_blocks, device=self.device)
        self.unready: dict[int, str] = {}
        """Slots that could not begin, with the reason, until they are given up."""
        self.sampler = Sampler(
            num_slots + 1, self.model.vocab_size, num_valid_ids=self.facts.num_valid_ids, device=self.device
        )
        self.stepper = Stepper(
            self.runner,
            self.state,
            self.sampler,
            groups=self.groups,
            block_size=self.block_size,
            max_len=max_blocks * self.block_size,
            capture_sizes=self._capture_sizes(),
        )

    def _connector(self) -> WorkerConnector | None:
        config = self.args.kv_connector_config
        if config is None:
            return None
        return load_worker(ConnectorSetup(config, self.groups, self.block_size, self.parallel.rank))

    def _capture_sizes(self) -> list[int]:
        graphs = self.args.cuda_graph_config
        if self.device.type != "cuda" or not isinstance(graphs, DecodeCudaGraphConfig) or self.parallel.size > 1:
            return []
        return [size for size in graphs.capture_sizes() if size <= self.args.max_batch_size]

    def _max_blocks(self, sizes: PoolSizes) -> int:
        """Entries of a block table. One more than the longest sequence has: a row in flight may be past its end."""
        longest = -(-self.model.max_position // self.block_size) + 1
        whole = [
            count
            for group, count in zip(self.groups, sizes.num_blocks)
            if group.window is None and not group.is_recurrent  # others hold less than a sequence has
        ]
        return min([longest, *whole])

    def close(self) -> None:
        self._closing.close()

    # ---- a step ------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        """Queue the step and wait for it."""
        return self.queue(plan)()

    def queue(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Hand the step to the device. -> what waits for its result; called in order, by any thread"""
        begin_s = time.perf_counter()
        section = plan.sections[0]
        self._apply(plan.step, section)
        unready = np.flatnonzero(np.isin(section.slot, list(self.unready))).tolist()
        errors = {row: self.unready[int(section.slot[row])] for row in unready}
        rows = leave_out(section, errors)
        outcome = self._queue_rows(plan.step, rows) if rows.num_rows else _nothing
        self.memory.end_step(section)
        finished, failed = self.memory.reports()

        def result() -> StepResult:
            found = put_back(outcome(), errors)
            wall_s = time.perf_counter() - begin_s
            return StepResult(plan.step, (found,), finished_copies=finished, failed_copies=failed, forward_s=wall_s)

        return result

    def _queue_rows(self, step: int, section: Section) -> Outcome:
        try:
            return self.stepper.queue(section)
        except Exception as error:  # the step's rows fail, the engine goes on
            if self.parallel.size > 1:
                raise  # the ranks are no longer at the same collective: the group has to end
            log.exception("step %d failed", step)
            self.state.fail(section.slot.tolist())
            errors = dict.fromkeys(range(section.num_rows), f"{type(error).__name__}: {error}")
            failed = SectionResult(ints(np.zeros(section.num_rows)), ints(), errors=errors)
            return lambda: failed

    def _apply(self, step: int, section: Section) -> None:
        """Freed slots, new slots, new blocks, copies: in this order, before any row.

        Raises:
            RuntimeError: what the control half and the device believe is no longer the same.
        """
        for slot in section.freed_slots.tolist():
            self.sampler.free(slot)
            self.stepper.inits.pop(slot, None)
            self.unready.pop(slot, None)
        for init in section.inits:
            self._begin(init)
        try:
            self.state.apply(section)
            self.memory.begin_step(section)
        except Exception as error:
            raise RuntimeError(
                f"step {step}: block tables or copies were applied in part, so nothing that follows can be trusted "
                f"({type(error).__name__}: {error})"
            ) from error
        self.state.fail(list(self.unready))

    def _begin(self, init: SlotInit) -> None:
        """A slot begins; one that can't fails its rows, not the step."""
        self.stepper.inits[init.slot] = init
        self.unready.pop(init.slot, None)
        try:
            self.sampler.begin(init)
        except Exception as error:
            if self.parallel.size > 1:
                raise  # the other ranks may well have begun it
            log.exception("request %d could not begin", init.request_id)
            self.sampler.free(init.slot)
            self.unready[init.slot] = f"{type(error).__name__}: {error}"


def _nothing() -> SectionResult:
    return SectionResult(ints(), ints())


def _backend_name(wanted: str, device: torch.device) -> str:
    """The attention backend for a configured name: TensorRT-LLM's names mean the fastest one here, VANILLA the twin."""
    if wanted == "VANILLA":
        return "torch"
    return "cpu" if device.type == "cpu" else "triton"
