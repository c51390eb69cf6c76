"""flash-linear-attention's kernels behind the port: what the package is handed, and what comes back of it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import _fla
from headrace.kernels._fla import Rule, fla_delta_rule, takes
from headrace.kernels.delta_rule import delta_rule_twin
from tests.kits.interpreter import HAS_INTERPRETER
from tests.kits.recurrent import SLOTS, in_states, normal, step_of

HEADS, GROUPS, DIM, VALUES = 4, 2, 8, 6
HOPPER = (9, 0)


def case_of(num_tokens: int, *, by_feature: bool, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Packed as a layer's convolution leaves it, states as a pool holds them."""
    widths = (GROUPS * DIM, GROUPS * DIM, HEADS * VALUES)
    q, k, v = normal(num_tokens, sum(widths), seed=1).to(dtype).split(widths, 1)
    return {
        "q": q.unflatten(1, (GROUPS, DIM)),
        "k": k.unflatten(1, (GROUPS, DIM)),
        "v": v.unflatten(1, (HEADS, VALUES)),
        "decay": -normal(num_tokens, HEADS, DIM if by_feature else 1, seed=2).abs(),
        "beta": normal(num_tokens, HEADS, seed=3).sigmoid(),
        "state": in_states(normal(SLOTS, HEADS, DIM, VALUES, seed=4)),
    }


class FakePackage:
    """Stands in for fla-core 0.6: its arguments are checked as its functions check them, the values are our twin's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[dict[str, Any]] = []
        for place, name, by_feature in (
            ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", False),
            ("fla.ops.kda", "chunk_kda", True),
        ):
            module = ModuleType(place)
            setattr(module, name, self._function(by_feature))
            monkeypatch.setitem(sys.modules, place, module)
        for place in ("fla", "fla.ops"):
            monkeypatch.setitem(sys.modules, place, ModuleType(place))

    def _function(self, by_feature: bool) -> Any:
        def scan(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor,
            *,
            initial_state: Tensor,
            output_final_state: bool,
            use_qk_l2norm_in_kernel: bool,
            cu_seqlens: Tensor,
            cu_seqlens_cpu: Tensor,
        ) -> tuple[Tensor, Tensor]:
            self.calls.append({"starts": cu_seqlens, "starts_on_host": cu_seqlens_cpu, "by_feature": by_feature})
            one, num_tokens, heads, _ = v.shape
            assert one == 1 and q.shape == k.shape and q.shape[:2] == v.shape[:2]
            assert g.shape == ((1, num_tokens, heads, q.shape[3]) if by_feature else (1, num_tokens, heads))
            assert beta.shape == (1, num_tokens, heads) and output_final_state and use_qk_l2norm_in_kernel
            assert cu_seqlens.dtype == torch.int64 and cu_seqlens[-1] == num_tokens
            assert initial_state.dtype == torch.float32 and len(initial_state) == len(cu_seqlens) - 1
            states, lengths = initial_state.clone(), cu_seqlens_cpu.diff().tolist()
            step = step_of(lengths, len(lengths))
            step.slots = torch.arange(len(lengths))
            decay = g[0] if by_feature else g[0, ..., None]
            out = delta_rule_twin(q[0], k[0], v[0], decay=decay, beta=beta[0], state=states, step=step)
            return out.to(q.dtype)[None], states

        return scan


@pytest.mark.skipif(not HAS_INTERPRETER, reason="rows of one token need Triton and its interpreter")
@pytest.mark.parametrize("by_feature", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_prompts_and_single_tokens(by_feature: bool, state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, num_context = [5, 1, 70, 1, 1], 3
    case = case_of(sum(lengths), by_feature=by_feature)
    case["state"] = in_states(case["state"].to(state_dtype))
    twin = {part: tensor.clone() for part, tensor in case.items()}
    expected = delta_rule_twin(**twin, step=step_of(lengths, num_context))
    package = FakePackage(monkeypatch)
    got = fla_delta_rule(**case, step=step_of(lengths, num_context))
    assert [call["by_feature"] for call in package.calls] == [by_feature]
    assert package.calls[0]["starts"].tolist() == [0, 5, 6, 76]
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)  # the package yields bfloat16
    tolerance = 1e-5 if state_dtype == torch.float32 else 1e-2
    torch.testing.assert_close(case["state"], twin["state"], atol=tolerance, rtol=tolerance)


def test_layers_of_a_step_hand_over_the_same_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package keeps what it derives from them by identity, and asks the device for it otherwise."""
    package = FakePackage(monkeypatch)
    for _ in range(2):
        fla_delta_rule(**case_of(12, by_feature=False), step=step_of([5, 7], 2))
    first, second = package.calls
    assert first["starts"] is second["starts"] and first["starts_on_host"] is second["starts_on_host"]


def asked(dtype: torch.dtype = torch.bfloat16, *, rules: tuple[Rule, ...] = (), num_context: int = 1) -> bool:
    case = case_of(9, by_feature=False, dtype=dtype)
    return takes(case["q"], case["v"], case["decay"], step_of([8, 1], num_context), rules=rules)


def test_rules_choose_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_FLA", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    monkeypatch.setattr(_fla, "_is_usable", lambda: True)
    rule = Rule(HOPPER, by_feature=False, key_dim=DIM, min_tokens=8)
    assert asked(rules=(rule,))
    assert not asked()
    assert not asked(torch.float32, rules=(rule,))
    others = (
        Rule((8, 0), by_feature=False, key_dim=DIM, min_tokens=8),
        Rule(HOPPER, by_feature=True, key_dim=DIM, min_tokens=8),
        Rule(HOPPER, by_feature=False, key_dim=128, min_tokens=8),
        Rule(HOPPER, by_feature=False, key_dim=DIM, min_tokens=9),
    )
    assert not asked(rules=others)
    monkeypatch.setattr(_fla, "_is_usable", lambda: False)
    assert not asked(rules=(rule,))
    monkeypatch.setattr(_fla, "_is_usable", lambda: True)
    monkeypatch.setenv("HEADRACE_FLA", "never")
    assert not asked(rules=(rule,))


def test_always_needs_no_rule_but_prompts_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePackage(monkeypatch)
    monkeypatch.setenv("HEADRACE_FLA", "Always")
    assert asked() and asked(torch.float16)
    assert not asked(torch.float32)
    assert not asked(num_context=0)


def test_always_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setenv("HEADRACE_FLA", "always")
    for ask in (_fla.check, asked):
        with pytest.raises(ValueError, match=r"HEADRACE_FLA.*pip install 'headrace\[fla\]'"):
            ask()
    monkeypatch.setenv("HEADRACE_FLA", "auto")
    _fla.check()


def test_another_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_FLA", "yes")
    with pytest.raises(ValueError, match="HEADRACE_FLA must be auto, always or never, not 'yes'"):
        _fla.check()
