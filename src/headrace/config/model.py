"""Settings of where weights come from and in what form they are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from headrace.config.base import Choice, ConfigModel, deprecated, prototype, stable


class LoadFormat(Choice):
    """How weights are obtained."""

    AUTO = "auto"
    """From the checkpoint."""
    DUMMY = "dummy"
    """Random values of the right shapes, for measurements without a checkpoint."""
    VISION_ONLY = "vision_only"
    """Only the vision encoder of a multimodal checkpoint."""
    GMS = "gms"
    """Shared with other processes of the machine through a GPU memory service."""


_LOAD_FORMAT_NUMBERS = {0: LoadFormat.AUTO, 1: LoadFormat.DUMMY, 2: LoadFormat.VISION_ONLY, 3: LoadFormat.GMS}


def load_format_of_number(value: Any) -> Any:
    """A load format given by its old number; anything else unchanged."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _LOAD_FORMAT_NUMBERS.get(value, value)
    return value


class ModelExpressConfig(ConfigModel):
    """Weight transfer from a peer that already holds the model."""

    server_url: str | None = prototype(None, "Address of the server that knows the peers.")
    server_query_timeout_s: int | None = deprecated(None, "Seconds to wait for that server's answer.", gt=0)
    preshard_strategy: Literal["per_module"] = prototype("per_module", "How tensors are cut before they are sent.")


class GmsConfig(ConfigModel):
    """Weights shared by processes of one machine through a GPU memory service."""

    socket_path: str | None = prototype(None, "Unix socket of the service; null is its own default.")
    mode: Literal["auto", "rw", "ro"] = prototype("auto", "Write the weights, only read them, or whichever is needed.")
    tag: str = prototype("weights", "Name under which the weights are kept.", min_length=1)


class QuantAlgo(Choice):
    """Forms of weights (W) and activations (A) that checkpoints use."""

    W8A16 = "W8A16"
    W4A16 = "W4A16"
    W4A16_AWQ = "W4A16_AWQ"
    W4A8_AWQ = "W4A8_AWQ"
    W8A16_GPTQ = "W8A16_GPTQ"
    W4A16_GPTQ = "W4A16_GPTQ"
    W8A8_SQ_PER_CHANNEL = "W8A8_SQ_PER_CHANNEL"
    W8A8_SQ_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
    W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN = "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN"
    W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN = "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN"
    W4A8_QSERVE_PER_GROUP = "W4A8_QSERVE_PER_GROUP"
    W4A8_QSERVE_PER_CHANNEL = "W4A8_QSERVE_PER_CHANNEL"
    FP8 = "FP8"
    FP8_PER_CHANNEL_PER_TOKEN = "FP8_PER_CHANNEL_PER_TOKEN"
    FP8_BLOCK_SCALES = "FP8_BLOCK_SCALES"
    INT8 = "INT8"
    MIXED_PRECISION = "MIXED_PRECISION"
    NVFP4 = "NVFP4"
    NVFP4_AWQ = "NVFP4_AWQ"
    W4A8_NVFP4_FP8 = "W4A8_NVFP4_FP8"
    W4A8_MXFP4_FP8 = "W4A8_MXFP4_FP8"
    W4A8_MXFP4_MXFP8 = "W4A8_MXFP4_MXFP8"
    W4A16_MXFP4 = "W4A16_MXFP4"
    NO_QUANT = "NO_QUANT"


class QuantConfig(ConfigModel):
    """Quantisation as a checkpoint states it; read from its files, never from the server's configuration."""

    quant_algo: QuantAlgo | None = stable(None, "Form of the weights and activations.")
    kv_cache_quant_algo: Literal["FP8", "INT8", "NVFP4"] | None = stable(None, "Form of the KV cache.")
    group_size: int = stable(128, "Weights that share one scale.", gt=0)
    smoothquant_val: float = stable(0.5, "Smoothing exponent of SmoothQuant.", ge=0, le=1)
    clamp_val: list[float] | None = stable(None, "Lowest and highest activation before quantisation.", min_length=2)
    use_meta_recipe: bool = stable(False, "Rowwise scales as in Meta's FP8 checkpoints.")
    has_zero_point: bool = stable(False, "Weights have a zero point beside the scale.")
    pre_quant_scale: bool = stable(False, "Activations are scaled before quantisation.")
    exclude_modules: list[str] | None = stable(None, "Name patterns of modules that stay unquantised.")


class CalibConfig(ConfigModel):
    """Calibration of built engines; kept so that old scripts can construct it."""

    device: Literal["cuda", "cpu"] = deprecated("cuda", "Where calibration runs.")
    calib_dataset: str = deprecated("cnn_dailymail", "Data set to calibrate on.")
    calib_batches: int = deprecated(512, "Number of batches.", gt=0)
    calib_batch_size: int = deprecated(1, "Samples in a batch.", gt=0)
    calib_max_seq_length: int = deprecated(512, "Longest sample in tokens.", gt=0)
    random_seed: int = deprecated(1234, "Seed of the sample order.")
    tokenizer_max_seq_length: int = deprecated(2048, "Longest tokenised sample.", gt=0)


_DTYPES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"}


def dtype_name(value: Any) -> Any:
    """A dtype in one spelling: lower case, no `torch.` in front, no short forms."""
    if not isinstance(value, str):
        return value
    name = value.strip().lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


class GuidedDecodingConfig(ConfigModel):
    """What the engine needs for constrained decoding; filled in by the runtime, not by files."""

    backend: Literal["XGRAMMAR", "LLGUIDANCE"] = stable("XGRAMMAR", "Library that compiles grammars.")
    encoded_vocab: list[str] | None = stable(None, "Text of each token id.")
    tokenizer_str: str | None = stable(None, "The tokenizer, serialised.")
    stop_token_ids: list[int] | None = stable(None, "Ids that end a constrained text.")

    @field_validator("backend", mode="before")
    @classmethod
    def _upper(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value
