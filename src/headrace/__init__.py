"""Headrace serves large language models: `headrace serve MODEL`, or `from headrace import LLM`.

Every public name is imported on first use, so `import headrace` is quick and brings no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config import *  # noqa: F403
    from headrace.llm import *  # noqa: F403
    from headrace.params import *  # noqa: F403

__version__ = "0.1.0"

_MODULES = {
    "llm": ("LLM", "CompletionOutput", "Logprob", "RequestError", "RequestOutput"),
    "params": (
        "ConversationParams",
        "DisaggregatedParams",
        "GuidedDecodingParams",
        "KvCacheRetentionConfig",
        "LoRARequest",
        "SamplingParams",
        "SchedulingParams",
    ),
    "config": (
        "AttentionDpConfig",
        "AutoDecodingConfig",
        "BatchingType",
        "BlockReuseConfig",
        "CacheTransceiverConfig",
        "CalibConfig",
        "CapacitySchedulerPolicy",
        "ContextChunkingPolicy",
        "CpConfig",
        "CudaGraphConfig",
        "DFlashDecodingConfig",
        "DecodeCudaGraphConfig",
        "DeepSeekSparseAttentionConfig",
        "DeepSeekV4SparseAttentionConfig",
        "DraftTargetDecodingConfig",
        "DynamicBatchConfig",
        "Eagle3DecodingConfig",
        "EagleDecodingConfig",
        "EncodeCudaGraphConfig",
        "ExtendedRuntimePerfKnobConfig",
        "KvCacheConfig",
        "KvCacheConnectorConfig",
        "LlmArgs",
        "LoadFormat",
        "LoraConfig",
        "MTPDecodingConfig",
        "MambaStateConfig",
        "MiniMaxM3SparseAttentionConfig",
        "MoeConfig",
        "MoeLoadBalancerConfig",
        "MultimodalConfig",
        "NGramDecodingConfig",
        "Nvfp4GemmConfig",
        "PARDDecodingConfig",
        "PeftCacheConfig",
        "PrometheusMetricsConfig",
        "QuantAlgo",
        "QuantConfig",
        "RayPlacementConfig",
        "ReorderRequestPolicyConfig",
        "RocketSparseAttentionConfig",
        "SADecodingConfig",
        "SaveHiddenStatesDecodingConfig",
        "SchedulerConfig",
        "SkipSoftmaxAttentionConfig",
        "SleepConfig",
        "TelemetryConfig",
        "TorchCompileConfig",
        "TorchLlmArgs",
        "UserProvidedDecodingConfig",
        "WaitingQueuePolicy",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"headrace.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
