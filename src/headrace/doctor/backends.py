"""Which kernels an engine would run here, and why: asked of the functions that choose them."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.kernels import DecodeCudaGraphConfig
from headrace.config.llm_args import LlmArgs
from headrace.doctor.facts import Facts
from headrace.doctor.finding import Finding

PRODUCTS = {
    "packed_bfloat16": "the compiled CPU product, in bfloat16",
    "packed_float32": "the compiled CPU product, in float32",
    "torch_float32": "torch in float32: neither this processor nor a compiled kernel multiplies 16-bit numbers",
    "torch": "torch",
}
ATTENTION = {
    "cpu": "the compiled CPU kernel",
    "triton": "Triton kernels",
    "fixed": "Triton kernels whose sums have one order",
    "flashinfer": "FlashInfer's kernels for long prompts, Triton's for the rest",
    "torch": "plain torch, slow and exact",
}

FLASHINFER = "flashinfer-python"


def device_type(facts: Facts) -> str:
    return "cuda" if facts.on_gpu else "cpu"


def device(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    if facts.on_gpu:
        yield Finding("backends.device", "ok", f"the GPU ({facts.gpus[0].name}): PyTorch sees it")
    else:
        why = "there is no NVIDIA GPU" if not facts.has_gpu_hardware else "PyTorch can't use the GPU (see gpu.*)"
        yield Finding("backends.device", "ok", f"the CPU: {why}")


def attention(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    import torch

    from headrace.engine.backends import implementation_of

    try:
        name = implementation_of(args.attn_backend, torch.device(device_type(facts)), is_fixed=args.deterministic)
    except ValueError as error:
        yield Finding("backends.attention", "problem", str(error), "attn_backend: AUTO")
        return
    installed = facts.libraries.get(FLASHINFER)
    if name == "flashinfer" and installed is None:
        text = f"attn_backend: FLASHINFER, and {FLASHINFER} is not installed"
        yield Finding("backends.attention", "problem", text, "pip install 'headrace[flashinfer]', or AUTO")
        return
    if args.deterministic:
        why = "deterministic: true"
    elif args.attn_backend == "VANILLA":
        why = "attn_backend: VANILLA"
    elif name == "flashinfer":
        why = f"attn_backend: FLASHINFER, version {installed}"
    elif name == "triton" and args.attn_backend == "AUTO":
        why = "attn_backend: AUTO, which goes by measurements: " + _measured(facts)
    else:
        why = f"attn_backend: {args.attn_backend} is the fastest one of a {'GPU' if facts.on_gpu else 'CPU'} here"
    text = ATTENTION.get(name, name)
    if name == "cpu" and facts.compiler.native_problem:
        text = "torch in place of the compiled CPU kernel, which is not there"
    yield Finding("backends.attention", "ok", f"{name}: {text}; {why}")


def _measured(facts: Facts) -> str:
    """What AUTO knows about the first GPU."""
    from headrace.engine.backends import RULES

    rules = [rule for rule in RULES if rule.capability == facts.gpus[0].capability]
    if not rules:
        return "none says that FlashInfer is faster on this GPU"
    if FLASHINFER not in facts.libraries:
        return "FlashInfer is faster for long prompts on this GPU (pip install 'headrace[flashinfer]')"
    least = min(rule.min_query for rule in rules)
    return f"FlashInfer takes prompts from {least} tokens on where a layer's heads and cache are among those measured"


def experts(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    """Trap: an experts backend that the checkpoint's form or the GPU does not have."""
    from headrace.layers.experts_backend import REFERENCE_BACKENDS, find_backend

    wanted = args.moe_config.backend.value
    if args.deterministic and facts.on_gpu:
        yield Finding("backends.experts", "ok", "fixed: deterministic: true")
        return
    try:
        found = find_backend(wanted, device_type(facts))
    except (ValueError, ImportError) as error:
        yield Finding("backends.experts", "problem", str(error), "moe_config.backend: AUTO")
        return
    name = type(found).__module__.rsplit(".", 1)[-1]
    if wanted in REFERENCE_BACKENDS:
        why = f"moe_config.backend: {wanted} names a kernel of TensorRT-LLM and means the fastest one here"
    else:
        why = f"moe_config.backend: {wanted}"
    yield Finding("backends.experts", "ok", f"{name}; {why}")


def products(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    import torch

    from headrace.quant.none import choose_product

    features = facts.processor.features
    found = {
        name: choose_product(dtype, device_type=device_type(facts), packs=not facts.compiler.native_problem,
                             features=features)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    }  # fmt: skip
    if facts.on_gpu:
        text = "torch and Triton: few rows are streamed by a Triton kernel, more go to the vendor's library"
    else:
        text = "; ".join(f"{name} weights: {PRODUCTS[product]}" for name, product in found.items())
    yield Finding("backends.products", "ok", text)


def graphs(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    config = args.cuda_graph_config
    if not facts.on_gpu:
        yield Finding("backends.graphs", "ok", "none: CUDA graphs are of GPUs")
    elif args.tensor_parallel_size > 1:
        yield Finding("backends.graphs", "ok", "none: they are captured on one rank so far")
    elif not isinstance(config, DecodeCudaGraphConfig):
        yield Finding(
            "backends.graphs",
            "note",
            "none: cuda_graph_config is null, and short steps wait for the host",
            "leave cuda_graph_config out",
        )
    else:
        sizes = [size for size in config.capture_sizes() if size <= args.max_batch_size]
        when = "as they are needed (fast_start)" if args.fast_start else "before the server is ready"
        text = f"{len(sizes)} of 1 to {max(sizes)} rows, captured {when}" if sizes else "none fits max_batch_size"
        yield Finding("backends.graphs", "ok", text)


def grammars(facts: Facts, args: LlmArgs) -> Iterator[Finding]:
    from headrace.text.grammars.load import DEFAULT

    wanted = args.guided_decoding_backend
    why = "the default" if wanted is None else f"guided_decoding_backend: {wanted}"
    yield Finding("backends.grammars", "ok", f"{wanted or DEFAULT}; {why}")
