from __future__ import annotations

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from headrace.hub import gguf_tensors
from headrace.hub.errors import ModelError
from headrace.hub.gguf import GgufFile
from headrace.hub.pull import pull
from tests.hub.tiny_gguf import (
    HEAD_DIM,
    HIDDEN,
    NUM_HEADS,
    STORAGE_TYPES,
    config_metadata,
    random_stored,
    write_gguf,
    write_tiny_model,
)

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
CONFIG_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "vocab_size",
    "tie_word_embeddings",
)


@pytest.mark.parametrize("storage", STORAGE_TYPES)
def test_every_storage_type_dequantises_to_the_values_of_its_format(tmp_path: Path, storage: str) -> None:
    rng = np.random.default_rng(0)
    shape = (24, 256)
    stored = random_stored(rng, shape, storage)
    metadata = config_metadata("qwen3")
    path = write_gguf(tmp_path / "m.gguf", "qwen3", metadata, {"token_embd.weight": (stored, storage)})

    (tensor,) = GgufFile(path).tensors()

    assert (tensor.name, tensor.qtype, tensor.shape) == ("model.embed_tokens.weight", storage, shape)
    np.testing.assert_allclose(tensor.load(), reference_values(stored, storage).reshape(shape), rtol=2e-6, atol=1e-7)
    np.testing.assert_array_equal(tensor.packed(), stored.view(np.uint8))


