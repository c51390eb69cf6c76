"""Settings of sparse attention, one class a kind."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, field_validator

from headrace.config.base import ConfigModel, prototype


class RocketSparseAttentionConfig(ConfigModel):
    """RocketKV: a coarse selection of the prompt, then a fine one in each step."""

    algorithm: Literal["rocket"] = prototype("rocket", "Kind of sparse attention.")
    window_size: int = prototype(32, "Latest tokens that are always attended to.", gt=0)
    kernel_size: int = prototype(63, "Width of the pooling over scores.", gt=0)
    topr: int = prototype(128, "Head dimensions used to estimate scores.", gt=0)
    topk: int = prototype(64, "Pages attended to in a step.", gt=0)
    prompt_budget: int = prototype(2048, "Prompt tokens that are kept.", gt=0)
    page_size: int = prototype(4, "Tokens in a page.", gt=0)
    kt_cache_dtype: Literal["float8_e5m2", "bfloat16"] = prototype("float8_e5m2", "Type of the cache of page keys.")
    seq_len_threshold: int | None = prototype(None, "Shorter sequences use full attention.", ge=0)


class DeepSeekSparseAttentionConfig(ConfigModel):
    """DSA: a small indexer picks the tokens to attend to."""

    algorithm: Literal["dsa"] = prototype("dsa", "Kind of sparse attention.")
    index_n_heads: int | None = prototype(None, "Heads of the indexer; null is the checkpoint's.", gt=0)
    index_head_dim: int | None = prototype(None, "Size of an indexer head; null is the checkpoint's.", gt=0)
    index_topk: int | None = prototype(None, "Tokens that are picked; null is the checkpoint's.", gt=0)
    indexer_max_chunk_size: int | None = prototype(None, "Most tokens indexed at once; null is 32768.", gt=0)
    skip_indexer_for_short_seqs: bool = prototype(True, "Use full attention when all tokens would be picked.")
    use_cute_dsl_topk: bool = prototype(False, "Kernel choice of the selection.")
    use_cute_dsl_paged_mqa_logits: bool = prototype(False, "Kernel choice of the indexer's scores.")
    q_split_threshold: int = prototype(8192, "Queries above which prefill indexing is split; negative never splits.")
    indexer_rope_interleave: bool = prototype(False, "Interleaved rotary positions in the indexer.")
    enable_heuristic_topk: bool = prototype(False, "Start the selection from the last step's.")
    use_self_sampling_topk: bool = prototype(True, "Estimate the selection's threshold from a sample.")
    use_gvr_emission: bool = prototype(False, "Kernel choice of how picked tokens are written.")
    indexer_k_dtype: Literal["fp8", "fp4"] = prototype("fp8", "Type of the indexer's keys.")
    index_share_for_mtp_iteration: bool | None = prototype(None, "Draft steps use the target's selection.")
    seq_len_threshold: int | None = prototype(None, "Shorter sequences use full attention.", ge=0)


class DeepSeekV4SparseAttentionConfig(ConfigModel):
    """DeepSeek-V4: layers with compressed contexts beside a sliding window."""

    algorithm: Literal["deepseek_v4"] = prototype("deepseek_v4", "Kind of sparse attention.")
    index_n_heads: int | None = prototype(None, "Heads of the indexer; null is the checkpoint's.", gt=0)
    index_head_dim: int = prototype(128, "Size of an indexer head.", gt=0)
    index_topk: int = prototype(512, "Tokens that are picked.", gt=0)
    indexer_max_chunk_size: int | None = prototype(None, "Most tokens indexed at once; null is 32768.", gt=0)
    skip_indexer_for_short_seqs: bool = prototype(False, "Use full attention when all tokens would be picked.")
    use_cute_dsl_topk: bool = prototype(False, "Kernel choice of the selection.")
    use_cute_dsl_paged_mqa_logits: bool = prototype(False, "Kernel choice of the indexer's scores.")
    q_split_threshold: int = prototype(8192, "Queries above which prefill indexing is split; negative never splits.")
    indexer_rope_interleave: bool = prototype(False, "Interleaved rotary positions in the indexer.")
    enable_heuristic_topk: bool = prototype(False, "Start the selection from the last step's.")
    use_self_sampling_topk: bool = prototype(True, "Estimate the selection's threshold from a sample.")
    use_gvr_emission: bool = prototype(False, "Kernel choice of how picked tokens are written.")
    indexer_k_dtype: Literal["fp8", "fp4"] = prototype("fp4", "Type of the indexer's keys; fp8 where fp4 is missing.")
    index_share_for_mtp_iteration: bool | None = prototype(None, "Draft steps use the target's selection.")
    seq_len_threshold: int | None = prototype(None, "Shorter sequences use full attention.", ge=0)
    compress_ratios: list[int] = prototype([1, 1, 4, 128, 4, 128, 4], "Compression of each layer, repeated; 0 is 1.")
    window_size: int = prototype(128, "Latest tokens that are attended to uncompressed.", gt=0)
    enable_kv_cache_offload: bool = prototype(False, "Keep compressed contexts on the host; not usable yet.")

    @field_validator("compress_ratios")
    @classmethod
    def _zero_is_one(cls, value: list[int]) -> list[int]:
        if not value or min(value) < 0:
            raise ValueError(f"expected whole numbers of at least 0, got {value}")
        return [max(ratio, 1) for ratio in value]


class PhaseThreshold(ConfigModel):
    """One value for each phase."""

    prefill: float | None = prototype(None, "Value while the prompt is computed.")
    decode: float | None = prototype(None, "Value while tokens are generated.")


def _number_or_phases(value: Any) -> str:
    return "PhaseThreshold" if isinstance(value, (dict, PhaseThreshold)) else "float"


NumberOrPhases = Annotated[
    Annotated[float, Tag("float")] | Annotated[PhaseThreshold, Tag("PhaseThreshold")], Discriminator(_number_or_phases)
]


class SkipSoftmaxAttentionConfig(ConfigModel):
    """Leave out blocks whose scores can't matter."""

    algorithm: Literal["skip_softmax"] = prototype("skip_softmax", "Kind of sparse attention.")
    threshold_scale_factor: NumberOrPhases | None = prototype(None, "Scale of the threshold, or one a phase.")
    target_sparsity: NumberOrPhases | None = prototype(
        None, "Share of blocks to leave out (0 to 1), or one a phase; needs coefficients in the checkpoint."
    )
    uses_spcompress: bool = prototype(False, "The checkpoint was made for compressed scores.")

    @field_validator("target_sparsity")
    @classmethod
    def _is_a_share(cls, value: float | PhaseThreshold | None) -> float | PhaseThreshold | None:
        shares = [value.prefill, value.decode] if isinstance(value, BaseModel) else [value]
        if any(share is not None and not 0 <= share <= 1 for share in shares):
            raise ValueError("shares must lie between 0 and 1")
        return value


