"""Settings of how steps are computed: CUDA graphs, compilation, experts, products."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Discriminator, PositiveInt, Tag, field_validator, model_validator
from typing_extensions import Self

from headrace.config.base import Choice, ConfigModel, beta, deprecated, prototype
from headrace.config.errors import ConfigError, Problem

DEFAULT_CAPTURE_BATCH_SIZE = 128
"""Largest captured batch when nothing is said."""


def _sorted_unique(value: list[int] | None) -> list[int] | None:
    return None if value is None else sorted(set(value))


def _agree_on_largest(config: ConfigModel, list_name: str, max_name: str) -> None:
    """A list of sizes sets its maximum; one that was given as well has to be the same."""
    sizes = cast("list[int] | None", config.__dict__[list_name])
    if not sizes:
        return
    limit = cast(int, config.__dict__[max_name])
    if max_name in config.model_fields_set and limit not in (0, sizes[-1]):
        raise ConfigError(Problem(max_name, f"is {limit} but {list_name} end at {sizes[-1]}: keep one of them"))
    vars(config)[max_name] = sizes[-1]


class DecodeCudaGraphConfig(ConfigModel):
    """CUDA graphs of steps that only generate."""

    mode: Literal["decode"] = beta("decode", "Kind of steps that are captured.")
    batch_sizes: list[PositiveInt] | None = beta(
        None, "Batch sizes to capture; null makes a list up to max_batch_size."
    )
    max_batch_size: int = beta(0, "Largest batch to capture; 0 is 128 or the largest of batch_sizes.", ge=0)
    enable_padding: bool = beta(False, "Pad a batch up to the next captured size.")

    _order = field_validator("batch_sizes")(_sorted_unique)

    @model_validator(mode="after")
    def _largest(self) -> Self:
        _agree_on_largest(self, "batch_sizes", "max_batch_size")
        return self

    def capture_sizes(self) -> list[int]:
        """The batch sizes to capture, ascending; without padding every small size, with padding a sparser list."""
        if self.batch_sizes:
            return list(self.batch_sizes)
        limit = self.max_batch_size or DEFAULT_CAPTURE_BATCH_SIZE
        if self.enable_padding:
            sizes = [1, 2, 4, *range(8, 129, 8), *range(192, limit + 1, 64)]
        else:
            sizes = [*range(1, 32), *(2**power for power in range(5, limit.bit_length()))]
        return sorted({size for size in sizes if size <= limit} | {limit})


CudaGraphConfig = DecodeCudaGraphConfig


class EncodeCudaGraphConfig(ConfigModel):
    """CUDA graphs of encoders."""

    mode: Literal["encode"] = beta("encode", "Kind of steps that are captured.")
    batch_sizes: list[PositiveInt] | None = beta(None, "Batch sizes to capture.")
    max_batch_size: int = beta(0, "Largest batch to capture.", ge=0)
    num_tokens: list[PositiveInt] | None = beta(None, "Token counts to capture.")
    max_num_token: int = beta(0, "Largest token count to capture.", ge=0)
    seq_lens: list[PositiveInt] | None = beta(None, "Sequence lengths to capture.")
    max_seq_len: int = beta(0, "Longest sequence to capture.", ge=0)
    enable_padding: bool = beta(False, "Pad up to the next captured size.")

    _order = field_validator("batch_sizes", "num_tokens", "seq_lens")(_sorted_unique)

    @model_validator(mode="after")
    def _largest(self) -> Self:
        _agree_on_largest(self, "batch_sizes", "max_batch_size")
        _agree_on_largest(self, "num_tokens", "max_num_token")
        _agree_on_largest(self, "seq_lens", "max_seq_len")
        return self


def _graph_mode(value: Any) -> str:
    """`mode` where it is given; otherwise encode if a key of only that kind is there."""
    if isinstance(value, dict):
        keys = cast("dict[str, Any]", value)
        encode_only = EncodeCudaGraphConfig.model_fields.keys() - DecodeCudaGraphConfig.model_fields.keys()
        return str(keys.get("mode", "encode" if encode_only & keys.keys() else "decode"))
    return "encode" if isinstance(value, EncodeCudaGraphConfig) else "decode"


AnyCudaGraphConfig = Annotated[
    Annotated[DecodeCudaGraphConfig, Tag("decode")] | Annotated[EncodeCudaGraphConfig, Tag("encode")],
    Discriminator(_graph_mode),
]


class MultimodalEncoderCudaGraphConfig(ConfigModel):
    """CUDA graphs of one modality's encoder."""

    buckets: list[tuple[PositiveInt, PositiveInt]] = prototype(
        ..., "Pairs of total tokens and number of items to capture.", min_length=1
    )
    enable_padding: bool = prototype(True, "Pad up to the next bucket.")
    warmup_steps: int = prototype(2, "Runs before the capture.", ge=0)
    enable_replay_stats: bool = prototype(False, "Count which buckets are replayed.")


