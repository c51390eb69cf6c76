"""What `attn_backend` comes to: refusals by name, and what AUTO makes of rules."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace import plugins
from headrace.attention._flashinfer_rules import Rule
from headrace.attention._latent import LatentSpec
from headrace.attention.port import AttentionSpec, CacheSpec
from headrace.engine.backends import Backends, implementation_of, open_backends
from headrace.engine.groups import Reach
from headrace.kernels.quantise import FP8
from tests.kits.interpreter import HAS_INTERPRETER

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128, scale=1.0)
RULES = (Rule((9, 0), 128, is_kv_fp8=False, min_query=2048),)
NEEDS_TRITON = pytest.mark.skipif(not HAS_INTERPRETER, reason="loads the Triton backend")


@dataclass
class FakeLayer:
    spec: CacheSpec | None


def opened(wanted: str, specs: Sequence[CacheSpec | None], *, device: torch.device = CUDA, **settings: Any) -> Backends:
    half = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "block_size": 32}
    layers: Any = [FakeLayer(spec) for spec in specs]
    return open_backends(wanted, layers, device=device, **{**half, **settings})


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """With the package, on a Hopper GPU; what was compiled."""
    from headrace.attention.flashinfer import FlashInferAttention

    found: list[Any] = []
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(FlashInferAttention, "prepare", lambda self, specs, **kwargs: found.extend(specs))
    return found


class FakeRecurrent(FakeLayer):
    """Has what makes a layer a recurrent one."""

    state: Any = None

    def before(self, partial: Any, residual: Any, step: Any) -> Any: ...
    def mix(self, mixer_input: Any, mixer: Any) -> Any: ...
    def after(self, mixed: Any, residual: Any) -> Any: ...


def kind(backends: Backends) -> str:
    return type(backends.of("heads")).__name__


@pytest.mark.parametrize("wanted", ["AUTO", "TRTLLM", "VANILLA", "INKLING"])
def test_names_of_tensorrt_llm_mean_our_own(wanted: str) -> None:
    ours = "torch" if wanted == "VANILLA" else "triton"
    assert (implementation_of(wanted, CUDA), implementation_of(wanted, CPU)) == (ours, ours.replace("triton", "cpu"))
    assert kind(opened(wanted, [SPEC], device=CPU)) == ("TorchAttention" if wanted == "VANILLA" else "CpuAttention")


def test_flashinfer_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match=r"^attn_backend FLASHINFER needs an NVIDIA GPU.*set it to AUTO$"):
        opened("FLASHINFER", [SPEC], device=CPU)


def test_a_package_of_kernels_that_is_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setenv("HEADRACE_FLA", "always")
    layers: Any = [FakeLayer(SPEC), FakeRecurrent(None)]
    half: dict[str, Any] = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16, "block_size": 32}
    with pytest.raises(ValueError, match=r"HEADRACE_FLA.*pip install 'headrace\[fla\]'"):
        open_backends("TRTLLM", layers, device=CUDA, **half)
    assert kind(open_backends("TRTLLM", layers, device=CPU, **half)) == "CpuAttention"


LATENT = LatentSpec(num_heads=4, rank=64, rope_dim=16, nope_dim=32, v_dim=32, scale=1.0)


@pytest.mark.parametrize(
    ("specs", "settings", "names"),
    [
        ([SPEC, replace(SPEC, sinks=torch.zeros(4))], {}, "attention sinks, as layer 1 has"),
        ([None, replace(SPEC, head_dim=80)], {}, r"heads of 80 features .*, as layer 1 has"),
        ([replace(SPEC, window=8)], {"reach": Reach((4,), 64, 2)}, r"sink_token_length\), as layer 0 has"),
        ([LATENT], {}, "attention of the kind latent"),
        ([SPEC], {"dtype": torch.float32, "kv_dtype": torch.float32}, "float32"),
    ],
)
def test_what_flashinfer_cannot_compute_is_refused(specs: Any, settings: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=rf"^attn_backend FLASHINFER can't compute .*{names}.*: set it to AUTO$"):
        opened("FLASHINFER", specs, **settings)


@NEEDS_TRITON
def test_flashinfer_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ValueError, match=r"headrace\[flashinfer\]"):
        opened("FLASHINFER", [SPEC])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert kind(opened("AUTO", [SPEC], rules=RULES)) == "TritonAttention"


@NEEDS_TRITON
def test_flashinfer_prepares_every_layer(prepared: list[Any]) -> None:
    windowed = replace(SPEC, window=64)
    backends = opened("FLASHINFER", [SPEC, None, windowed], kv_dtype=FP8)
    assert kind(backends) == "FlashInferAttention" and prepared == [SPEC, windowed]
    assert type(backends.of("latent")) is plugins.load("attention", "latent_triton")


@NEEDS_TRITON
@pytest.mark.usefixtures("prepared")
def test_auto_goes_by_rules() -> None:
    assert kind(opened("AUTO", [SPEC], rules=RULES)) == "FlashInferAttention"
    assert kind(opened("AUTO", [replace(SPEC, head_dim=64), SPEC], rules=RULES)) == "FlashInferAttention"
    for specs, settings in (
        ([replace(SPEC, head_dim=64)], {}),
        ([replace(SPEC, sinks=torch.zeros(4))], {}),
        ([SPEC], {"kv_dtype": FP8}),
        ([SPEC], {"rules": ()}),
    ):
        assert kind(opened("AUTO", specs, **{"rules": RULES, **settings})) == "TritonAttention"
    assert kind(opened("TRTLLM", [SPEC], rules=RULES)) == "TritonAttention"
    assert kind(opened("AUTO", [SPEC], rules=RULES, is_fixed=True)) == "FixedAttention"
