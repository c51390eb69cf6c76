"""Tiny random checkpoints, and the real runtime over them, driven step by step in one thread."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headrace.config.llm_args import LlmArgs
from headrace.hub.source import resolve_model
from headrace.runtime.core import Core, open_core
from headrace.runtime.engines import make_engine
from headrace.types import Delta, Request, Sampling

VOCAB = 96
BLOCK = 4


def tiny_llama(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_gemma3(folder: Path) -> Path:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def open_runtime(model: Path | str, **changes: Any) -> Core:
    """A core over the model, float32, blocks of 4 tokens; `changes` are nested keys of LlmArgs."""
    fields: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_batch_size": 16,
        "max_num_tokens": 512,
        "engine_threads": 1,
        "kv_cache_config": {"tokens_per_block": BLOCK, "max_tokens": 4096, **changes.pop("kv_cache_config", {})},
        **changes,
    }
    args = LlmArgs.model_validate(fields)
    return open_core(args, make_engine(args, resolve_model(str(model))))


def run(core: Core, requests: Sequence[Request], *, stagger: int = 0) -> dict[int, list[Delta]]:
    """All deltas by request; `stagger` steps between arrivals. Checks integrity after every step."""
    scheduler, engine = core.scheduler, core.engine
    deltas: dict[int, list[Delta]] = {request.id: [] for request in requests}
    waiting = list(requests)
    step = 0
    while waiting or scheduler.has_work:
        if waiting and (not stagger or step % stagger == 0):
            batch = [waiting.pop(0)] if stagger else [waiting.pop(0) for _ in range(len(waiting))]
            for request in batch:
                scheduler.add(request)
        step += 1
        plan = scheduler.plan(time.monotonic())
        _keep(deltas, scheduler.take_deltas())
        if plan is not None:
            engine.submit(plan)
        if scheduler.num_in_flight > (scheduler.settings.depth if plan is not None else 0):
            out = scheduler.commit(engine.collect())
            for request_id, token in zip(out.ids.tolist(), out.tokens.tolist(), strict=True):
                deltas[request_id].append(Delta(id=request_id, tokens=[token]))
            _keep(deltas, out.deltas)
            scheduler.check()
        assert step < 20_000, "stuck"
    return deltas


def _keep(deltas: dict[int, list[Delta]], new: Sequence[Delta]) -> None:
    for delta in new:
        deltas[delta.id].append(delta)


def tokens_of(deltas: Sequence[Delta]) -> list[int]:
    assert deltas[-1].finish is not None and not deltas[-1].error, deltas[-1]
    return [token for delta in deltas for token in delta.tokens]


def request(request_id: int, prompt: Sequence[int], **changes: Any) -> Request:
    fields: dict[str, Any] = {"id": request_id, "prompt": list(prompt), "sampling": Sampling(), "max_tokens": 12}
    fields.update(changes)
    return Request(arrival_s=time.monotonic(), **fields)


def drawn(seed: object, length: int, *, vocab_size: int) -> list[int]:
    """Ids that depend on the seed alone: shorter ones are prefixes of longer ones."""
    return [random.Random(f"{seed}:{at}").randrange(vocab_size) for at in range(length)]


def ask(
    core: Core, prompts: Sequence[Sequence[int]], *, max_tokens: int, turn: int = 0, stagger: int = 0
) -> tuple[list[list[int]], list[int]]:
    """turn: of those of one core, since ids are not used twice. -> (answers, cached tokens)"""
    some = [request(100 * turn + at, ids, max_tokens=max_tokens) for at, ids in enumerate(prompts)]
    deltas = run(core, some, stagger=stagger)
    return [tokens_of(deltas[each.id]) for each in some], [deltas[each.id][-1].cached_tokens for each in some]


def greedy(oracle: Any, prompt: Sequence[int], count: int) -> list[int]:
    """A model of transformers, computed anew for each token: its own caches are not asked."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(oracle(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def transformers_greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    return greedy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), prompt, count)
