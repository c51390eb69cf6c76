"""The device side of one rank: weights, KV pools, slot state, sampler; runs one section of each plan."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headrace.config.kernels import DecodeCudaGraphConfig, MoeBackend
from headrace.config.llm_args import LlmArgs
from headrace.engine.backends import check_fixed, open_backends
from headrace.engine.batch import leave_out, put_back
from headrace.engine.build import Servable, build_model
from headrace.engine.clock import StepClock
from headrace.engine.compiling import Compiling, OpenCompiler
from headrace.engine.constraints import Constraints
from headrace.engine.copies import copy_bytes_per_s
from headrace.engine.device import compute_dtype, kv_cache_dtype, pick_device, state_dtype
from headrace.engine.fingerprint import fingerprint
from headrace.engine.forward_graphs import TOKEN_SIZES
from headrace.engine.groups import configured_reach, group_layers
from headrace.engine.kept import keep_or_leave
from headrace.engine.kv_scales import kv_scales_of
from headrace.engine.memory import check_room, free_bytes
from headrace.engine.profiling import COMMANDS, Profiling
from headrace.engine.rescue import queue_within_memory
from headrace.engine.runner import Runner
from headrace.engine.slots import SlotState
from headrace.engine.states import state_specs
from headrace.engine.step import Outcome, Stepper
from headrace.engine.tiers import Memory
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config, read_quant_config, stated_quantisation, text_config
from headrace.hub.read_shape import mlp_width, num_layers
from headrace.hub.shape import activation_bytes, graph_bytes, logits_bytes
from headrace.hub.source import ModelSource
from headrace.kernels import _native
from headrace.layers.experts import ExpertsSetup
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Model
from headrace.layers.recipes import Recipes, read_recipes
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
        self,
        args: LlmArgs,
        source: ModelSource,
        parallel: ParallelContext,
        *,
        num_valid_ids: int | None,
        open_compiler: OpenCompiler | None = None,
    ) -> None:
        self.args = args
        self.parallel = parallel
        self._closing = contextlib.ExitStack()
        self._closing.callback(parallel.collectives.close)
        self.device = pick_device(parallel.rank)
        config = read_config(source, model_kwargs=args.model_kwargs, known_model_types=Servable(args.model_impl))
        dtype = compute_dtype(args.dtype, config, self.device)
        recipes = read_recipes(
            {"quantization_config": stated_quantisation(config)},
            hf_quant_config=read_quant_config(source.path),
            force_dynamic=args.force_dynamic_quantization,
            num_layers=num_layers(config) if args.force_dynamic_quantization else 0,
        )
        recipes = recipes.fixed() if args.deterministic else recipes
        max_len = args.max_seq_len if isinstance(args.max_seq_len, int) else None
        factory = self._factory(dtype, recipes, max_len=max_len)
        self.model: Model = build_model(config, factory, impl=args.model_impl)
        if args.deterministic:
            check_fixed(self.model.layers, self.model.weight_map().modules, self.device)
        kv = args.kv_cache_config
        kv_dtype = kv_cache_dtype(kv.dtype, dtype, self.device, is_kv_fp8=recipes.is_kv_fp8)
        self.reach = configured_reach(kv, longest=max_len or self.model.max_position)
        self.groups = group_layers(self.model.layers, kv_dtype, reach=self.reach)
        kv.check_groups(len(self.groups))
        check_room(self.model.weight_map().held_bytes, self.device)
        self.backends = open_backends(
            args.attn_backend,
            self.model.layers,
            reach=self.reach,
            device=self.device,
            block_size=kv.tokens_per_block,
            dtype=dtype,
            kv_dtype=kv_dtype,
            is_fixed=args.deterministic,
        )
        load_format = args.load_format.value
        with phase("loading weights"):
            report = load_weights(self.model, source, load_format=load_format, progress=parallel.rank == 0)
        is_drafting = args.speculative_config is not None and parallel.rank == 0
        self.kept = keep_or_leave(source, self.model.weight_map(), load_format=load_format, is_wanted=is_drafting)
        facts = self._facts(source, config, dtype, num_valid_ids=num_valid_ids, weight_bytes=report.weight_bytes)
        self.facts = replace(facts, kv_scales=kv_scales_of(self.model.layers, kv_dtype))
        self.block_size = args.kv_cache_config.tokens_per_block
        self._clock: StepClock | None = None
        """Of the last step with rows."""
        self.profiling = Profiling(args.profile_dir, rank=parallel.rank, device=self.device)
        self.compiling = Compiling(open_compiler, num_ids=self.facts.num_valid_ids)

    def _facts(
        self,
        source: ModelSource,
        config: dict[str, Any],
        dtype: torch.dtype,
        *,
        num_valid_ids: int | None,
        weight_bytes: int,
    ) -> EngineFacts:
        args = self.args
        return EngineFacts(
            model_type=str(config["model_type"]),
            vocab_size=self.model.vocab_size,
            num_valid_ids=min(num_valid_ids or self.model.vocab_size, self.model.vocab_size),
            max_position=self.model.max_position,
            groups=self.groups,
            weight_bytes=weight_bytes,
            activation_bytes=self._activation_bytes(args.max_num_tokens, config, dtype) + self._logits_bytes(dtype),
            graph_bytes=graph_bytes(
                sizes := self._capture_sizes(),
                vocab_size=self.model.vocab_size,
                step_bytes=self._activation_bytes(max(sizes, default=0), config, dtype),
                item_bytes=dtype.itemsize,
            ),
            free_bytes=free_bytes(self.device),
            device=self._device_name(),
            hidden_size=int(text_config(config).get("hidden_size", 0)),
            fingerprint=fingerprint(
                config,
                source,
                self.groups,
                load_format=args.load_format.value,
                dtype=str(dtype),
                tokens_per_block=args.kv_cache_config.tokens_per_block,
                num_ranks=self.parallel.size,
                device=self.device.type,
                backend=self.backends.names([group.attention for group in self.groups]),
            ),
            copy_bytes_per_s=copy_bytes_per_s(self.device),
            kept_bytes=self.kept.size_bytes,
        )

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu, {_native.num_threads()} threads"

    def _factory(self, dtype: torch.dtype, recipes: Recipes, *, max_len: int | None) -> LayerFactory:
        moe = self.args.moe_config
        moe_backend = "FIXED" if self.args.deterministic else moe.backend.value
        return LayerFactory(
            dtype=dtype,
            recipe=recipes,
            device=self.device,
            parallel=self.parallel,
            max_len=max_len,
            state_dtype=state_dtype(self.args.kv_cache_config.mamba_ssm_cache_dtype),
            experts=ExpertsSetup(recipes.of_experts, moe_backend, moe.max_num_tokens),
            plain=recipes.plain,
        )

    def _logits_bytes(self, dtype: torch.dtype) -> int:
        """Of a full batch, on a GPU; a CPU's sampler works in pieces."""
        if self.device.type != "cuda":
            return 0
        return logits_bytes(self.model.vocab_size, num_rows=self.args.max_batch_size, item_bytes=dtype.itemsize)

    @staticmethod
    def _activation_bytes(max_num_tokens: int, config: dict[str, Any], dtype: torch.dtype) -> int:
        text = text_config(config)
        return activation_bytes(
            int(text.get("hidden_size", 0)),
            mlp_width(config),
            max_num_tokens=max_num_tokens,
            item_bytes=dtype.itemsize,
        )

    def allocate(self, sizes: PoolSizes) -> None:
        num_slots = sizes.num_slots
        self.memory = Memory(
            self.groups,
            sizes,
            block_size=self.block_size,
            backends=self.backends,
            states=state_specs(self.model.layers),
            device=self.device,
            fingerprint=self.facts.fingerprint,
            rank=self.parallel.rank,
            connector=self._connector(),
        )
        self._closing.callback(self.memory.close)
        self.runner = Runner(
            self.model, self.backends, self.memory.pools, states=self.memory.states.layers, reach=self.reach
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
            constraints=Constraints(
                num_slots + 1, num_ids=self.facts.num_valid_ids, device=self.device, compiling=self.compiling
            ),
            groups=self.groups,
            block_size=self.block_size,
            max_len=max_blocks * self.block_size,
            capture_sizes=self._capture_sizes(),
            token_sizes=self._token_sizes(),
        )
        if not self.args.fast_start and self.stepper.graphs is not None:
            with phase("capturing CUDA graphs"):
                self.stepper.capture_all()

    def _connector(self) -> WorkerConnector | None:
        config = self.args.kv_connector_config
        if config is None:
            return None
        return load_worker(ConnectorSetup(config, self.groups, self.block_size, self.parallel.rank))

    def _capture_sizes(self) -> list[int]:
        graphs = self.args.cuda_graph_config
        if self.device.type != "cuda" or not isinstance(graphs, DecodeCudaGraphConfig) or self.parallel.size > 1:
            return []
        if not self.model.is_capturable or self.args.attn_backend == "VANILLA":
            return []  # plain torch reads lengths on the host
        if self.model.has_experts and self.args.moe_config.backend is MoeBackend.VANILLA:
            return []  # it asks the device which experts are used
        return [size for size in graphs.capture_sizes() if size <= self.args.max_batch_size]

    def _token_sizes(self) -> Sequence[int]:
        """Of prompts in captured steps. A recurrent layer's chunks are cut on the host."""
        if any(group.is_recurrent for group in self.groups):
            return ()
        wanted = self.args.prefill_capture_num_tokens
        return TOKEN_SIZES if wanted is None else wanted

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
        clock = StepClock(self.device, before=self._clock)
        section = plan.sections[0]
        if plan.num_rows:
            self.profiling.step()
        done = {command.id: self.profiling.run(command) for command in plan.commands if command.name in COMMANDS}
        for command in plan.commands:
            if command.id not in done:
                self.compiling.begin(command)
        self._apply(plan.step, section)
        unready = np.flatnonzero(np.isin(section.slot, list(self.unready))).tolist()
        errors = {row: self.unready[int(section.slot[row])] for row in unready}
        rows = leave_out(section, errors)
        outcome = self._queue_rows(plan.step, rows) if rows.num_rows else _nothing
        clock.stop()
        if rows.num_rows:
            self._clock = clock
        self.memory.end_step(section)
        finished, failed = self.memory.reports()
        done |= self.compiling.take_done()

        def result() -> StepResult:
            found = put_back(outcome(), errors)
            return StepResult(
                plan.step,
                (found,),
                finished_copies=finished,
                failed_copies=failed,
                finished_commands=done,
                forward_s=clock.seconds(),
                idle_s=clock.idle_seconds(),
                num_eager=self.stepper.num_eager,
            )

        return result

    def _queue_rows(self, step: int, section: Section) -> Outcome:
        try:
            if self.parallel.size > 1 or self.memory.states.layers:
                return self.stepper.queue(section)  # a recurrent state that has gone on can't do so again
            return queue_within_memory(
                section,
                self.stepper.queue,
                free=self._free_unused,
                fail=lambda rows: self.state.fail(rows.slot.tolist()),
            )
        except Exception as error:  # the step's rows fail, the engine goes on
            if self.parallel.size > 1:
                raise  # the ranks are no longer at the same collective: the group has to end
            log.exception("step %d failed", step)
            self.state.fail(section.slot.tolist())
            errors = dict.fromkeys(range(section.num_rows), f"{type(error).__name__}: {error}")
            failed = SectionResult(ints(np.zeros(section.num_rows)), ints(), errors=errors)
            return lambda: failed

    def _free_unused(self) -> None:
        self.stepper.drop_graphs()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _apply(self, step: int, section: Section) -> None:
        """Freed slots, new slots, new blocks, copies: in this order, before any row.

        Raises:
            RuntimeError: what the control half and the device believe is no longer the same.
        """
        for slot in section.freed_slots.tolist():
            self.sampler.free(slot)
            self.stepper.constraints.free(slot)
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
            self.stepper.constraints.begin(init)
        except Exception as error:
            if self.parallel.size > 1:
                raise  # the other ranks may well have begun it
            log.exception("request %d could not begin", init.request_id)
            self.sampler.free(init.slot)
            self.unready[init.slot] = f"{type(error).__name__}: {error}"


def _nothing() -> SectionResult:
    return SectionResult(ints(), ints())
