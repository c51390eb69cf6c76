"""The device side of one rank: weights, KV pools, slot state, sampler; runs one section of each plan."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace import plugins
from headrace.config.llm_args import LlmArgs
from headrace.engine.batch import Batch, build_batch
from headrace.engine.build import build_model, known_model_types
from headrace.engine.device import compute_dtype, pick_device
from headrace.engine.groups import dtype_named, group_layers
from headrace.engine.memory import check_room, free_bytes
from headrace.engine.pools import KvPools
from headrace.engine.runner import Runner
from headrace.engine.slots import SlotState
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config, text_config
from headrace.hub.source import ModelSource
from headrace.kernels import _native
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Model
from headrace.log import phase
from headrace.quant.none import Dense
from headrace.sampling.logprobs import prompt_logprobs
from headrace.sampling.sampler import Sampled, Sampler
from headrace.seam import EngineFacts, RowLogprobs, Section, SectionResult, SlotInit, StepPlan, StepResult, ints

log = logging.getLogger("headrace.engine")

NO_NUMBERS = "the model computed no numbers (NaN): its weights are damaged, or float16 is too small; try dtype bfloat16"


class Rank:
    """The device side of one rank; only the worker thread touches it."""

    def __init__(
        self, args: LlmArgs, source: ModelSource, parallel: ParallelContext, *, num_valid_ids: int | None
    ) -> None:
        self.args = args
        self.parallel = parallel
        self.device = pick_device(parallel.rank)
        config = read_config(source, model_kwargs=args.model_kwargs, known_model_types=known_model_types())
        dtype = compute_dtype(args.dtype, config, self.device)
        recipe = Dense()
        max_len = args.max_seq_len if isinstance(args.max_seq_len, int) else None
        factory = LayerFactory(
            dtype=dtype, recipe=lambda _: recipe, device=self.device, parallel=parallel, max_len=max_len
        )
        self.model: Model = build_model(config, factory)
        check_room(self.model.weight_map().weight_bytes, self.device)
        with phase("loading weights"):
            report = load_weights(self.model, source, load_format=args.load_format.value, progress=parallel.rank == 0)
        kv_dtype = dtype if args.kv_cache_config.dtype == "auto" else dtype_named(args.kv_cache_config.dtype)
        self.groups = group_layers(self.model.layers, kv_dtype)
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
        )
        self.block_size = args.kv_cache_config.tokens_per_block

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu, {_native.num_threads()} threads"

    @staticmethod
    def _activation_bytes(max_num_tokens: int, config: dict[str, Any], dtype: torch.dtype) -> int:
        """An upper bound of what one full step holds: the widest MLP's input and output, and the residual."""
        text = text_config(config)
        width = 2 * int(text.get("intermediate_size", 0)) + 6 * int(text.get("hidden_size", 0))
        return max_num_tokens * width * dtype.itemsize

    def allocate(self, num_blocks: tuple[int, ...], num_slots: int) -> None:
        pools = KvPools(self.groups, num_blocks, block_size=self.block_size, backend=self.backend, device=self.device)
        self.pools = pools
        self.runner = Runner(self.model, self.backend, pools)
        # One block more than the longest sequence has: a row in flight may be past its end.
        max_blocks = min(max(num_blocks), -(-self.model.max_position // self.block_size) + 1)
        self.state = SlotState(num_slots, num_groups=len(self.groups), max_blocks=max_blocks, device=self.device)
        self.inits: dict[int, SlotInit] = {}
        self.sampler = Sampler(
            num_slots, self.model.vocab_size, num_valid_ids=self.facts.num_valid_ids, device=self.device
        )

    # ---- a step ------------------------------------------------------------------------------

    def run(self, plan: StepPlan) -> StepResult:
        begin_s = time.perf_counter()
        section = plan.sections[0]
        self._apply(section)
        if not section.num_rows:
            return StepResult(plan.step, (SectionResult(ints(), ints()),), finished_copies=section.copies[:, 0])
        try:
            with torch.inference_mode():
                batch = build_batch(section, self.state, block_size=self.block_size)
                hidden, at = self._forward(batch)
                forward_s = time.perf_counter() - begin_s
                result = self._finish(section, batch, hidden, at)
        except Exception as error:  # the step's rows fail, the engine goes on
            if self.parallel.size > 1:
                raise  # the ranks are no longer at the same collective: the group has to end
            log.exception("step %d failed", plan.step)
            self.state.fail(section.slot.tolist())
            message = f"{type(error).__name__}: {error}"
            rows = section.num_rows
            failed = SectionResult(ints(np.zeros(rows)), ints(), errors=dict.fromkeys(range(rows), message))
            return StepResult(plan.step, (failed,), finished_copies=section.copies[:, 0])
        return StepResult(
            plan.step,
            (result,),
            finished_copies=section.copies[:, 0],
            forward_s=forward_s,
            sample_s=time.perf_counter() - begin_s - forward_s,
        )

    def _apply(self, section: Section) -> None:
        """Freed slots, new slots, new blocks, copies: in this order, before any row."""
        for slot in section.freed_slots.tolist():
            self.sampler.free(slot)
            self.inits.pop(slot, None)
        for init in section.inits:
            self.sampler.begin(init)
            self.inits[init.slot] = init
        self.state.apply(section)
        for _, group, _, source, _, destination in section.copies.tolist():
            self.pools.copy(group, torch.tensor([source]), torch.tensor([destination]))

    def _forward(self, batch: Batch) -> tuple[Tensor, np.ndarray]:
        """Hidden states of the last token of every row, and of all tokens where the prompt's are wanted.

        -> ([wanted, hidden], index in it of each row's last token [rows])
        """
        last = batch.query_starts[1:] - 1
        if not len(batch.prompt_rows):
            wanted = last
            at = np.arange(len(last))
        else:
            chosen = np.zeros(int(batch.query_starts[-1]), np.bool_)
            chosen[last] = True
            for row in batch.prompt_rows.tolist():
                chosen[batch.query_starts[row] : batch.query_starts[row + 1]] = True
            wanted = np.flatnonzero(chosen)
            at = np.searchsorted(wanted, last)
        rows = torch.from_numpy(wanted).to(self.device)
        return self.runner.forward(batch.ids, batch.groups, rows=rows), at

    def _finish(self, section: Section, batch: Batch, hidden: Tensor, at: np.ndarray) -> SectionResult:
        """Sampling, slot state, and the host's view of both."""
        self.state.num_tokens[batch.slots] = batch.kv_lens
        prompt = {int(row): self._prompt_logprobs(section, batch, hidden, at, int(row)) for row in batch.prompt_rows}
        accepted = np.zeros(section.num_rows, np.int32)
        rows = batch.sample_rows
        if not len(rows):
            return SectionResult(accepted, ints(), prompt_logprobs=prompt)
        index = torch.from_numpy(rows).to(self.device)
        slots = batch.slots[index]
        logits = self.runner.logits(hidden[torch.from_numpy(at[rows]).to(self.device)])
        kept = self._kept_logits(section, rows, logits)
        host_slots = section.slot[rows]
        sampled = self.sampler.sample(
            logits.contiguous(), slots, batch.kv_lens[index], section.flags[rows], host_slots=host_slots
        )
        was_done = batch.was_done[index]
        self.state.accept(slots, sampled.tokens, sampled.done | was_done)
        self.state.fail([int(host_slots[row]) for row in sampled.errors])
        live = self._live(logits, sampled, was_done, host_slots)
        accepted[rows[live]] = 1
        return SectionResult(
            accepted,
            sampled.tokens.cpu().numpy()[live].astype(np.int32),
            {int(rows[row]): values for row, values in sampled.logprobs.items() if live[row]},
            prompt,
            kept,
            {int(rows[row]): message for row, message in sampled.errors.items()},
        )

    def _live(self, logits: Tensor, sampled: Sampled, was_done: Tensor, host_slots: np.ndarray) -> np.ndarray:
        """The rows whose token counts [rows]: the one wait for the device. Rows without numbers fail here.

        Logits with a NaN have it as their maximum, so it is seen in the chosen one.
        """
        chosen = logits.gather(1, sampled.tokens[:, None]).squeeze(1)
        done, bad = torch.stack((was_done, chosen.isnan())).cpu().numpy()
        failed = np.flatnonzero(bad & ~done).tolist()
        sampled.errors.update(dict.fromkeys(failed, NO_NUMBERS))
        self.state.fail([int(host_slots[row]) for row in failed])
        live = ~done
        live[list(sampled.errors)] = False
        return live

    def _kept_logits(self, section: Section, rows: np.ndarray, logits: Tensor) -> dict[int, Tensor]:
        """The raw logits that offline callers asked for; sampling overwrites them."""
        if not any(init.sampling.return_logits for init in self.inits.values()):
            return {}
        slots = section.slot[rows].tolist()
        return {
            int(row): logits[at : at + 1].clone()
            for at, row in enumerate(rows)
            if self.inits[slots[at]].sampling.return_logits
        }

    def _prompt_logprobs(self, section: Section, batch: Batch, hidden: Tensor, at: np.ndarray, row: int) -> RowLogprobs:
        """Of the prompt tokens that follow this chunk's positions."""
        first, end = batch.query_starts[row], batch.query_starts[row + 1]
        ids = section.ids[first:end]
        targets = np.append(ids[1:], section.next_ids[row])
        count = len(targets) if targets[-1] >= 0 else len(targets) - 1
        base = int(at[row]) - (len(ids) - 1)
        k = self.inits[int(section.slot[row])].sampling.prompt_logprobs
        return prompt_logprobs(
            lambda part: self.runner.logits(hidden[base + part.start : base + part.stop]),
            torch.from_numpy(targets[:count].astype(np.int64)).to(self.device),
            k,
            vocab_size=self.model.vocab_size,
            num_valid_ids=self.facts.num_valid_ids,
        )


def _backend_name(wanted: str, device: torch.device) -> str:
    """The attention backend for a configured name: TensorRT-LLM's names mean the fastest one here, VANILLA the twin."""
    if wanted == "VANILLA":
        return "torch"
    return "cpu" if device.type == "cpu" else "torch"
