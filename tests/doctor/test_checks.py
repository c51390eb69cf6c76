"""Every check with facts that are made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.config.llm_args import LlmArgs
from headrace.doctor.checks import CHECKS, examine
from headrace.doctor.facts import (
    Address,
    Compiler,
    Driver,
    Facts,
    Folder,
    Gpu,
    Limits,
    Memory,
    Processor,
    TorchBuild,
)
from headrace.doctor.finding import Finding
from headrace.doctor.report import as_dict, as_text, is_healthy
from headrace.doctor.requirements import is_met, read, version_of

GIB = 1 << 30
H100 = Gpu(0, "H100", 80 * GIB, 79 * GIB, (9, 0), 5, 16, 0, False, True)
FACTS = Facts(
    python=(3, 11, 7),
    libraries={"headrace": "0.1.0", "torch": "2.13.0", "triton": "3.7.1"},
    requirements=(*read("headrace", ["torch>=2.11"]), *read("torch", ["triton==3.7.1; platform_system == 'Linux'"])),
    torch=TorchBuild("2.13.0", "13.0", ("sm_80", "sm_90", "compute_90"), True),
    driver=Driver("580.1", "13.0"),
    gpus=(H100,),
    has_gpu_hardware=True,
    memory=Memory(128 * GIB, 100 * GIB, 0, 8 * GIB),
    processor=Processor("CPU", "x86_64", frozenset({"avx2"}), 16, 16.0),
    limits=Limits(65_536, 65_536),
    folders=(Folder("compiled Triton kernels", "TRITON_CACHE_DIR", "/t", True, 9 * GIB, "ext4"),),
    address=Address("localhost", 8000),
    compiler=Compiler("/usr/bin/cc", True),
    variables={"PYTORCH_ALLOC_CONF": "max_split_size_mb:8192"},
)
TWO = {"tensor_parallel_size": 2}


def gpu(**changes: Any) -> dict[str, Any]:
    return {"gpus": (replace(H100, **changes),)}


def folder(**changes: Any) -> dict[str, Any]:
    return {"folders": (replace(FACTS.folders[0], **changes),)}


def found(args: LlmArgs, **changes: Any) -> list[Finding]:
    facts = replace(FACTS, **changes)
    return [finding for check in CHECKS for finding in check(facts, args)]


def test_a_machine_without_faults_has_no_findings() -> None:
    findings = found(LlmArgs(model="m"))
    assert {finding.level for finding in findings} == {"ok"}, findings
    assert is_healthy(findings) and as_text(findings).endswith("nothing to mend")


@pytest.mark.parametrize(
    ("check", "level", "changes", "settings"),
    [
        ("gpu.driver", "problem", {"driver": None, "gpus": ()}, {}),
        ("gpu.driver", "problem", {"driver": Driver("550.1", "12.4")}, {}),
        ("gpu.driver_minor", "warning", {"torch": replace(FACTS.torch, cuda="13.2")}, {}),
        ("gpu.build", "problem", {"torch": TorchBuild("2.13.0+cpu")}, {}),
        ("gpu.build", "problem", {"variables": {"CUDA_VISIBLE_DEVICES": ""}}, {}),
        ("gpu.build", "problem", {"torch": replace(FACTS.torch, sees_gpu=False)}, {}),
        ("gpu.memory", "warning", gpu(free_bytes=40 * GIB), {}),
        ("gpu.generation", "problem", gpu(capability=(7, 5)), {}),
        ("gpu.generation", "problem", {"torch": replace(FACTS.torch, arches=("sm_80",))}, {}),
        ("gpu.fp8", "note", gpu(capability=(8, 0)), {}),
        ("gpu.errors", "problem", gpu(uncorrected_errors=3), {}),
        ("gpu.throttled", "warning", gpu(is_throttled=True), {}),
        ("gpu.persistence", "note", gpu(is_persistent=False), {}),
        ("gpu.partitioned", "note", gpu(is_partitioned=True), {}),
        ("gpu.host_link", "warning", gpu(link_gen=3), {"kv_cache_config": {"host_cache_size": GIB}}),
        ("gpu.count", "problem", {}, TWO),
        ("gpu.mixed", "warning", {"gpus": (H100, replace(H100, index=1, name="A100"))}, TWO),
        ("system.memory", "problem", {"memory": Memory(4 * GIB, GIB, 0, GIB)}, {}),
        ("system.swap", "warning", {"memory": Memory(128 * GIB, 64 * GIB, 4 * GIB, GIB)}, {}),
        ("system.shared_memory", "problem", {"memory": Memory(128 * GIB, 64 * GIB, 0, 64 << 20)}, TWO),
        ("system.open_files", "warning", {"limits": Limits(1024, 65_536)}, {}),
        ("system.processes", "warning", {"limits": Limits(65_536, 65_536, 100)}, {}),
        ("system.vectors", "warning", {"processor": replace(FACTS.processor, features=frozenset({"sse2"}))}, {}),
        ("system.cores", "warning", {"processor": replace(FACTS.processor, num_usable=1.0)}, {}),
        ("system.load", "note", {"processor": replace(FACTS.processor, load=12.5)}, {}),
        ("system.numa", "note", {"processor": replace(FACTS.processor, num_nodes=2, num_allowed_nodes=2)}, {}),
        ("system.governor", "note", {"processor": replace(FACTS.processor, governor="powersave")}, {}),
        ("folders.writable", "warning", folder(is_writable=False), {}),
        ("folders.space", "warning", folder(free_bytes=5), {}),
        ("folders.noexec", "problem", folder(runs_code=False), {}),
        ("folders.shared", "warning", folder(file_system="nfs4"), {}),
        ("folders.shared", "problem", folder(file_system="nfs4"), TWO),
        ("folders.network", "note", folder(file_system="nfs4", variable="HF_HOME"), {}),
        ("network.port", "problem", {"address": Address("localhost", 8000, "Address already in use")}, {}),
        ("network.name", "warning", {"knows_its_name": False}, TWO),
        ("network.proxy", "note", {"variables": {"http_proxy": "http://p"}}, {}),
        ("software.python", "problem", {"python": (3, 9, 1)}, {}),
        ("software.python", "note", {"python": (3, 13, 0)}, {}),
        ("software.torch", "problem", {"torch": TorchBuild("", error="ImportError: no")}, {}),
        ("software.torch", "note", {"torch": replace(FACTS.torch, version="2.14.0")}, {}),
        ("software.missing", "problem", {"libraries": {"triton": "3.7.1"}}, {}),
        ("software.bounds", "problem", {"libraries": {"torch": "2.10.0", "triton": "3.7.1"}}, {}),
        ("software.bounds", "warning", {"libraries": {"torch": "2.13.0", "triton": "3.6.0"}}, {}),
        ("software.triton", "problem", {"libraries": {"torch": "2.13.0"}}, {}),
        ("software.triton", "problem", {"variables": {"TRITON_INTERPRET": "1"}}, {}),
        ("software.xgrammar", "problem", {}, {"guided_decoding_backend": "xgrammar"}),
        ("software.transformers", "problem", {}, {"model_impl": "transformers"}),
        ("software.compiler", "problem", {"compiler": Compiler("", True)}, {}),
        ("software.compiler", "problem", {"compiler": Compiler("/usr/bin/cc", False)}, {}),
        ("software.native", "note", {"compiler": Compiler("/usr/bin/cc", True, "cc failed")}, {}),
        ("software.variables", "warning", {"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, {}),
        ("software.allocator", "note", {"variables": {}}, {}),
    ],
)
def test_a_fault_is_found(check: str, level: str, changes: dict[str, Any], settings: dict[str, Any]) -> None:
    findings = found(LlmArgs(model="m", **settings), **changes)
    mine = [finding for finding in findings if finding.check == check and finding.level == level]
    assert mine, findings
    assert mine[0].remedy
    assert is_healthy(findings) == all(finding.level != "problem" for finding in findings)


def test_backends_on_a_machine_without_a_gpu() -> None:
    facts = replace(FACTS, gpus=(), driver=None, has_gpu_hardware=False, torch=TorchBuild("2.13.0+cpu"))
    by_name = {finding.check: finding.message for finding in examine(facts, LlmArgs(model="m"))}
    assert by_name["backends.device"].startswith("the CPU")
    assert by_name["backends.attention"].startswith("cpu:")
    assert by_name["backends.graphs"].startswith("none")


def attention(facts: Facts, wanted: str) -> Finding:
    findings = examine(facts, LlmArgs(model="m", attn_backend=wanted))
    (mine,) = (finding for finding in findings if finding.check == "backends.attention")
    return mine


def test_attention_on_a_gpu() -> None:
    facts = replace(FACTS, libraries={**FACTS.libraries, "flashinfer-python": "0.7.4"})
    for wanted, begin in (("TRTLLM", "triton:"), ("AUTO", "triton:"), ("FLASHINFER", "flashinfer:")):
        message = attention(facts, wanted).message
        assert message.startswith(begin) and f"attn_backend: {wanted}" in message


def test_flashinfer_that_is_not_there() -> None:
    missing = attention(FACTS, "FLASHINFER")
    assert missing.level == "problem" and "headrace[flashinfer]" in missing.remedy
    without = replace(FACTS, gpus=(), driver=None, has_gpu_hardware=False, torch=TorchBuild("2.13.0+cpu"))
    refused = attention(without, "FLASHINFER")
    assert (refused.level, refused.remedy) == ("problem", "attn_backend: AUTO")


def test_the_report_for_machines() -> None:
    report = as_dict(found(LlmArgs(model="m"), address=Address("localhost", 1, "taken")), model="m")
    assert not report["ok"] and report["counts"]["problem"] == 1
    assert any(finding["check"] == "network.port" and finding["remedy"] for finding in report["findings"])


def test_versions_and_bounds() -> None:
    assert version_of("2.13.0+cpu") == (2, 13, 0) and version_of("1.4.0rc2") == (1, 4, 0)
    (one,) = read("headrace", ["transformers>=5.24,<6 ; extra == 'transformers'"])
    assert one.is_optional and is_met(one, "5.24.1") and not is_met(one, "6.0") and not is_met(one, "5.9")
