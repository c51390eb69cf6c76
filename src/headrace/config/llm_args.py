"""The top of the configuration: every key of a `--config` file and every keyword of `LLM(...)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import PositiveInt, field_validator

from headrace.config.base import beta, default_of, deprecated, prototype, stable
from headrace.config.kernels import (
    AnyCudaGraphConfig,
    DecodeCudaGraphConfig,
    EncodeCudaGraphConfig,
    LayerwiseBenchmarksConfig,
    MoeConfig,
    Nvfp4GemmConfig,
    TorchCompileConfig,
)
from headrace.config.kv import KvCacheConfig
from headrace.config.lora import LoraConfig, PeftCacheConfig
from headrace.config.model import GmsConfig, LoadFormat, ModelExpressConfig, dtype_name, load_format_of_number
from headrace.config.multimodal import MultimodalConfig
from headrace.config.own import HeadraceArgs
from headrace.config.parallel import AllReduceStrategy, AttentionDpConfig, CpConfig, DwdpConfig, RayPlacementConfig
from headrace.config.scheduling import ReorderRequestPolicyConfig, SchedulerConfig
from headrace.config.serving import PrometheusMetricsConfig, SleepConfig, TelemetryConfig
from headrace.config.sparse import SparseAttentionConfig
from headrace.config.speculative import AnySpeculativeConfig, one_spelling_of_kind
from headrace.config.transfer import CacheTransceiverConfig, KvCacheCompressionConfig, KvCacheConnectorConfig

ATTENTION_BACKENDS = ("AUTO", "TRTLLM", "VANILLA", "FLASHINFER", "FLASHINFER_STAR_ATTENTION", "INKLING")
COMPUTE_DTYPES = ("auto", "float16", "bfloat16", "float32")
QUANTISED_DTYPES = ("fp8", "float8_e4m3fn", "float8_e5m2", "nvfp4", "fp4", "mxfp4", "mxfp8", "int8", "int4")
NULL_RESETS = ("max_batch_size", "max_num_tokens", "max_beam_width")
"""Limits for which null means the default, not the absence of a limit."""


HIDDEN = "***"
"""Stands for a secret where a configuration is shown."""


class LlmArgs(HeadraceArgs):
    """All settings of one engine. Build it with `resolve()`, which also checks how settings fit together."""

    ALIASES: ClassVar[dict[str, str]] = {"hf_revision": "revision", "_mpi_session": "mpi_session"}

    # Model, tokenizer, loading
    model: str = stable("", "Model to serve: an alias, a folder, a GGUF file or a hub id.")
    tokenizer: Any = stable(None, "Tokenizer to use: a folder, a hub id or, in Python, an object; null is the model's.")
    tokenizer_mode: Literal["auto", "slow"] = stable("auto", "slow uses the tokenizer's pure Python form.")
    custom_tokenizer: str | None = prototype(None, "Alias or import path of a tokenizer class.")
    enable_tokenization_cache: bool = prototype(False, "Remember the ids of prompt prefixes.")
    skip_tokenizer_init: bool = stable(False, "Load no tokenizer: prompts and answers are ids.")
    post_processor_hook: str | None = prototype(None, "Import path of a class that may rewrite each piece of output.")
    trust_remote_code: bool = stable(False, "Run Python code that comes with the checkpoint.")
    revision: str | None = stable(None, "Revision of the model on the hub.")
    tokenizer_revision: str | None = stable(None, "Revision of the tokenizer on the hub.")
    dtype: str = stable("auto", "Type of weights and activations; auto is the checkpoint's, else bfloat16.")
    model_kwargs: dict[str, Any] | None = prototype(None, "Values that replace those of the checkpoint's config.json.")
    load_format: LoadFormat = stable(LoadFormat.AUTO, "How weights are obtained.")
    checkpoint_format: str | None = prototype(None, "Layout of the checkpoint; null is Hugging Face or GGUF.")
    checkpoint_loader: Any = prototype(None, "A loader object.", python_only=True)
    checkpoint_io_policy: Literal["auto", "native", "rank_striped_read_ahead"] = prototype(
        "auto", "How checkpoint files are read."
    )
    mx_config: ModelExpressConfig = prototype(ModelExpressConfig, "Weight transfer from a peer.")
    gms_config: GmsConfig = prototype(GmsConfig, "Weights shared through a GPU memory service.")
    generation_config: Literal["auto", "trtllm"] = prototype(
        "trtllm", "Source of sampling defaults: auto reads the checkpoint's generation_config.json."
    )
    mm_encoder_only: bool = prototype(False, "Run only the multimodal encoder.")
    disable_mm_encoder: bool = prototype(False, "Load a multimodal checkpoint for text only.")
    encode_only: bool = prototype(False, "Run without generation, for LLM.encode.")
    force_dynamic_quantization: bool = prototype(
        False, "Quantise 16-bit weights to FP8 while they are loaded, but for those of the first and the last layer."
    )

    # Parallelism
    tensor_parallel_size: int = stable(1, "Ranks that share each layer.", ge=1)
    pipeline_parallel_size: int = stable(1, "Stages the layers are cut into.", ge=1)
    context_parallel_size: int = stable(1, "Ranks that share each sequence.", ge=1)
    gpus_per_node: int | None = beta(None, "GPUs of a machine; null counts them.", gt=0)
    moe_cluster_parallel_size: int | None = deprecated(
        None, "Clusters of expert ranks; null or -1 is automatic.", ge=-1
    )
    moe_tensor_parallel_size: int | None = stable(None, "Ranks that share each expert; null or -1 is automatic.", ge=-1)
    moe_expert_parallel_size: int | None = stable(
        None, "Ranks that divide the experts; null or -1 is automatic.", ge=-1
    )
    enable_attention_dp: bool = beta(False, "Attention is data parallel over the tensor-parallel ranks.")
    enable_lm_head_tp_in_adp: bool = prototype(False, "Keep the output layer tensor parallel under attention DP.")
    attention_dp_config: AttentionDpConfig | None = beta(None, "How requests are spread under attention DP.")
    pp_partition: list[PositiveInt] | None = prototype(None, "Layers of each pipeline stage.")
    cp_config: CpConfig | None = prototype(None, "Kind of context parallelism.")
    dwdp_config: DwdpConfig | None = prototype(None, "Data parallelism with distributed weights.")
    allreduce_strategy: AllReduceStrategy = beta(AllReduceStrategy.AUTO, "How partial sums of ranks are added up.")
    orchestrator_type: Literal["rpc", "ray"] | None = prototype(
        None, "Who starts the ranks; null starts local processes."
    )
    mpi_session: Any = stable(None, "An open MPI session.", python_only=True)
    ray_worker_extension_cls: str | None = prototype(None, "Import path of a class that extends Ray workers.")
    ray_placement_config: RayPlacementConfig | None = prototype(None, "Where Ray puts the workers.")
    ray_worker_nsight_options: dict[str, Any] | None = prototype(None, "Profiler options of Ray workers.")

    # Limits and scheduling
    max_batch_size: int = stable(2048, "Most sequences in a step.", ge=1)
    max_num_tokens: int = stable(8192, "Most tokens computed in a step.", ge=1)
    max_beam_width: int = stable(1, "Widest beam search a request may ask for.", ge=1)
    max_input_len: PositiveInt | Literal["auto"] | None = stable(
        None, "Longest prompt in tokens; null or auto leaves it to max_seq_len."
    )
    max_seq_len: PositiveInt | Literal["auto"] | None = stable(
        None, "Longest sequence, prompt and answer; null is the model's, auto the longest that fits in memory."
    )
    encoder_max_batch_size: int | None = prototype(None, "Most items an encoder takes at once.", gt=0)
    encoder_max_num_tokens: int | None = prototype(None, "Most tokens an encoder takes at once.", gt=0)
    scheduler_config: SchedulerConfig = prototype(SchedulerConfig, "Which requests run in a step.")
    enable_chunked_prefill: bool = stable(True, "Compute a long prompt over several steps.")
    disable_overlap_scheduler: bool = beta(False, "Wait for a step's tokens before the next step is planned.")
    batch_wait_timeout_ms: float = prototype(0, "Longest time prefill waits for more requests.", ge=0)
    batch_wait_timeout_iters: int = prototype(0, "Most steps prefill waits for more requests.", ge=0)
    batch_wait_max_tokens_ratio: float = prototype(
        0, "Share of max_num_tokens at which prefill stops waiting.", ge=0, le=1
    )
    stream_interval: int = stable(1, "Steps in one streamed piece.", gt=0)
    enable_early_first_token_response: bool = prototype(False, "Send the first token before the next step is sampled.")
    reorder_policy_config: ReorderRequestPolicyConfig | None = prototype(
        None, "A policy that reorders waiting requests."
    )
    enable_resource_governor: bool = prototype(False, "Let operators cut cached prefixes at run time.")

    # Kernels and compilation
    attn_backend: str = beta(
        "TRTLLM",
        f"Attention: {', '.join(ATTENTION_BACKENDS)}. FLASHINFER needs its package and a GPU, VANILLA is plain torch,"
        " AUTO goes by measurements, the others are our own kernels.",
    )
    cuda_graph_config: AnyCudaGraphConfig | None = beta(DecodeCudaGraphConfig, "CUDA graphs of steps; null is off.")
    encoder_cuda_graph_config: EncodeCudaGraphConfig | None = prototype(None, "CUDA graphs of the encoder.")
    enable_encoder_decoder_mixed_cuda_graph: bool = prototype(True, "Capture encoder-decoder steps as one.")
    prefill_cuda_graph_backend: Literal["disabled", "piecewise", "breakable"] = prototype(
        "disabled", "How steps with prompts are captured."
    )
    prefill_capture_num_tokens: list[PositiveInt] | None = prototype(
        None, "Prompt tokens of captured steps, padded to the next; null is a list from 32 to 2048, [] is none."
    )
    torch_compile_config: TorchCompileConfig | None = prototype(None, "torch.compile on the model; null is off.")
    moe_config: MoeConfig = beta(MoeConfig, "The experts layers.")
    nvfp4_gemm_config: Nvfp4GemmConfig = beta(Nvfp4GemmConfig, "Products with NVFP4 weights.")
    enable_autotuner: bool = prototype(True, "Measure kernel variants at start.")
    enable_min_latency: bool = beta(False, "Latency-first kernels of Llama 4.")
    enable_low_latency_host_dispatch: bool = prototype(False, "Shorten the host's part of a step.")
    use_fine_grained_sync: bool = prototype(False, "Let kernels wait for parts of each other.")
    enable_mla_skip_correction: bool = prototype(False, "MLA leaves out small corrections of its running maximum.")
    mla_skip_correction_threshold: float = prototype(8.0, "Largest such correction that is left out.", gt=0, le=32)
    use_cute_dsl_blockscaling_mm: bool = prototype(False, "Kernel choice of block-scaled products.")
    use_cute_dsl_blockscaling_bmm: bool = prototype(False, "Kernel choice of batched block-scaled products.")
    use_cute_dsl_bf16_bmm: bool = prototype(False, "Kernel choice of batched bf16 products.")
    use_cute_dsl_bf16_gemm: bool = prototype(False, "Kernel choice of bf16 products.")
    enable_layerwise_nvtx_marker: bool = beta(False, "Mark layers for a profiler.")
    layer_wise_benchmarks_config: LayerwiseBenchmarksConfig = prototype(
        LayerwiseBenchmarksConfig, "Layer measurements."
    )

    # Sampling and decoding
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = stable(
        None, "Library for constrained decoding; null turns it off."
    )
    batched_logits_processor: Any = stable(None, "An object that edits the logits of a whole batch.", python_only=True)
    speculative_config: AnySpeculativeConfig | None = stable(None, "Speculative decoding; null is off.")
    sparse_attention_config: SparseAttentionConfig | None = prototype(None, "Sparse attention; null follows the model.")
    kv_cache_compression_config: KvCacheCompressionConfig | None = prototype(None, "KV compression; null is off.")
    gather_generation_logits: bool = prototype(
        False, "Keep the logits of generated tokens for requests that want them."
    )
    enable_in_graph_sampling: bool = prototype(False, "Sample inside the captured step.")
    sampler_force_async_worker: bool = prototype(False, "Always copy sampled tokens on a thread of its own.")
    enable_speculative_beam_history_d2h: bool = prototype(False, "Copy beam histories before they are needed.")
    enable_return_routed_experts: bool = beta(False, "Let requests ask for the experts of each token.")
    reasoning_parser: str | None = prototype(None, "Parser that splits thinking from the answer, or auto.")
    decoding_config: Any = deprecated(None, "Ignored.")
    sampler_type: str | None = deprecated(None, "Ignored: there is one sampler.")

    # KV cache, transfer, adapters
    kv_cache_config: KvCacheConfig = stable(KvCacheConfig, "The KV cache.")
    kv_connector_config: KvCacheConnectorConfig | None = prototype(None, "An external block store; null is none.")
    cache_transceiver_config: CacheTransceiverConfig | None = prototype(
        None, "KV transfer between servers; null is off."
    )
    enable_lora: bool = stable(False, "Accept LoRA adapters.")
    lora_config: LoraConfig | None = stable(None, "Which adapters may be used.")
    peft_cache_config: PeftCacheConfig | None = prototype(None, "Cache of adapter weights.")
    multimodal_config: MultimodalConfig = prototype(
        MultimodalConfig, "Inputs of other modalities; null is the default."
    )
    sleep_config: SleepConfig | None = prototype(None, "What happens to memory while the engine sleeps.")

    # Serving and observability
    num_postprocess_workers: int = prototype(0, "Processes that turn ids into text: as many HTTP processes.", ge=0)
    postprocess_tokenizer_dir: str | None = prototype(None, "Tokenizer folder of those processes.")
    num_serve_frontends: int = prototype(1, "HTTP processes that share the port.", ge=1, le=64)
    iter_stats_max_iterations: int | None = prototype(
        None, "Step statistics kept for readers; -1 is all, null is max_stats_len.", ge=-1
    )
    request_stats_max_iterations: int | None = prototype(None, "The same for per-request statistics.", ge=-1)
    max_stats_len: int = prototype(1000, "Statistics kept where nothing else is said; -1 is all, 0 counts as 1.", ge=-1)
    enable_iter_perf_stats: bool = prototype(False, "Collect statistics of steps.")
    enable_iter_req_stats: bool = prototype(False, "Collect statistics of requests in each step.")
    iter_perf_stats_interval: int = prototype(1, "Collect every so many steps.", gt=0)
    print_iter_log: bool = beta(False, "Log a line for each step.")
    return_perf_metrics: bool = prototype(False, "Measure each request and let clients ask for the figures.")
    perf_metrics_output_dir: str | None = prototype(None, "Folder for a JSON-lines file of request figures.")
    perf_metrics_max_requests: int = deprecated(0, "Has no effect.", ge=0)
    per_request_spec_decode_stats: bool = prototype(False, "Add figures of speculation to each choice.")
    prometheus_metrics_config: PrometheusMetricsConfig | None = prototype(None, "Buckets of histograms.")
    enable_energy_metrics: bool = prototype(False, "Measure the GPUs' energy.")
    otlp_traces_endpoint: str | None = prototype(None, "Address that OpenTelemetry traces are sent to.")
    garbage_collection_gen0_threshold: int = beta(20000, "Objects made before Python looks for garbage.", gt=0)
    env_overrides: dict[str, str] | None = prototype(None, "Environment variables to set before anything starts.")
    telemetry_config: TelemetryConfig = prototype(TelemetryConfig, "Usage data; Headrace collects none.")
    backend: Literal["pytorch"] = deprecated("pytorch", "There is one backend.")

    @field_validator(*NULL_RESETS, mode="before")
    @classmethod
    def _null_is_default(cls, value: Any, info: Any) -> Any:
        return default_of(cls, info.field_name) if value is None else value

    @field_validator("multimodal_config", mode="before")
    @classmethod
    def _null_is_default_object(cls, value: Any) -> Any:
        return MultimodalConfig() if value is None else value

    @field_validator("model", mode="before")
    @classmethod
    def _model_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("tokenizer", mode="before")
    @classmethod
    def _tokenizer_is_usable(cls, value: Any) -> Any:
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, (int, float, list, dict)):
            raise ValueError("expected a folder, a hub id or a tokenizer object")
        return value  # pyright: ignore[reportUnknownVariableType]

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_spelling(cls, value: Any) -> Any:
        return dtype_name(value)

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in (*COMPUTE_DTYPES, *QUANTISED_DTYPES):
            raise ValueError(f"must be one of {', '.join(COMPUTE_DTYPES)}, got '{value}'")
        return value

    @field_validator("load_format", mode="before")
    @classmethod
    def _load_format_number(cls, value: Any) -> Any:
        return load_format_of_number(value)

    @field_validator("moe_cluster_parallel_size", "moe_tensor_parallel_size", "moe_expert_parallel_size")
    @classmethod
    def _not_zero(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("must be greater than 0, or -1 for automatic")
        return value

    @field_validator("attn_backend")
    @classmethod
    def _known_attention(cls, value: str) -> str:
        if value.upper() not in ATTENTION_BACKENDS:
            raise ValueError(f"must be one of {', '.join(ATTENTION_BACKENDS)}, got '{value}'")
        return value.upper()

    @field_validator("speculative_config", mode="before")
    @classmethod
    def _spelling_of_kind(cls, value: Any) -> Any:
        return one_spelling_of_kind(value)

    @field_validator("sampler_type")
    @classmethod
    def _only_sampler(cls, value: str | None) -> str | None:
        if value is not None and value.lower() not in ("auto", "torchsampler"):
            raise ValueError(f"'{value}' no longer exists: remove the key")
        return value

    @field_validator("max_stats_len")
    @classmethod
    def _at_least_one(cls, value: int) -> int:
        return value or 1

    @field_validator("env_overrides", mode="before")
    @classmethod
    def _values_as_text(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        texts = {str(key): str(item) for key, item in cast("dict[Any, Any]", value).items()}
        hidden = [key for key, text in texts.items() if text == HIDDEN]
        if hidden:
            raise ValueError(f"{hidden[0]} was hidden when this was printed: write its value or remove it")
        for key, text in texts.items():
            if not key or "=" in key or "\0" in key + text:
                raise ValueError(f"{key!r}: no operating system has a variable of this name and value: remove it")
        return texts


TorchLlmArgs = LlmArgs