def reference_values(stored: np.ndarray, storage: str) -> np.ndarray:
    """Slow readers of the formats, written from ggml's block layouts, one element at a time."""
    if storage == "BF16":
        return (stored.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if storage in ("F32", "F16"):
        return stored.astype(np.float32)
    blocks = stored.reshape(-1, gguf.GGML_QUANT_SIZES[GGMLQuantizationType[storage]][1])
    return np.array([value for block in blocks for value in BLOCK_READERS[storage](block)], dtype=np.float32)


def half(block: np.ndarray, start: int) -> float:
    return float(block[start : start + 2].view(np.float16)[0])


def read_q4(block: np.ndarray, *, has_min: bool) -> list[float]:
    scale, minimum, quants = half(block, 0), half(block, 2) if has_min else 0.0, block[4 if has_min else 2 :]
    levels = [int(byte) & 15 for byte in quants] + [int(byte) >> 4 for byte in quants]
    return [level * scale + minimum if has_min else (level - 8) * scale for level in levels]


def read_q5(block: np.ndarray, *, has_min: bool) -> list[float]:
    scale, minimum = half(block, 0), half(block, 2) if has_min else 0.0
    start = 4 if has_min else 2
    high = int.from_bytes(block[start : start + 4].tobytes(), "little")
    quants = block[start + 4 :]
    low = [int(byte) & 15 for byte in quants] + [int(byte) >> 4 for byte in quants]
    levels = [level | (high >> i & 1) << 4 for i, level in enumerate(low)]
    return [level * scale + minimum if has_min else (level - 16) * scale for level in levels]


def read_q8_0(block: np.ndarray) -> list[float]:
    return [int(quant) * half(block, 0) for quant in block[2:].view(np.int8)]


def read_q2_k(block: np.ndarray) -> list[float]:
    scales, quants, scale, minimum = block[:16], block[16:80], half(block, 80), half(block, 82)
    values = []
    for i in range(256):
        level = int(quants[i // 128 * 32 + i % 32]) >> (i % 128 // 32 * 2) & 3
        group = int(scales[i // 16])
        values.append(scale * (group & 15) * level - minimum * (group >> 4))
    return values


def read_q3_k(block: np.ndarray) -> list[float]:
    high, quants, packed, scale = block[:32], block[32:96], block[96:108], half(block, 108)
    values = []
    for i in range(256):
        group = i // 16
        low_bits = int(packed[group % 8]) >> (4 * (group // 8)) & 15
        high_bits = int(packed[8 + group % 4]) >> (2 * (group // 4)) & 3
        level = int(quants[i // 128 * 32 + i % 32]) >> (i % 128 // 32 * 2) & 3
        is_high = int(high[i % 32]) >> (i // 32) & 1
        values.append(scale * ((low_bits | high_bits << 4) - 32) * (level - (0 if is_high else 4)))
    return values


def k_scales(packed: np.ndarray, group: int) -> tuple[int, int]:
    """The 6-bit scale and minimum of one of 8 groups, from 12 bytes."""
    low = [int(byte) for byte in packed]
    if group < 4:
        return low[group] & 63, low[group + 4] & 63
    return (
        low[group + 4] & 15 | (low[group - 4] >> 6) << 4,
        low[group + 4] >> 4 | (low[group] >> 6) << 4,
    )


def read_q45_k(block: np.ndarray, *, has_high: bool) -> list[float]:
    scale, minimum, packed = half(block, 0), half(block, 2), block[4:16]
    high, quants = block[16:48], block[48 if has_high else 16 :]
    values = []
    for i in range(256):
        group = i // 32
        level = int(quants[i // 64 * 32 + i % 32]) >> (4 * (group % 2)) & 15
        if has_high:
            level |= (int(high[i % 32]) >> group & 1) << 4
        group_scale, group_min = k_scales(packed, group)
        values.append(scale * group_scale * level - minimum * group_min)
    return values


def read_q6_k(block: np.ndarray) -> list[float]:
    low, high, scales, scale = block[:128], block[128:192], block[192:208].view(np.int8), half(block, 208)
    values = []
    for i in range(256):
        part, inner = i // 128, i % 128
        level = int(low[part * 64 + inner % 64]) >> (4 * (inner // 64)) & 15
        level |= (int(high[part * 32 + inner % 32]) >> (2 * (inner // 32)) & 3) << 4
        values.append(scale * int(scales[i // 16]) * (level - 32))
    return values


BLOCK_READERS = {
    "Q4_0": lambda block: read_q4(block, has_min=False),
    "Q4_1": lambda block: read_q4(block, has_min=True),
    "Q5_0": lambda block: read_q5(block, has_min=False),
    "Q5_1": lambda block: read_q5(block, has_min=True),
    "Q8_0": read_q8_0,
    "Q2_K": read_q2_k,
    "Q3_K": read_q3_k,
    "Q4_K": lambda block: read_q45_k(block, has_high=False),
    "Q5_K": lambda block: read_q45_k(block, has_high=True),
    "Q6_K": read_q6_k,
}


def test_chunks_and_row_ranges_agree_with_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny_model(tmp_path / "m.gguf", "llama", storage=STORAGE_TYPES)
    whole = {tensor.name: tensor.load() for tensor in GgufFile(tmp_path / "m.gguf").tensors()}
    monkeypatch.setattr(gguf_tensors, "CHUNK_ELEMENTS", 7 * HIDDEN)
    monkeypatch.setattr(gguf_tensors, "_DEQUANT_ELEMENTS", 16 * 3 * HIDDEN)
    for tensor in GgufFile(tmp_path / "m.gguf").tensors():
        expected = whole[tensor.name]
        np.testing.assert_array_equal(tensor.load(), expected)
        np.testing.assert_array_equal(tensor.load(5, 23), expected[5:23])
        assert max(chunk.size for _, chunk in tensor.chunks()) <= 7 * HIDDEN
        assert next(row for row, _ in tensor.chunks()) == 0


def test_llama_rows_of_q_and_k_are_brought_back_to_two_halves(tmp_path: Path) -> None:
    """The converter writes head row 2i = half-split row i, and 2i+1 = row i + head_dim/2."""
    written = write_tiny_model(tmp_path / "m.gguf", "llama")
    tensors = {tensor.name: tensor for tensor in GgufFile(tmp_path / "m.gguf").tensors()}
    for head in range(NUM_HEADS):
        for row in range(HEAD_DIM // 2):
            for half_number in (0, 1):
                ours = tensors["model.layers.0.self_attn.q_proj.weight"].load()
                stored = written["blk.0.attn_q.weight"][0]
                row_of_ours = head * HEAD_DIM + half_number * (HEAD_DIM // 2) + row
                np.testing.assert_array_equal(ours[row_of_ours], stored[head * HEAD_DIM + 2 * row + half_number])
        break  # one head shows the order; the equality with transformers covers the rest
    v = tensors["model.layers.0.self_attn.v_proj.weight"].load()
    np.testing.assert_array_equal(v, written["blk.0.attn_v.weight"][0])


def test_only_gemma_norms_lose_the_one_that_the_file_adds(tmp_path: Path) -> None:
    for architecture, offset in (("gemma3", 1.0), ("qwen3", 0.0)):
        path = tmp_path / f"{architecture}.gguf"
        written = write_tiny_model(path, architecture)
        tensors = {tensor.name: tensor.load() for tensor in GgufFile(path).tensors()}
        for ours, theirs in (
            ("model.norm.weight", "output_norm.weight"),
            ("model.layers.1.self_attn.q_norm.weight", "blk.1.attn_q_norm.weight"),
            ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        ):
            np.testing.assert_array_equal(tensors[ours], written[theirs][0] - np.float32(offset))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_tiny_models_equal_transformers(tmp_path: Path, architecture: str, tied: bool) -> None:
    write_tiny_model(tmp_path / "m.gguf", architecture, tied=tied, storage=STORAGE_TYPES)
    # transformers takes a default head size for qwen3 files, whatever they say.
    assert_equal_to_transformers(tmp_path / "m.gguf", changes={"head_dim": HEAD_DIM} if architecture == "qwen3" else {})


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["smollm2", "gemma3-270m"])
def test_real_models_equal_transformers(alias: str) -> None:
    assert_equal_to_transformers(pull(alias, progress=False), changes={})


def assert_equal_to_transformers(path: Path, *, changes: dict[str, int]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        **changes,
    )
    file = GgufFile(path)
    config = file.hf_config()
    state = model.state_dict()
    if config["tie_word_embeddings"]:
        state.pop("lm_head.weight")
    seen = set()
    for tensor in file.tensors():
        ours = torch.from_numpy(tensor.load())
        assert ours.dtype == torch.float32
        assert torch.equal(ours, state[tensor.name]), tensor.name
        seen.add(tensor.name)
    assert seen == set(state), seen ^ set(state)
    assert len(seen) == file.num_weights
    for key in CONFIG_KEYS:
        assert config[key] == getattr(model.config, key), key
    np.testing.assert_allclose(config["rms_norm_eps"], model.config.rms_norm_eps, rtol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hf_config_makes_a_config_of_its_class(tmp_path: Path, architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    write_tiny_model(tmp_path / "m.gguf", architecture)
    config = GgufFile(tmp_path / "m.gguf").hf_config()
    theirs = transformers.AutoConfig.for_model(**config)
    assert type(theirs).model_type == config["model_type"]
    for key, value in config.items():
        if key not in ("rope_theta", "rope_local_base_freq", "rope_scaling", "torch_dtype"):
            assert getattr(theirs, key) == value, key
    rope = theirs.rope_parameters
    if architecture == "gemma3":
        assert rope["full_attention"]["rope_theta"] == 10000.0
        assert rope["sliding_attention"]["rope_theta"] == config["rope_local_base_freq"]
    else:
        assert rope["rope_theta"] == config["rope_theta"]


def test_gemma3_config_fills_in_what_files_leave_out(tmp_path: Path) -> None:
    extra = {"gemma3.block_count": 8, "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    write_tiny_model(tmp_path / "m.gguf", "gemma3", extra=extra)
    config = GgufFile(tmp_path / "m.gguf").hf_config()
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    assert config["rope_local_base_freq"] == 10000.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["tie_word_embeddings"] is True


def test_rope_scaling_keys(tmp_path: Path) -> None:
    def scaling(extra: dict[str, object]) -> object:
        write_tiny_model(tmp_path / "m.gguf", "qwen2", extra={f"qwen2.rope.scaling.{k}": v for k, v in extra.items()})
        return GgufFile(tmp_path / "m.gguf").hf_config()["rope_scaling"]

    assert scaling({}) is None
    assert scaling({"type": "none"}) is None
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 128}
    assert scaling(yarn) == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    with pytest.raises(ModelError, match=r"rope\.scaling\.type is 'bend'"):
        scaling({"type": "bend"})


def llama3_factors(factor: float) -> np.ndarray:
    """One at a time, from the description of Llama 3.1's rope."""
    factors = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * 10000.0 ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def test_llama3_rope_is_recognised_by_its_factors(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    written = write_tiny_model(path, "llama")
    written["rope_freqs.weight"] = (llama3_factors(32.0), "F32")
    write_gguf(path, "llama", config_metadata("llama"), written)
    file = GgufFile(path)
    assert file.hf_config()["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in {tensor.name for tensor in file.tensors()}
    assert file.num_weights == len(list(file.tensors()))

    written["rope_freqs.weight"] = (llama3_factors(32.0)[::-1].copy(), "F32")
    write_gguf(path, "llama", config_metadata("llama"), written)
    with pytest.raises(ModelError, match="not Llama 3's"):
        GgufFile(path).hf_config()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.expert_count": 8}, "experts"),
        ({"split.count": 3}, "merge the parts"),
        ({"llama.attention.key_length": 64, "llama.attention.value_length": 32}, "head sizes"),
        ({"llama.rope.dimension_count": 32}, "part of each head"),
        ({"llama.attention.head_count_kv": [1, 2]}, "differs by layer"),
    ],
)
def test_variants_that_would_give_wrong_results_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    write_tiny_model(tmp_path / "m.gguf", "llama", extra=change)
    with pytest.raises(ModelError, match=message) as error:
        GgufFile(tmp_path / "m.gguf").hf_config()
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_unknown_architecture_and_tensors_are_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", "mamba", {}, {"token_embd.weight": (np.zeros((2, 32), np.float32), "F32")})
    with pytest.raises(ModelError, match="'mamba' is not supported .supported: llama, qwen2, qwen3, gemma3"):
        GgufFile(tmp_path / "a.gguf").hf_config()

    written = write_tiny_model(tmp_path / "b.gguf", "llama")
    written["blk.0.attn_sinks.weight"] = (np.zeros(4, np.float32), "F32")
    written["blk.1.ffn_gate_exps.weight"] = (np.zeros((4, 32), np.float32), "F32")
    write_gguf(tmp_path / "b.gguf", "llama", config_metadata("llama"), written)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_sinks\.weight, blk\.1\.ffn_gate_exps\.weight"):
        next(GgufFile(tmp_path / "b.gguf").tensors())


def test_a_large_vocabulary_is_read_in_well_under_seconds(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(200_000)]
    extra = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    write_tiny_model(tmp_path / "m.gguf", "llama", extra=extra)
    start = time.perf_counter()
    file = GgufFile(tmp_path / "m.gguf")
    assert time.perf_counter() - start < 5
    assert file.metadata["tokenizer.ggml.tokens"] == tokens