class TorchCompileConfig(ConfigModel):
    """torch.compile on the model."""

    enable_fullgraph: bool = prototype(True, "Refuse graph breaks.")
    enable_inductor: bool = prototype(False, "Generate code with Inductor.")
    enable_piecewise_cuda_graph: bool = deprecated(False, "Use prefill_cuda_graph_backend: piecewise.")
    capture_num_tokens: list[PositiveInt] | None = deprecated(None, "Use prefill_capture_num_tokens.")
    enable_userbuffers: bool = prototype(True, "Register communication buffers once.")
    max_num_streams: int = prototype(3, "Streams that compiled code may use.", ge=1)

    _order = field_validator("capture_num_tokens")(_sorted_unique)


class MoeBackend(Choice):
    """Kernels of the experts layer."""

    AUTO = "AUTO"
    CUTLASS = "CUTLASS"
    CUTEDSL = "CUTEDSL"
    CUTEDSL_FC12 = "CUTEDSL_FC12"
    TRTLLM = "TRTLLM"
    DEEPGEMM = "DEEPGEMM"
    DENSEGEMM = "DENSEGEMM"
    VANILLA = "VANILLA"
    TRITON = "TRITON"
    MARLIN = "MARLIN"
    MEGAMOE_DEEPGEMM = "MEGAMOE_DEEPGEMM"
    MEGAMOE_CUTEDSL = "MEGAMOE_CUTEDSL"


class MoeLoadBalancerConfig(ConfigModel):
    """Placement of experts, with copies of the busy ones."""

    num_slots: int | None = prototype(None, "Places for experts over all ranks; a multiple of the EP size.", gt=0)
    initial_global_assignments: dict[int, list[int]] | None = prototype(
        None, "Expert in each place, by layer; a repeated id is a copy."
    )
    layer_updates_per_iter: int = prototype(0, "Layers whose placement is updated in a step; 0 keeps it.", ge=0)

    @model_validator(mode="after")
    def _one_expert_a_slot(self) -> Self:
        for layer, experts in (self.initial_global_assignments or {}).items():
            if self.num_slots is not None and len(experts) != self.num_slots:
                message = f"names {len(experts)} experts for {self.num_slots} slots"
                raise ConfigError(Problem(f"initial_global_assignments.{layer}", message))
        return self


def _file_or_mapping(value: Any) -> str:
    return "str" if isinstance(value, (str, Path)) else "MoeLoadBalancerConfig"


class MoeConfig(ConfigModel):
    """The experts layers."""

    backend: MoeBackend = beta(MoeBackend.AUTO, "Kernels to use; AUTO picks by GPU and quantisation.")
    max_num_tokens: int | None = beta(None, "Most tokens an experts layer takes at once; more are split.", gt=0)
    load_balancer: (
        Annotated[
            Annotated[MoeLoadBalancerConfig, Tag("MoeLoadBalancerConfig")] | Annotated[str, Tag("str")],
            Discriminator(_file_or_mapping),
        ]
        | None
    ) = beta(None, "Placement of experts, or a YAML file that holds it.")
    disable_finalize_fusion: bool = beta(False, "Keep the last sum over experts out of the product's kernel.")
    use_low_precision_moe_combine: bool = beta(False, "Send expert outputs in fewer bits.")

    @field_validator("load_balancer", mode="before")
    @classmethod
    def _path_as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value


Nvfp4Backend = Literal["cutlass", "cublaslt", "cutedsl", "cuda_core", "marlin"]


class Nvfp4GemmConfig(ConfigModel):
    """Products with NVFP4 weights."""

    allowed_backends: list[Nvfp4Backend] = beta(
        ["cutlass", "cublaslt", "cuda_core"], "Kernels that may be tried.", min_length=1
    )


class LayerwiseBenchmarksConfig(ConfigModel):
    """Recording of a run for measurements of single layers."""

    calibration_mode: Literal["NONE", "MARK", "COLLECT"] = prototype("NONE", "What is recorded.")
    calibration_file_path: str | None = prototype(None, "File that COLLECT writes.")
    calibration_layer_indices: list[int] | None = prototype(None, "Layers to record; null is all.")

    @model_validator(mode="after")
    def _collect_needs_a_file(self) -> Self:
        if self.calibration_mode == "COLLECT" and not self.calibration_file_path:
            raise ConfigError(Problem("calibration_file_path", "required when calibration_mode is COLLECT"))
        return self


class ExtendedRuntimePerfKnobConfig(ConfigModel):
    """Switches of built engines; kept so that old scripts can construct it."""

    multi_block_mode: bool = deprecated(True, "Split long contexts over several thread blocks.")
    enable_context_fmha_fp32_acc: bool = deprecated(False, "Add up prefill attention in 32 bits.")
    cuda_graph_mode: bool = deprecated(False, "Use CUDA graphs.")
    cuda_graph_cache_size: int = deprecated(0, "Graphs that are kept.", ge=0)
