"""`deterministic: true`: log-probabilities to the last bit, whatever runs beside a request and is cached."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.layers.experts import Routing, expert_act
from headrace.layers.factory import LayerFactory
from headrace.layers.recipes import read_recipes
from headrace.quant._fixed import Fixed
from headrace.types import Delta, Request, Sampling
from tests.kits.model import save_tiny
from tests.twin.harness import BLOCK, VOCAB, open_runtime, request, run, tiny_gemma3, tiny_llama

MODELS = {"llama": tiny_llama, "gemma3": tiny_gemma3}


def seen(deltas: Sequence[Delta]) -> list[tuple[list[int], list[float]]]:
    """Tokens and the log-probabilities of the likeliest."""
    assert not deltas[-1].error, deltas[-1].error
    return [(list(entry.ids), list(entry.values)) for delta in deltas for entry in delta.logprobs]


def close_look(request_id: int, prompt: list[int], *, seed: int | None = None) -> Request:
    sampling = Sampling(logprobs=3) if seed is None else Sampling(temperature=0.9, top_p=0.9, seed=seed, logprobs=3)
    return request(request_id, prompt, sampling=sampling)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_are_a_requests_own(folder: Path, dtype: str) -> None:
    check_bits(folder, dtype)


def check_bits(folder: Path, dtype: str, **changes: Any) -> None:
    """Alone with nothing cached, beside 1 to 14 others, in small chunks, and over a prefix of any length."""
    draw = random.Random(1)
    prompt = [draw.randrange(VOCAB) for _ in range(5 * BLOCK + 2)]
    options = {"dtype": dtype, "deterministic": True, **changes}

    def others(count: int) -> list[Request]:
        return [
            close_look(9 + n, [draw.randrange(VOCAB) for _ in range(draw.randint(1, 40))], seed=n) for n in range(count)
        ]

    core = open_runtime(folder, kv_cache_config={"enable_block_reuse": False}, **options)
    try:
        for seed in (None, 5):
            asked = close_look(0, prompt, seed=seed)
            alone = seen(run(core, [asked])[0])
            assert len(alone) == 12
            for count, stagger in ((1, 0), (6, 2), (14, 0), (14, 1)):
                crowd = others(count)
                crowd.insert(count // 2, asked)
                assert seen(run(core, crowd, stagger=stagger)[0]) == alone, (count, stagger)
    finally:
        core.engine.close()
    core = open_runtime(folder, max_num_tokens=16, **options)
    try:
        asked = close_look(0, prompt, seed=5)
        for length in (0, 1, BLOCK, 3 * BLOCK + 1, len(prompt), len(prompt)):
            run(core, [request(1, [*prompt[:length], draw.randrange(VOCAB)], max_tokens=2)])
            assert seen(run(core, [*others(2), asked])[0]) == alone, length
    finally:
        core.engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_too(tmp_path: Path, dtype: str) -> None:
    save_tiny(tmp_path, "qwen3_moe")
    check_bits(tmp_path, dtype)


def test_routers_are_multiplied_alike() -> None:
    """Whatever is plain in every checkpoint: a router that rounds differently sends a token to other experts."""
    recipes = read_recipes({}).fixed()
    factory = LayerFactory(dtype=torch.float32, recipe=recipes, plain=recipes.plain)
    assert isinstance(factory.plain_linear("layers.0.mlp.router", 8, 4).recipe, Fixed)


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "mamba2")
    with pytest.raises(ValueError, match="attention over heads only, and this model has recurrent layers"):
        open_runtime(tmp_path, deterministic=True)


FP8_EXPERTS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["re:.*self_attn.*"],
}  # fmt: skip
MXFP4_EXPERTS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


@pytest.mark.parametrize(
    ("model_type", "stored", "recipe"), [("qwen3_moe", FP8_EXPERTS, "Fp8Block"), ("gpt_oss", MXFP4_EXPERTS, "Mxfp4")]
)
def test_experts_whose_products_are_not_fixed_are_refused(
    tmp_path: Path, model_type: str, stored: dict[str, Any], recipe: str
) -> None:
    save_tiny(tmp_path, model_type, **({"hidden_size": 64, "intermediate_size": 64} if recipe == "Mxfp4" else {}))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": stored}))
    wanted = (
        rf"^deterministic: true needs experts in 16 or 32 bits on a CPU, and layers\.\d\.mlp\S+ is stored as {recipe}:"
    )
    with pytest.raises(ValueError, match=wanted):
        open_runtime(tmp_path, deterministic=True)


def test_experts_that_no_recipe_stores_are_named() -> None:
    """Also where the recipe is wrapped for its products."""
    odd: Any = type("Odd", (), {"stored": lambda self, dtype: ()})()
    factory = LayerFactory(dtype=torch.float32, recipe=lambda _: Fixed(odd))
    with pytest.raises(ValueError, match="experts can't be stored as Odd"):
        factory.experts(
            "layers.0.mlp", hidden_size=8, intermediate_size=8, routing=Routing(num_experts=2, top_k=1),
            act=expert_act("silu"),
        )  # fmt: skip
