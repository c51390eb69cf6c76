"""`max_attention_window`, `sink_token_length` and the cache's dtype through the whole runtime, against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.twin.harness import BLOCK, VOCAB, open_runtime, request, run, tiny_gemma3, tiny_llama, tokens_of

NEW = 20


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    shared = [draw.randrange(VOCAB) for _ in range(30)]
    return [shared, [*shared[:21], 3, 1, 4], [draw.randrange(VOCAB) for _ in range(5)], shared]


def oracle(folder: Path, ids: list[int], windows: list[int | None], sinks: int) -> list[int]:
    """Greedy tokens of transformers' model, every layer with a mask of its own, nothing cached."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
    masks: list[torch.Tensor] = []

    def masked(layer: int) -> Any:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, "attention_mask": masks[layer]}

        return hook

    for index, each in enumerate(model.model.layers):
        each.self_attn.register_forward_pre_hook(masked(index), with_kwargs=True)
    known = list(ids)
    for _ in range(NEW):
        at = torch.arange(len(known))
        distance = at[:, None] - at[None, :]
        masks[:] = []
        for window in windows:
            seen = (distance >= 0) & ((distance < (window or len(known))) | (at[None, :] < sinks))
            masks.append(torch.zeros(1, 1, len(known), len(known)).masked_fill(~seen, float("-inf")))
        with torch.inference_mode():
            known.append(int(model(torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
    return known[len(ids) :]


def answers(folder: Path, *, repeat: int = 2, **cache: Any) -> list[list[list[int]]]:
    """Of all prompts, first cold and together, then again."""
    core = open_runtime(folder, max_num_tokens=16, kv_cache_config=cache)
    try:
        rounds: list[list[list[int]]] = []
        for turn in range(repeat):
            some = [request(10 * turn + i, ids, max_tokens=NEW) for i, ids in enumerate(prompts())]
            deltas = run(core, some, stagger=1)
            rounds.append([tokens_of(deltas[each.id]) for each in some])
        return rounds
    finally:
        core.close()


@pytest.mark.parametrize(
    ("windows", "sinks"), [([6, 1000], 0), ([9], 0), ([1], 0), ([6], 3), ([7, 1000], BLOCK + 1), ([5], 100)]
)
def test_windows_of_the_configuration(llama: Path, windows: list[int], sinks: int) -> None:
    by_layer = [None if window >= 256 else window for window in (windows * 2)[:2]]
    wanted = [oracle(llama, ids, by_layer, sinks) for ids in prompts()]
    got = answers(llama, max_attention_window=windows, sink_token_length=sinks)
    assert got == [wanted, wanted]


def test_windows_show(llama: Path) -> None:
    """The other test would hold if windows and sinks did nothing to these prompts."""
    full, short, sunk = (
        oracle(llama, prompts()[0], [window, window], sinks) for window, sinks in ((None, 0), (6, 0), (6, 3))
    )
    assert full != short != sunk != full


def test_sinks_of_a_model_with_windows(tmp_path: Path) -> None:
    folder = tiny_gemma3(tmp_path)
    wanted = [oracle(folder, ids, [6, None, 6], 3) for ids in prompts()]
    assert answers(folder, sink_token_length=3) == [wanted, wanted]
    shorter = [oracle(folder, ids, [4, 8, 4], 0) for ids in prompts()]
    assert answers(folder, max_attention_window=[4, 8]) == [shorter, shorter]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cache_of_another_type(llama: Path, dtype: str) -> None:
    core = open_runtime(llama, kv_cache_config={"dtype": dtype})
    whole = open_runtime(llama)
    try:
        (group,), (plain,) = core.facts.groups, whole.facts.groups
        assert group.dtype == dtype and 2 * group.bytes_per_token == plain.bytes_per_token
    finally:
        core.close()
        whole.close()
    fast, slow = (
        answers(llama, dtype=dtype, repeat=2),
        answers_of_backend(llama, "VANILLA", dtype=dtype),
    )
    assert fast[0] == fast[1] == slow


def answers_of_backend(folder: Path, backend: str, **cache: Any) -> list[list[int]]:
    core = open_runtime(folder, attn_backend=backend, kv_cache_config=cache)
    try:
        some = [request(i, ids, max_tokens=NEW) for i, ids in enumerate(prompts())]
        deltas = run(core, some)
        return [tokens_of(deltas[each.id]) for each in some]
    finally:
        core.close()
