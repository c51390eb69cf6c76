"""Configuration: a class for every group of settings, and `resolve()` that makes one checked, frozen result of them.

Names are imported on first use, so that a module which needs one class does not pay for all.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.config.disagg import ConditionalDisaggConfig as ConditionalDisaggConfig
    from headrace.config.disagg import DisaggConfig as DisaggConfig
    from headrace.config.disagg import MetadataServerConfig as MetadataServerConfig
    from headrace.config.disagg import OtlpConfig as OtlpConfig
    from headrace.config.disagg import RouterConfig as RouterConfig
    from headrace.config.disagg import ServerGroupConfig as ServerGroupConfig
    from headrace.config.disagg import load_disagg as load_disagg
    from headrace.config.errors import ConfigError as ConfigError
    from headrace.config.errors import Problem as Problem
    from headrace.config.kernels import CudaGraphConfig as CudaGraphConfig
    from headrace.config.kernels import DecodeCudaGraphConfig as DecodeCudaGraphConfig
    from headrace.config.kernels import EncodeCudaGraphConfig as EncodeCudaGraphConfig
    from headrace.config.kernels import ExtendedRuntimePerfKnobConfig as ExtendedRuntimePerfKnobConfig
    from headrace.config.kernels import LayerwiseBenchmarksConfig as LayerwiseBenchmarksConfig
    from headrace.config.kernels import MoeBackend as MoeBackend
    from headrace.config.kernels import MoeConfig as MoeConfig
    from headrace.config.kernels import MoeLoadBalancerConfig as MoeLoadBalancerConfig
    from headrace.config.kernels import MultimodalEncoderCudaGraphConfig as MultimodalEncoderCudaGraphConfig
    from headrace.config.kernels import Nvfp4GemmConfig as Nvfp4GemmConfig
    from headrace.config.kernels import TorchCompileConfig as TorchCompileConfig
    from headrace.config.kv import BlockReuseConfig as BlockReuseConfig
    from headrace.config.kv import KvCacheConfig as KvCacheConfig
    from headrace.config.kv import KvCacheRetentionConfig as KvCacheRetentionConfig
    from headrace.config.kv import KVEventsConfig as KVEventsConfig
    from headrace.config.kv import MambaStateConfig as MambaStateConfig
    from headrace.config.kv import TokenRangeRetentionConfig as TokenRangeRetentionConfig
    from headrace.config.llm_args import LlmArgs as LlmArgs
    from headrace.config.llm_args import TorchLlmArgs as TorchLlmArgs
    from headrace.config.lora import LoraConfig as LoraConfig
    from headrace.config.lora import PeftCacheConfig as PeftCacheConfig
    from headrace.config.model import CalibConfig as CalibConfig
    from headrace.config.model import GmsConfig as GmsConfig
    from headrace.config.model import GuidedDecodingConfig as GuidedDecodingConfig
    from headrace.config.model import LoadFormat as LoadFormat
    from headrace.config.model import ModelExpressConfig as ModelExpressConfig
    from headrace.config.model import QuantAlgo as QuantAlgo
    from headrace.config.model import QuantConfig as QuantConfig
    from headrace.config.multimodal import MultimodalConfig as MultimodalConfig
    from headrace.config.parallel import AllReduceStrategy as AllReduceStrategy
    from headrace.config.parallel import AttentionDpConfig as AttentionDpConfig
    from headrace.config.parallel import CpConfig as CpConfig
    from headrace.config.parallel import DwdpConfig as DwdpConfig
    from headrace.config.parallel import RayPlacementConfig as RayPlacementConfig
    from headrace.config.resolution import Resolved as Resolved
    from headrace.config.resolution import resolve as resolve
    from headrace.config.scheduling import AgentTreeConfig as AgentTreeConfig
    from headrace.config.scheduling import BatchingType as BatchingType
    from headrace.config.scheduling import CapacitySchedulerPolicy as CapacitySchedulerPolicy
    from headrace.config.scheduling import ContextChunkingPolicy as ContextChunkingPolicy
    from headrace.config.scheduling import DynamicBatchConfig as DynamicBatchConfig
    from headrace.config.scheduling import ReorderRequestPolicyConfig as ReorderRequestPolicyConfig
    from headrace.config.scheduling import SchedulerConfig as SchedulerConfig
    from headrace.config.scheduling import WaitingQueuePolicy as WaitingQueuePolicy
    from headrace.config.serving import DisaggClusterConfig as DisaggClusterConfig
    from headrace.config.serving import MinimalInstances as MinimalInstances
    from headrace.config.serving import PrometheusMetricsConfig as PrometheusMetricsConfig
    from headrace.config.serving import ServerOptions as ServerOptions
    from headrace.config.serving import SleepConfig as SleepConfig
    from headrace.config.serving import TelemetryConfig as TelemetryConfig
    from headrace.config.sparse import DeepSeekSparseAttentionConfig as DeepSeekSparseAttentionConfig
    from headrace.config.sparse import DeepSeekV4SparseAttentionConfig as DeepSeekV4SparseAttentionConfig
    from headrace.config.sparse import MiniMaxM3SparseAttentionConfig as MiniMaxM3SparseAttentionConfig
    from headrace.config.sparse import QsaSparseAttentionConfig as QsaSparseAttentionConfig
    from headrace.config.sparse import RocketSparseAttentionConfig as RocketSparseAttentionConfig
    from headrace.config.sparse import SkipSoftmaxAttentionConfig as SkipSoftmaxAttentionConfig
    from headrace.config.speculative import AutoDecodingConfig as AutoDecodingConfig
    from headrace.config.speculative import DFlashDecodingConfig as DFlashDecodingConfig
    from headrace.config.speculative import DraftTargetDecodingConfig as DraftTargetDecodingConfig
    from headrace.config.speculative import DSparkDecodingConfig as DSparkDecodingConfig
    from headrace.config.speculative import Eagle3DecodingConfig as Eagle3DecodingConfig
    from headrace.config.speculative import EagleDecodingConfig as EagleDecodingConfig
    from headrace.config.speculative import MTPDecodingConfig as MTPDecodingConfig
    from headrace.config.speculative import NGramDecodingConfig as NGramDecodingConfig
    from headrace.config.speculative import PARDDecodingConfig as PARDDecodingConfig
    from headrace.config.speculative import SADecodingConfig as SADecodingConfig
    from headrace.config.speculative import SAEnhancerConfig as SAEnhancerConfig
    from headrace.config.speculative import SaveHiddenStatesDecodingConfig as SaveHiddenStatesDecodingConfig
    from headrace.config.speculative import UserProvidedDecodingConfig as UserProvidedDecodingConfig
    from headrace.config.transfer import CacheTransceiverConfig as CacheTransceiverConfig
    from headrace.config.transfer import ColdPageQuantConfig as ColdPageQuantConfig
    from headrace.config.transfer import KvCacheConnectorConfig as KvCacheConnectorConfig
    from headrace.config.transfer import TransceiverBackend as TransceiverBackend
    from headrace.config.transfer import TriAttentionConfig as TriAttentionConfig

_MODULES = {
    "errors": ("ConfigError", "Problem"),
    "llm_args": ("LlmArgs", "TorchLlmArgs"),
    "resolution": ("Resolved", "resolve"),
    "kv": (
        "BlockReuseConfig",
        "KVEventsConfig",
        "KvCacheConfig",
        "KvCacheRetentionConfig",
        "MambaStateConfig",
        "TokenRangeRetentionConfig",
    ),
    "scheduling": (
        "AgentTreeConfig",
        "BatchingType",
        "CapacitySchedulerPolicy",
        "ContextChunkingPolicy",
        "DynamicBatchConfig",
        "ReorderRequestPolicyConfig",
        "SchedulerConfig",
        "WaitingQueuePolicy",
    ),
    "kernels": (
        "CudaGraphConfig",
        "DecodeCudaGraphConfig",
        "EncodeCudaGraphConfig",
        "ExtendedRuntimePerfKnobConfig",
        "LayerwiseBenchmarksConfig",
        "MoeBackend",
        "MoeConfig",
        "MoeLoadBalancerConfig",
        "MultimodalEncoderCudaGraphConfig",
        "Nvfp4GemmConfig",
        "TorchCompileConfig",
    ),
    "parallel": ("AllReduceStrategy", "AttentionDpConfig", "CpConfig", "DwdpConfig", "RayPlacementConfig"),
    "model": (
        "CalibConfig",
        "GmsConfig",
        "GuidedDecodingConfig",
        "LoadFormat",
        "ModelExpressConfig",
        "QuantAlgo",
        "QuantConfig",
    ),
    "speculative": (
        "AutoDecodingConfig",
        "DFlashDecodingConfig",
        "DSparkDecodingConfig",
        "DraftTargetDecodingConfig",
        "Eagle3DecodingConfig",
        "EagleDecodingConfig",
        "MTPDecodingConfig",
        "NGramDecodingConfig",
        "PARDDecodingConfig",
        "SADecodingConfig",
        "SAEnhancerConfig",
        "SaveHiddenStatesDecodingConfig",
        "UserProvidedDecodingConfig",
    ),
    "sparse": (
        "DeepSeekSparseAttentionConfig",
        "DeepSeekV4SparseAttentionConfig",
        "MiniMaxM3SparseAttentionConfig",
        "QsaSparseAttentionConfig",
        "RocketSparseAttentionConfig",
        "SkipSoftmaxAttentionConfig",
    ),
    "transfer": (
        "CacheTransceiverConfig",
        "ColdPageQuantConfig",
        "KvCacheConnectorConfig",
        "TransceiverBackend",
        "TriAttentionConfig",
    ),
    "lora": ("LoraConfig", "PeftCacheConfig"),
    "multimodal": ("MultimodalConfig",),
    "serving": (
        "DisaggClusterConfig",
        "MinimalInstances",
        "PrometheusMetricsConfig",
        "ServerOptions",
        "SleepConfig",
        "TelemetryConfig",
    ),
    "disagg": (
        "ConditionalDisaggConfig",
        "DisaggConfig",
        "MetadataServerConfig",
        "OtlpConfig",
        "RouterConfig",
        "ServerGroupConfig",
        "load_disagg",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'headrace.config' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"headrace.config.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
