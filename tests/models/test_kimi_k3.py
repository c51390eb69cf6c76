"""Kimi-K3 against a reference written from its publications, and, without what is its own, against transformers' Kimi
Linear; MXFP4 experts, plans, and configs that are refused. Ranks are in test_ranks.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.attention.cpu import CpuAttention
from headrace.attention.port import AttentionBackend
from headrace.attention.torch import TorchAttention
from headrace.config.llm_args import LlmArgs
from headrace.engine.build import build_model
from headrace.engine.groups import group_layers
from headrace.engine.weights import load_weights
from headrace.hub.config import read_config, stated_quantisation
from headrace.hub.rank_share import Ranks
from headrace.hub.read_shape import read_shape
from headrace.hub.source import resolve_model
from headrace.layers.experts import ExpertsSetup
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import RecurrentLayer
from headrace.layers.recipes import read_recipes
from headrace.quant.none import Dense
from headrace.runtime.forecast import Spread, forecast
from headrace.runtime.gpus import Device
from tests.kits.interpreter import HAS_INTERPRETER
from tests.kits.model import (
    TOLERANCE,
    Case,
    Row,
    Sequences,
    assert_close,
    check_chunks,
    check_decode,
    check_mixed_batch,
    check_prefill,
    check_prefix_hit,
    check_snapshots,
    edge_lengths,
    load_case,
    prompt,
    save_tiny,
)
from tests.kits.tiny_kimi_k3 import DELTA, KIMI_K3, save_kimi_k3
from tests.models.kimi_k3_reference import KimiK3Reference, random_weights
from tests.twin.harness import open_runtime, request, run, tokens_of

FILE = "model.safetensors"
DENSE = Dense()
REFERENCES = {"kimi_k3": save_kimi_k3}
"""Model types that transformers lacks -> what writes a checkpoint and returns a reference for it."""


@pytest.fixture(scope="module", params=sorted(REFERENCES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoint")
    oracle = REFERENCES[request.param](folder)
    return load_case(resolve_model(str(folder)), oracle)


# ---- the kit, over the reference -------------------------------------------------------------


def test_prefill(case: Case) -> None:
    assert [isinstance(layer, RecurrentLayer) for layer in case.model.layers] == [True, False, True, True, False]
    check_prefill(case)


def test_chunks(case: Case) -> None:
    check_chunks(case)


def test_decode(case: Case) -> None:
    check_decode(case, num_tokens=16)


@pytest.mark.parametrize("backend", [TorchAttention, CpuAttention])
def test_mixed_batch(case: Case, backend: type[AttentionBackend]) -> None:
    check_mixed_batch(case, backend=backend())


def test_prefix_hit(case: Case) -> None:
    check_prefix_hit(case)


def test_snapshots(case: Case) -> None:
    check_snapshots(case)


@pytest.mark.skipif(not HAS_INTERPRETER, reason="no Triton here")
def test_gates_over_the_attention_of_a_gpu(case: Case) -> None:
    from headrace.attention.latent_triton import LatentTriton

    ids = prompt(11)
    backend: Any = LatentTriton()
    (logits,) = Sequences(case.model, backend=backend).step([(Row(), ids)])
    assert_close(logits, case.logits(ids), "over the backend of a GPU")


def test_parameters_are_counted() -> None:
    for form, changes in {"as published": {}, **FORMS}.items():
        config = {**KIMI_K3, **changes}
        count = sum(weight.numel() for weight in random_weights(config).values())
        assert read_shape({"model_type": "kimi_k3", "text_config": config}).num_parameters == count, form


def test_weights_are_the_checkpoints(case: Case) -> None:
    stored = load_file(case.source.path / FILE)
    text = sum(value.nbytes for name, value in stored.items() if name.startswith("language_model."))
    spare = (DELTA["head_dim"] - DELTA["num_heads"]) * 4 * len(DELTA["kda_layers"])
    assert case.report.weight_bytes == case.model.weight_map().weight_bytes == text - spare


BRANCHES: dict[str, Any] = {
    "attn_res_block_size": 3,
    "latent_moe_use_norm": False,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": None,
    "mla_use_output_gate": False,
    "topk_group": 4,
    "linear_attn_config": {**DELTA, "gate_lower_bound": -1.0},
    # The norm behind the experts' sum takes their size away.
    "routed_scaling_factor": 1.0,
    "moe_renormalize": False,
}
UNNORMED = ("routed_scaling_factor", "moe_renormalize")


@pytest.mark.parametrize("key", BRANCHES)
def test_prompts_reach_the_branches(case: Case, key: str) -> None:
    """With another value of the key the reference computes something else."""
    ids, config = prompt(max(edge_lengths(case))), KIMI_K3 | ({"latent_moe_use_norm": False} if key in UNNORMED else {})
    usual, other = (
        KimiK3Reference({**config, **changes}, case.oracle.weights).logits(ids)
        for changes in ({}, {key: BRANCHES[key]})
    )
    assert float((other - usual).abs().max()) > 100 * TOLERANCE


def test_through_the_runtime(case: Case) -> None:
    """Prompts that arrive one after another, in chunks, beside rows that generate, and resumed at snapshots."""
    shared = prompt(16, seed=8)
    prompts = [prompt(length, seed=7) for length in (1, 9, 30)] + [shared + prompt(length, seed=9) for length in (3, 5)]
    expected = [case.greedy(ids, 6) for ids in prompts]
    states = {"mamba_state_config": {"periodic_snapshot_interval": 8}}
    core = open_runtime(case.source.path, max_num_tokens=12, kv_cache_config=states)
    try:
        for turn in range(2):
            some = [request(10 * turn + at, ids, max_tokens=6) for at, ids in enumerate(prompts)]
            deltas = run(core, some, stagger=1)
            assert [tokens_of(deltas[each.id]) for each in some] == expected
        cached = [deltas[each.id][-1].cached_tokens for each in some]
        assert cached == [0, 8, 24, 16, 16], "prefixes are reused at snapshots"
    finally:
        core.close()


# ---- parts that a config may leave away ------------------------------------------------------

FORMS: dict[str, dict[str, Any]] = {
    "no attention over residuals": {"attn_res_block_size": None},
    "one stretch, direct queries": {"attn_res_block_size": 9, "q_lora_rank": None},
    "a latent without a norm, no bound of up": {"latent_moe_use_norm": False, "activation_situ_linear_beta": None},
    "no latent, one expert, none shared": {
        "routed_expert_hidden_size": None, "latent_moe_use_norm": False, "num_experts_per_token": 1,
        "num_shared_experts": 0,
    },
    "low-rank gate, no bound, no gate of attention": {
        "linear_attn_config": {
            key: value for key, value in DELTA.items() if key not in ("gate_lower_bound", "use_full_rank_gate")
        },
        "mla_use_output_gate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    oracle = save_kimi_k3(tmp_path, **FORMS[form])
    case = load_case(resolve_model(str(tmp_path)), oracle)
    ids = prompt(13)
    sequences, row = Sequences(case.model), Row()
    parts = [sequences.step([(row, ids[start:stop])])[0] for start, stop in ((0, 6), (6, 7), (7, 13))]
    assert_close(torch.cat(parts), case.logits(ids), form)


def test_without_what_is_its_own_it_is_transformers_kimi_linear(tmp_path: Path) -> None:
    """The reference too: both take the checkpoint that transformers wrote, under published keys."""
    torch.set_num_threads(1)
    oracle = save_tiny(tmp_path, "kimi_linear", q_lora_rank=20)
    config = json.loads((tmp_path / "config.json").read_text())
    layers = range(1, config["num_hidden_layers"] + 1)
    kinds = dict(zip(layers, config.pop("layer_types")))
    config["linear_attn_config"] = {
        "num_heads": config["linear_num_heads"], "head_dim": config["linear_head_dim"],
        "short_conv_kernel_size": config["linear_conv_kernel_dim"],
        "full_attn_layers": [layer for layer in layers if kinds[layer] == "full_attention"],
        "kda_layers": [layer for layer in layers if kinds[layer] == "linear_attention"],
    }  # fmt: skip
    config |= {"model_type": "kimi_k3", "first_k_dense_replace": config.pop("mlp_layer_types").count("dense")}
    tensors = {
        name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): tensor.flatten() if "A_log" in name else tensor
        for name, tensor in load_file(tmp_path / FILE).items()
    }
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_text(json.dumps(config))
    case = load_case(resolve_model(str(tmp_path)), oracle)
    check_prefill(case)
    ids = prompt(14)
    assert_close(KimiK3Reference(config, tensors).logits(ids), case.logits(ids), "the reference")


# ---- MXFP4 experts ---------------------------------------------------------------------------

E2M1 = torch.tensor([sign * size for sign in (1, -1) for size in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
QUANTISED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized", "targets": ["Linear"], "input_activations": None,
            "weights": {
                "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
                "dynamic": False, "scale_dtype": "torch.uint8",
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "re:.*lm_head.*",
        "re:.*vision_tower.*", "re:.*mm_projector.*",
    ],
}  # fmt: skip
"""As the released checkpoint states it."""


def packed(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """-> (as stored with experts in MXFP4, the same with what that stands for)"""
    stored, meant = dict(weights), dict(weights)
    draw = torch.Generator().manual_seed(2)
    for name, tensor in weights.items():
        if ".experts." not in name:
            continue
        rows, columns = tensor.shape
        codes = torch.randint(16, (rows, columns), generator=draw)
        exponents = torch.randint(122, 126, (rows, columns // 32), generator=draw)
        scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
        stored[f"{name}_packed"] = (codes[:, ::2] + codes[:, 1::2] * 16).to(torch.uint8)
        stored[f"{name}_scale"] = exponents.to(torch.uint8)
        del stored[name]
        meant[name] = E2M1[codes] * scales
    return stored, meant


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = {**KIMI_K3, "routed_expert_hidden_size": 64, "moe_intermediate_size": 32, "quantization_config": QUANTISED}
    stored, meant = packed(random_weights(config))
    save_file({f"language_model.{name}": tensor for name, tensor in stored.items()}, tmp_path / FILE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": config}))
    source = resolve_model(str(tmp_path))
    read = read_config(source)
    recipes = read_recipes({"quantization_config": stated_quantisation(read)})
    setup = ExpertsSetup(recipe=recipes.of_experts)
    model = build_model(read, LayerFactory(dtype=torch.float32, recipe=recipes, experts=setup))
    load_weights(model, source, progress=False)
    ids = prompt(11)
    (logits,) = Sequences(model).step([(Row(), ids)])
    assert_close(logits, KimiK3Reference(config, meant).logits(ids), "experts in MXFP4")
    shape = read_shape(read)
    assert shape.storage.bits_of("expert", 16) == 4.25 and shape.storage.bits_of("linear", 16) == 16


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"weights": {"type": "float", "num_bits": 4, "group_size": 16}}, "type float, num_bits 4, group_size 16"),
        ({"input_activations": {"num_bits": 8}}, "and quantised activations is not served"),
    ],
)
def test_other_forms_of_mxfp4_are_refused(group: dict[str, Any], message: str) -> None:
    groups = {"group_0": {**QUANTISED["config_groups"]["group_0"], **group}}
    with pytest.raises(ValueError, match=message):
        read_recipes({"quantization_config": {**QUANTISED, "config_groups": groups}})


# ---- plans ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("form", ["as published", *FORMS])
def test_plan_is_what_the_engine_has(form: str, size: int) -> None:
    config = {"model_type": "kimi_k3", "text_config": {**KIMI_K3, **FORMS.get(form, {})}}
    args = LlmArgs(model="m", dtype="bfloat16", tensor_parallel_size=size)
    (stage,) = forecast(args, read_shape(config), Spread(Device("cpu", 1 << 34, 0), Ranks(size))).stages
    held: list[int] = []
    for rank in range(size):
        factory = LayerFactory(dtype=torch.bfloat16, recipe=lambda _: DENSE, parallel=ParallelContext(rank, size))
        model = build_model(config, factory)
        held.append(model.weight_map().weight_bytes)
        assert group_layers(model.layers, torch.bfloat16) == stage.facts.groups
    assert stage.facts.weight_bytes == max(held)
    assert (model.max_position, model.vocab_size) == (stage.facts.max_position, stage.facts.vocab_size)


# ---- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mla_use_nope": False}, "mla_use_nope False is not served: only True is"),
        ({"mla_use_rope": True}, "mla_use_rope True is not served"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2 is not served"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax' is not served"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not served"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers 1 is not served"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling .* is not served"),
        ({"mla_new": 1, "attn_res_decay": 0.5}, "attn_res_decay, mla_new: not known of Kimi-K3"),
        ({"linear_attn_config": {**DELTA, "safe": 1}}, r"linear_attn_config\.safe: not known of Kimi-K3"),
        ({"linear_attn_config": {**DELTA, "gate_lower_bound": 5.0}}, "gate_lower_bound must be less than 0"),
        ({"linear_attn_config": {**DELTA, "kda_layers": [1, 3]}}, "must name each of the layers 1 to 5 once"),
        (
            {"linear_attn_config": {**DELTA, "full_attn_layers": 2}},
            "full_attn_layers must be a list of whole numbers, not 2",
        ),
        ({"routed_expert_hidden_size": None}, "latent_moe_use_norm needs routed_expert_hidden_size"),
        ({"activation_situ_beta": None}, "hidden_act 'situ' needs activation_situ_beta"),
        ({"activation_situ_beta": -1.0}, "activation_situ_beta must be greater than 0"),
        ({"hidden_act": "tanh"}, "unknown activation 'tanh'"),
        ({"attn_res_block_size": 0}, "attn_res_block_size must be at least 1"),
        ({"num_experts_per_token": 9}, "9 experts a token, but there are only 8"),
        ({"first_k_dense_replace": None}, "lacks the key 'first_k_dense_replace'"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    config = {"model_type": "kimi_k3", "text_config": {**KIMI_K3, **changes}}
    with pytest.raises(ValueError, match=message):
        build_model(config, LayerFactory(dtype=torch.float32, recipe=lambda _: DENSE))


def test_a_language_model_alone_says_how_it_is_served() -> None:
    """Such a config calls itself `kimi_linear`."""
    factory = LayerFactory(dtype=torch.float32, recipe=lambda _: DENSE)
    with pytest.raises(ValueError, match="attn_res_block_size.* those are keys of Kimi-K3.*model_type: kimi_k3"):
        build_model(KIMI_K3, factory)
    assert len(build_model({**KIMI_K3, "model_type": "kimi_k3"}, factory).layers) == KIMI_K3["num_hidden_layers"]


def test_decays_with_or_without_zeros_behind_them(case: Case, tmp_path: Path) -> None:
    """Anything else there has a meaning that isn't known."""
    tensors = load_file(case.source.path / FILE)
    name = "language_model.model.layers.0.self_attn.A_log"
    (tmp_path / "config.json").write_text((case.source.path / "config.json").read_text())
    save_file(tensors | {name: tensors[name][: DELTA["num_heads"]].contiguous()}, tmp_path / FILE)
    ids = prompt(5)
    (logits,) = Sequences(load_case(resolve_model(str(tmp_path)), case.oracle).model).step([(Row(), ids)])
    assert_close(logits, case.logits(ids), "no zeros")
    save_file(tensors | {name: torch.ones(DELTA["head_dim"])}, tmp_path / FILE)
    with pytest.raises(ValueError, match="A_log has 6 rows: only the first 4 are known"):
        load_case(resolve_model(str(tmp_path)), case.oracle)