class QsaSparseAttentionConfig(ConfigModel):
    """Quest-like selection whose geometry the checkpoint states."""

    algorithm: Literal["qsa"] = prototype("qsa", "Kind of sparse attention.")
    seq_len_threshold: int | None = prototype(None, "Shorter sequences use full attention; at least token_topk.", ge=0)
    enable_heuristic_topk: bool = prototype(False, "Start the selection from the last step's.")
    index_share_for_mtp_iteration: bool | None = prototype(None, "Draft steps use the target's selection.")


class MiniMaxM3SparseAttentionConfig(ConfigModel):
    """MiniMax-M3: an indexer picks blocks to attend to."""

    algorithm: Literal["minimax_m3"] = prototype("minimax_m3", "Kind of sparse attention.")
    sparse_num_index_heads: int = prototype(4, "Heads of the indexer.", gt=0)
    sparse_index_dim: int = prototype(128, "Size of an indexer head.", gt=0)
    sparse_block_size: int = prototype(128, "Tokens in a block.", gt=0)
    sparse_topk_blocks: int = prototype(16, "Blocks that are picked.", gt=0)
    sparse_init_blocks: int = prototype(0, "First blocks that are always picked.", ge=0)
    sparse_local_blocks: int = prototype(1, "Latest blocks that are always picked.", ge=0)
    sparse_score_type: str = prototype("max", "How the scores of a block are joined.")
    sparse_disable_index_value: bool = prototype(True, "The indexer has keys only.")
    indexer_kv_dtype: Literal["bf16", "fp8"] = prototype("bf16", "Type of the indexer's cache.")
    num_attention_heads: int | None = prototype(None, "Query heads; null is the checkpoint's.", gt=0)
    num_key_value_heads: int | None = prototype(None, "Key heads; null is the checkpoint's.", gt=0)
    implementation: Literal["triton", "msa"] = prototype("triton", "Kernels to use.")
    fuse_qkv_index_projection: bool = prototype(False, "One product for attention's and the indexer's inputs.")


SparseAttentionConfig = Annotated[
    RocketSparseAttentionConfig
    | DeepSeekSparseAttentionConfig
    | DeepSeekV4SparseAttentionConfig
    | SkipSoftmaxAttentionConfig
    | QsaSparseAttentionConfig
    | MiniMaxM3SparseAttentionConfig,
    Field(discriminator="algorithm"),
]
