"""Settings of LoRA adapters and of the cache that holds them."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from headrace.config.base import ConfigModel, prototype, stable


class LoraConfig(ConfigModel):
    """Which adapters may be used and how much room they get."""

    lora_dir: list[str] = stable([], "Folders of adapters that are known at start.")
    lora_ckpt_source: Literal["hf", "nemo"] = stable("hf", "Form of the adapter files.")
    max_lora_rank: int = stable(64, "Largest rank an adapter may have.", gt=0)
    lora_target_modules: list[str] = stable([], "Modules that adapters change; empty with no lora_dir means all.")
    trtllm_modules_to_hf_modules: dict[str, str] = stable({}, "Names of our modules in the adapter files.")
    max_loras: int | None = stable(None, "Adapters held on the device at once.", gt=0)
    max_cpu_loras: int | None = stable(None, "Adapters held in host memory at once.", gt=0)
    swap_gate_up_proj_lora_b_weight: bool = stable(True, "Swap the halves of B where gate and up are fused.")
    overlap_lora_and_base: bool = stable(False, "Compute adapter and base products side by side.")
    cuda_graph_specialize_lora: bool = stable(False, "Capture graphs with and without adapters.")


class PeftCacheConfig(ConfigModel):
    """Cache of adapter weights."""

    num_host_module_layer: int = prototype(0, "Adapter layers of size 1 held on the host; 0 derives it.", ge=0)
    num_device_module_layer: int = prototype(0, "The same on the device.", ge=0)
    optimal_adapter_size: int = prototype(8, "Typical rank, to size pages.", gt=0)
    max_adapter_size: int = prototype(64, "Largest rank, to size pages.", gt=0)
    num_put_workers: int = prototype(1, "Threads that copy to the host cache.", gt=0)
    num_ensure_workers: int = prototype(1, "Threads that copy to the device cache.", gt=0)
    num_copy_streams: int = prototype(1, "Streams for those copies.", gt=0)
    max_pages_per_block_host: int = prototype(24, "Pages in a host block.", gt=0)
    max_pages_per_block_device: int = prototype(8, "Pages in a device block.", gt=0)
    device_cache_percent: float = prototype(0.02, "Share of free device memory for adapters.", ge=0, le=1)
    host_cache_size: int = prototype(1 << 30, "Bytes of host memory for adapters.", ge=0)
    lora_prefetch_dir: str | None = prototype(None, "Not supported; leave it unset.")

    @field_validator("lora_prefetch_dir")
    @classmethod
    def _must_be_unset(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("prefetching adapters from a folder is not supported: remove the key")
        return value
