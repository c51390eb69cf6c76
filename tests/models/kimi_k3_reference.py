"""Kimi-K3's language model as its publications describe it, in plain PyTorch: the whole sequence at once, in float32,
KDA's recurrence token by token, every expert in turn. It shares no code with Headrace.

Written from formulas, as public descriptions of the model and its ports give them: of the technical report
(arXiv:2607.24653), Kimi Linear (arXiv:2510.26692), Attention Residuals (arXiv:2603.15031), DeepSeek-V2 and V3 (latent
attention and routing). It is not the authors' code, and was not held to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LOW_RANK_EPS = 1e-6
LENGTH_EPS = 1e-6


def random_weights(config: Mapping[str, Any], *, seed: int = 0) -> dict[str, Tensor]:
    """A checkpoint's tensors by their published names, without the prefix of the multimodal model."""
    delta, hidden = config["linear_attn_config"], config["hidden_size"]
    width = delta["num_heads"] * delta["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    if config.get("attn_res_block_size"):
        shapes |= {"model.output_attn_res_norm.weight": (hidden,), "model.output_attn_res_proj.weight": (1, hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes |= {layer + "input_layernorm.weight": (hidden,), layer + "post_attention_layernorm.weight": (hidden,)}
        if config.get("attn_res_block_size"):
            for block in ("self_attention", "mlp"):
                shapes |= {f"{layer}{block}_res_norm.weight": (hidden,), f"{layer}{block}_res_proj.weight": (1, hidden)}
        attention = _latent_shapes(config) if index + 1 in delta["full_attn_layers"] else _delta_shapes(config, width)
        shapes |= {f"{layer}self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {layer + name: shape for name, shape in _mlp_shapes(config, index).items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * 0.15 for name, shape in shapes.items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1
        elif "res_proj" in name:  # so that the mixes are far from even
            tensors[name] *= 2
    return tensors


def _latent_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (rank + rope, hidden),
        "kv_a_layernorm.weight": (rank,),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (hidden, heads * value),
    }
    query = config.get("q_lora_rank")
    if query is None:
        shapes["q_proj.weight"] = (heads * (nope + rope), hidden)
    else:
        shapes["q_a_proj.weight"], shapes["q_a_layernorm.weight"] = (query, hidden), (query,)
        shapes["q_b_proj.weight"] = (heads * (nope + rope), query)
    if config.get("mla_use_output_gate"):
        shapes["g_proj.weight"] = (heads * value, hidden)
    return shapes


def _delta_shapes(config: Mapping[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    delta, hidden = config["linear_attn_config"], config["hidden_size"]
    heads, dim = delta["num_heads"], delta["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (width, hidden) for part in "qkv"}
    shapes |= {f"{part}_conv1d.weight": (width, 1, delta["short_conv_kernel_size"]) for part in "qkv"}
    shapes |= {"f_a_proj.weight": (dim, hidden), "f_b_proj.weight": (width, dim), "b_proj.weight": (heads, hidden)}
    shapes |= {"A_log": (heads,), "dt_bias": (width,), "o_norm.weight": (dim,), "o_proj.weight": (hidden, width)}
    if delta.get("use_full_rank_gate"):
        return shapes | {"g_proj.weight": (width, hidden)}
    return shapes | {"g_a_proj.weight": (dim, hidden), "g_b_proj.weight": (width, dim)}


def _mlp_shapes(config: Mapping[str, Any], index: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]

    def gated(block: str, names: Sequence[str], features: int, width: int) -> dict[str, tuple[int, ...]]:
        gate, up, down = (f"{block}.{name}.weight" for name in names)
        return {gate: (width, features), up: (width, features), down: (features, width)}

    usual = ("gate_proj", "up_proj", "down_proj")
    if index < config["first_k_dense_replace"]:
        return gated("mlp", usual, hidden, config["intermediate_size"])
    block, count, latent = "block_sparse_moe", config["num_experts"], config.get("routed_expert_hidden_size")
    shapes: dict[str, tuple[int, ...]] = {
        f"{block}.gate.weight": (count, hidden), f"{block}.gate.e_score_correction_bias": (count,),
    }  # fmt: skip
    for expert in range(count):
        shapes |= gated(f"{block}.experts.{expert}", ("w1", "w3", "w2"), latent or hidden, inner)
    if config["num_shared_experts"]:
        shapes |= gated(f"{block}.shared_experts", usual, hidden, inner * config["num_shared_experts"])
    if latent:
        shapes[f"{block}.routed_expert_down_proj.weight"] = (latent, hidden)
        shapes[f"{block}.routed_expert_up_proj.weight"] = (hidden, latent)
    if latent and config.get("latent_moe_use_norm"):
        shapes[f"{block}.routed_expert_norm.weight"] = (latent,)
    return shapes


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


class KimiK3Reference:
    """Callable as the test kit calls transformers' models."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.config = SimpleNamespace(**config)
        self.keys = dict(config)
        self.weights = weights

    def __call__(self, ids: Tensor, *, use_cache: bool = False, logits_to_keep: int = 0) -> Any:
        logits = torch.stack([self.logits(row.tolist()) for row in ids])
        return SimpleNamespace(logits=logits[:, -logits_to_keep:] if logits_to_keep else logits)

    def generate(self, ids: Tensor, *, max_new_tokens: int, **options: Any) -> Tensor:
        row = ids[0].tolist()
        for _ in range(max_new_tokens):
            row.append(int(self.logits(row)[-1].argmax()))
        return torch.tensor([row])

    def at(self, layer: int | None, name: str) -> Tensor:
        return self.weights[f"model.{name}" if layer is None else f"model.layers.{layer}.{name}"]

    def logits(self, ids: Sequence[int]) -> Tensor:
        """[tokens, vocab]"""
        keys, eps = self.keys, self.keys["rms_norm_eps"]
        stretch = keys.get("attn_res_block_size")
        grown = self.weights["model.embed_tokens.weight"][torch.tensor(list(ids))].float()
        left: list[Tensor] = []
        for layer in range(keys["num_hidden_layers"]):
            seen = grown if stretch is None else self.mixed(layer, "self_attention_res", left, grown)
            out = self.attention(layer, rms(seen, self.at(layer, "input_layernorm.weight"), eps))
            if stretch is not None and layer % stretch == 0:
                left.append(grown)
                grown = out
            else:
                grown = grown + out
            seen = grown if stretch is None else self.mixed(layer, "mlp_res", left, grown)
            grown = grown + self.mlp(layer, rms(seen, self.at(layer, "post_attention_layernorm.weight"), eps))
        if stretch is not None:
            grown = self.mixed(None, "output_attn_res", left, grown)
        return rms(grown, self.at(None, "norm.weight"), eps) @ self.weights["lm_head.weight"].T

    def mixed(self, layer: int | None, name: str, left: Sequence[Tensor], grown: Tensor) -> Tensor:
        """softmax over (sums that stretches began with, the one that grows) of q . RMSNorm(sum), times the sums"""
        if not left:
            return grown
        sums = torch.stack([*left, grown])
        normed = rms(sums, self.at(layer, f"{name}_norm.weight"), self.keys["rms_norm_eps"])
        scores = normed @ self.at(layer, f"{name}_proj.weight")[0]
        return (torch.softmax(scores, 0).unsqueeze(-1) * sums).sum(0)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        if layer + 1 in self.keys["linear_attn_config"]["full_attn_layers"]:
            return self.latent(layer, x)
        return self.delta(layer, x)

    def latent(self, layer: int, x: Tensor) -> Tensor:
        """Keys and values are unfolded; the features beside the latent are the same for all heads and not turned."""
        keys, count = self.keys, len(x)
        heads, nope, rank = keys["num_attention_heads"], keys["qk_nope_head_dim"], keys["kv_lora_rank"]

        def of(name: str) -> Tensor:
            return self.at(layer, f"self_attn.{name}.weight")

        if keys.get("q_lora_rank") is None:
            q = x @ of("q_proj").T
        else:
            q = rms(x @ of("q_a_proj").T, of("q_a_layernorm"), LOW_RANK_EPS) @ of("q_b_proj").T
        q = q.view(count, heads, -1)
        down = x @ of("kv_a_proj_with_mqa").T
        unfolded = rms(down[:, :rank], of("kv_a_layernorm"), LOW_RANK_EPS) @ of("kv_b_proj").T
        unfolded = unfolded.view(count, heads, -1)
        shared = down[:, None, rank:].expand(count, heads, -1)
        k, v = torch.cat((unfolded[..., :nope], shared), -1), unfolded[..., nope:]
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).reshape(count, -1)
        if keys.get("mla_use_output_gate"):
            out = out * torch.sigmoid(x @ of("g_proj").T)
        return out @ of("o_proj").T

    def delta(self, layer: int, x: Tensor) -> Tensor:
        """S <- S Diag(decay); S <- S + beta (v - S k) k^T; o = S q / sqrt(dim)"""
        stated, count = self.keys["linear_attn_config"], len(x)
        heads, dim = stated["num_heads"], stated["head_dim"]

        def of(name: str) -> Tensor:
            return self.at(layer, f"self_attn.{name}")

        def mixed(part: str) -> Tensor:
            taps = of(f"{part}_conv1d.weight")[:, 0]
            projected = F.pad(x @ of(f"{part}_proj.weight").T, (0, 0, taps.shape[1] - 1, 0))
            rows = [(projected[at : at + taps.shape[1]] * taps.T).sum(0) for at in range(count)]
            return F.silu(torch.stack(rows)).view(count, heads, dim)

        q, k, v = mixed("q"), mixed("k"), mixed("v")
        q, k = (part / torch.sqrt((part * part).sum(-1, keepdim=True) + LENGTH_EPS) for part in (q, k))
        speed = (x @ of("f_a_proj.weight").T @ of("f_b_proj.weight").T + of("dt_bias")).view(count, heads, dim)
        rate, bound = of("A_log")[:heads].exp()[:, None], stated.get("gate_lower_bound")
        log_decay = -rate * F.softplus(speed) if bound is None else bound * torch.sigmoid(rate * speed)
        beta = torch.sigmoid(x @ of("b_proj.weight").T)
        state, rows = torch.zeros(heads, dim, dim), []  # [heads, values, keys]
        for at in range(count):
            state = state * log_decay[at].exp()[:, None, :]
            error = v[at] - torch.einsum("hvk,hk->hv", state, k[at])
            state = state + beta[at][:, None, None] * error[:, :, None] * k[at][:, None, :]
            rows.append(torch.einsum("hvk,hk->hv", state, q[at]) / math.sqrt(dim))
        out = rms(torch.stack(rows), of("o_norm.weight"), self.keys["rms_norm_eps"])
        if stated.get("use_full_rank_gate"):
            gate = x @ of("g_proj.weight").T
        else:
            gate = x @ of("g_a_proj.weight").T @ of("g_b_proj.weight").T
        return (out * torch.sigmoid(gate).view(out.shape)).reshape(count, -1) @ of("o_proj.weight").T

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        if layer < self.keys["first_k_dense_replace"]:
            return self.gated(layer, "mlp", ("gate_proj", "up_proj", "down_proj"), x)
        keys, block = self.keys, "block_sparse_moe"
        scores = torch.sigmoid(x @ self.at(layer, f"{block}.gate.weight").T)
        choice = scores + self.at(layer, f"{block}.gate.e_score_correction_bias")
        groups = keys.get("num_expert_group", 1)
        if groups > 1:
            by_group = choice.view(len(x), groups, -1).topk(2).values.sum(-1)
            best = by_group.topk(keys["topk_group"]).indices
            allowed = torch.zeros(len(x), groups).scatter(1, best, 1.0).repeat_interleave(choice.shape[1] // groups, 1)
            choice = choice.masked_fill(allowed == 0, -torch.inf)
        chosen = choice.topk(keys["num_experts_per_token"]).indices
        weights = scores.gather(1, chosen)
        if keys["moe_renormalize"] and chosen.shape[1] > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * keys["routed_scaling_factor"]
        latent = keys.get("routed_expert_hidden_size")
        inputs = x @ self.at(layer, f"{block}.routed_expert_down_proj.weight").T if latent else x
        summed = torch.zeros_like(inputs)
        for expert in range(keys["num_experts"]):
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            summed = summed + share * self.gated(layer, f"{block}.experts.{expert}", ("w1", "w3", "w2"), inputs)
        if keys.get("latent_moe_use_norm"):
            summed = rms(summed, self.at(layer, f"{block}.routed_expert_norm.weight"), keys["rms_norm_eps"])
        if latent:
            summed = summed @ self.at(layer, f"{block}.routed_expert_up_proj.weight").T
        if keys["num_shared_experts"]:
            names = ("gate_proj", "up_proj", "down_proj")
            summed = summed + self.gated(layer, f"{block}.shared_experts", names, x)
        return summed

    def gated(self, layer: int, block: str, names: Sequence[str], x: Tensor) -> Tensor:
        gate, up, down = (self.at(layer, f"{block}.{name}.weight") for name in names)
        return self.activated(x @ gate.T, x @ up.T) @ down.T

    def activated(self, gate: Tensor, up: Tensor) -> Tensor:
        """SiTU: beta tanh(gate / beta) sigmoid(gate) * linear_beta tanh(up / linear_beta)"""
        keys = self.keys
        if keys["hidden_act"] == "silu":
            return F.silu(gate) * up
        beta, linear = keys["activation_situ_beta"], keys.get("activation_situ_linear_beta")
        if linear is not None:
            up = linear * torch.tanh(up / linear)
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up
