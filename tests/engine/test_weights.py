"""Loading is strict both ways, streams, and says in one line what is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine import checkpoint, weights
from headrace.engine.build import build_model
from headrace.engine.checkpoint import SafetensorsFile, read_checkpoint
from headrace.engine.weights import DUMMY_STD, load_weights
from headrace.hub.source import ModelSource
from headrace.layers.factory import LayerFactory
from headrace.layers.parallel import ParallelContext
from headrace.layers.port import Act, Model
from headrace.layers.weights import Part
from headrace.quant.none import Dense
from tests.kits.model import Row, Sequences, load_model, prompt, save_tiny
from tests.kits.tiny import LARGE_EPS

FILE = "model.safetensors"
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder, "llama")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    torch.set_num_threads(1)
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def source(folder: Path) -> ModelSource:
    return ModelSource(kind="hf", path=folder, name=str(folder))


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of the checkpoint; None removes one."""
    tensors = load_file(folder / FILE)
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / FILE)


def set_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def fails(folder: Path) -> str:
    with pytest.raises(ValueError) as raised:
        load_model(source(folder))
    message = str(raised.value)
    assert "\n" not in message and str(folder) in message
    return message


def logits(model: Model) -> Tensor:
    return Sequences(model).step([(Row(), prompt(9))])[0]


def test_missing_tensors_are_named(folder: Path) -> None:
    edit(folder, **{"model.layers.1.mlp.up_proj.weight": None, "model.norm.weight": None})
    message = fails(folder)
    assert "tensors missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message


def test_unexpected_tensors_are_named(folder: Path) -> None:
    edit(folder, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32), "extra": torch.zeros(1)})
    message = fails(folder)
    assert "unexpected: " in message and "extra" in message and "model.layers.0.self_attn.q_proj.bias" in message


def test_layers_that_the_config_has_not(folder: Path) -> None:
    set_config(folder, num_hidden_layers=2)
    message = fails(folder)
    assert "unexpected: model.layers.2.input_layernorm.weight" in message and "and 1 more" in message


def test_wrong_shapes_are_named(folder: Path) -> None:
    edit(folder, **{"model.norm.weight": torch.ones(33)})
    assert "of a wrong shape: model.norm.weight [33] instead of [32]" in fails(folder)


def test_faults_are_found_before_tensors_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(folder, **{"model.norm.weight": torch.ones(33)})
    monkeypatch.setattr(checkpoint.FileTensor, "read", lambda *args: pytest.fail("read a tensor"))
    fails(folder)


def test_untied_config_without_a_head(folder: Path) -> None:
    edit(folder, **{HEAD: None})
    assert f"tensors missing: {HEAD}" in fails(folder)


def test_tied_config_without_a_head(folder: Path) -> None:
    edit(folder, **{HEAD: None})
    set_config(folder, tie_word_embeddings=True)
    tied, _ = load_model(source(folder))
    edit(folder, **{HEAD: load_file(folder / FILE)[EMBED]})
    set_config(folder, tie_word_embeddings=False)
    untied, _ = load_model(source(folder))
    torch.testing.assert_close(logits(tied), logits(untied))


def test_tied_config_with_an_equal_head(folder: Path) -> None:
    edit(folder, **{HEAD: load_file(folder / FILE)[EMBED].clone()})
    set_config(folder, tie_word_embeddings=True)
    load_model(source(folder))


def test_tied_config_with_another_head(folder: Path) -> None:
    set_config(folder, tie_word_embeddings=True)
    message = fails(folder)
    assert f"though the config ties them: {HEAD}" in message and "tie_word_embeddings" in message


def test_tied_config_with_a_head_that_differs_in_one_row(folder: Path) -> None:
    head = load_file(folder / FILE)[EMBED].clone()
    head[-1, -1] += 1
    edit(folder, **{HEAD: head})
    set_config(folder, tie_word_embeddings=True)
    assert HEAD in fails(folder)


def test_tied_config_with_a_head_of_another_shape(folder: Path) -> None:
    edit(folder, **{HEAD: torch.zeros(5, 32)})
    set_config(folder, tie_word_embeddings=True)
    assert f"of a wrong shape: {HEAD} [5, 32] instead of [101, 32]" in fails(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_tied_heads_are_compared_by_rank(folder: Path, rank: int) -> None:
    tensors = load_file(folder / FILE)
    head = tensors[EMBED].clone()
    edit(folder, **{HEAD: head})
    set_config(folder, tie_word_embeddings=True)
    load_model(source(folder), parallel=ParallelContext(rank, 2))
    head[-1] += 1
    edit(folder, **{HEAD: head})
    if rank == 1:
        with pytest.raises(ValueError, match=HEAD):
            load_model(source(folder), parallel=ParallelContext(rank, 2))
    else:
        load_model(source(folder), parallel=ParallelContext(rank, 2))


def test_rotary_tables_of_old_checkpoints_are_ignored(folder: Path) -> None:
    edit(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)})
    load_model(source(folder))


def split(folder: Path, num_files: int) -> list[Path]:
    """Spread the checkpoint over several files with an index."""
    tensors = load_file(folder / FILE)
    names = sorted(tensors)
    (folder / FILE).unlink()
    weight_map: dict[str, str] = {}
    for number in range(num_files):
        name = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        part = {key: tensors[key] for key in names[number::num_files]}
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sorted(folder.glob("model-*.safetensors"))


def test_sharded_equals_single(saved: Path, folder: Path) -> None:
    assert len(split(folder, 3)) == 3
    torch.testing.assert_close(logits(load_model(source(folder))[0]), logits(load_model(source(saved))[0]))


def test_a_tensor_in_two_files(folder: Path) -> None:
    files = split(folder, 3)
    embedding = next(load_file(file)[EMBED] for file in files if EMBED in load_file(file))
    for file in files:
        save_file({**load_file(file), EMBED: embedding}, file)
    assert f"stored twice: {EMBED}" in fails(folder)


def test_a_missing_file(folder: Path) -> None:
    split(folder, 3)[1].unlink()
    assert "model-00002-of-00003.safetensors" in fails(folder)


@pytest.mark.parametrize("keep", [0, 5, 200, -4])
def test_truncated_files(folder: Path, keep: int) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:keep])
    assert FILE in fails(folder)


def test_a_file_that_shrinks_while_it_is_read(folder: Path) -> None:
    with SafetensorsFile(folder / FILE) as file:
        last = file.tensors()[-1]
        (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-4])
        with pytest.raises(ValueError, match=f"ends inside tensor {last.name}"):
            last.read(torch.empty(last.shape))


def test_unknown_dtype(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content.replace(b'"F32"', b'"X32"', 1))
    assert "unknown dtype X32" in fails(folder)


def test_pickled_weights_are_never_read(folder: Path) -> None:
    torch.save({"x": torch.zeros(1)}, folder / "pytorch_model.bin")
    (folder / FILE).unlink()
    assert "pickled" in fails(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("part", [None, Part(0, 1, 6), Part(1, 3, 4)])
def test_parts_are_read_in_runs_of_rows(
    tmp_path: Path, dtype: torch.dtype, part: Part | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 24)
    (tmp_path / "config.json").write_text("{}")
    matrix, vector, scalar = torch.randn(7, 5).to(dtype), torch.randn(3).to(dtype), torch.tensor(2.5, dtype=dtype)
    save_file({"matrix": matrix, "vector": vector, "scalar": scalar}, tmp_path / FILE)
    for stored in read_checkpoint(source(tmp_path)):
        whole = {"matrix": matrix, "vector": vector, "scalar": scalar}[stored.name]
        used = part if stored.name == "matrix" else None
        want = whole if used is None else whole.narrow(used.dim, used.start, used.stop - used.start)
        into = torch.empty(want.shape, dtype=torch.float32)
        stored.read(into, used)
        assert torch.equal(into, want.float()), stored.name


def test_parameters_are_converted(folder: Path) -> None:
    model, report = load_model(source(folder), dtype=torch.bfloat16)
    wide, wide_report = load_model(source(folder))
    assert report.weight_bytes * 2 == wide_report.weight_bytes
    assert model.embed(torch.tensor([3])).dtype == torch.bfloat16
    assert torch.equal(model.embed(torch.tensor([3])), wide.embed(torch.tensor([3])).bfloat16())


def dummy(folder: Path, *, parallel: ParallelContext | None = None) -> Model:
    dense = Dense()
    factory = LayerFactory(dtype=torch.float32, recipe=lambda name: dense, parallel=parallel)
    config = json.loads((folder / "config.json").read_text())
    model = build_model(config, factory)
    load_weights(model, ModelSource(kind="hf", path=folder / "nowhere", name="dummy"), load_format="dummy")
    return model


def test_dummy_weights(folder: Path) -> None:
    (folder / FILE).unlink()
    model = dummy(folder)
    table = model.embed(torch.arange(101))
    assert abs(float(table.std()) - DUMMY_STD) < 0.1 * DUMMY_STD and abs(float(table.mean())) < 0.1 * DUMMY_STD
    hidden = torch.randn(4, 32)
    rms = hidden / (hidden.pow(2).mean(-1, keepdim=True) + LARGE_EPS).sqrt()
    torch.testing.assert_close(model.final(None, hidden).data, rms)
    torch.testing.assert_close(logits(dummy(folder)), logits(model))


@pytest.mark.parametrize("noise_elements", [1 << 22, 7 * 32, 1])
def test_dummy_weights_of_ranks_are_parts_of_one_rank(
    folder: Path, noise_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "NOISE_ELEMENTS", noise_elements)
    whole = dummy(folder).embed(torch.arange(101))
    ranks = [dummy(folder, parallel=ParallelContext(rank, 2)) for rank in range(2)]
    torch.testing.assert_close(sum(model.embed(torch.arange(101)) for model in ranks), whole)
    # Both ways of sharding: gate and up by rows, down by columns.
    hidden = torch.randn(3, 32)
    sums = [model.layers[0].mlp(Act(hidden)) for model in [dummy(folder), *ranks]]
    torch.testing.assert_close(sums[1] + sums[2], sums[0])


def test_dummy_rows_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "NOISE_ELEMENTS", 5 * 32)
    assert len(dummy(folder).embed(torch.arange(101)).unique(dim=0)) == 101


def test_unknown_load_format(folder: Path) -> None:
    model, _ = load_model(source(folder))
    with pytest.raises(ValueError, match="load_format 'gms' is not supported"):
        load_weights(model, source(folder), load_format="gms")


def test_dummy_norms_of_gemma_have_scale_one(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gemma3_text")
    hidden = torch.randn(4, 32)
    rms = hidden / (hidden.pow(2).mean(-1, keepdim=True) + LARGE_EPS).sqrt()
    torch.testing.assert_close(dummy(tmp_path).final(None, hidden).data, rms)


def test_the_bar_shows_only_when_loading_takes_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        dense = Dense()
        factory = LayerFactory(dtype=torch.float32, recipe=lambda name: dense)
        config = json.loads((folder / "config.json").read_text())
        load_weights(build_model(config, factory), source(folder))

    load()
    assert "Loading weights" not in capsys.readouterr().err
    monkeypatch.setattr(weights, "PROGRESS_AFTER_S", 0.0)
    load()
    assert "Loading weights" not in capsys.readouterr().err  # nobody sees a bar move in a file
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    load()
    captured = capsys.readouterr()
    assert "Loading weights" in captured.err and not captured.out


MEMORY_SCRIPT = """
import json, sys
from pathlib import Path
import torch
from headrace.engine.build import build_model
from headrace.engine.weights import load_weights
from headrace.hub.source import ModelSource
from headrace.layers.factory import LayerFactory
from headrace.quant.none import Dense

torch.set_num_threads(1)
folder = Path(sys.argv[1])
dense = Dense()

def build(config):
    return build_model(config, LayerFactory(dtype=torch.bfloat16, recipe=lambda name: dense))

def peak_bytes():
    # Of this program only; getrusage counts what the process was before exec, the whole test run.
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

config = json.loads((folder / "config.json").read_text())
source = ModelSource(kind="hf", path=folder, name="x")
# Everything that is imported or allocated on first use, before the reading that is measured.
small = build({**config, "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 64})
load_weights(small, source, load_format="dummy")
model = build(config)
before = peak_bytes()
report = load_weights(model, source)
print(json.dumps({"grown_bytes": peak_bytes() - before, "weight_bytes": report.weight_bytes}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("num_files", [1, 4])
def test_peak_memory_is_weights_and_one_tensor(tmp_path: Path, num_files: int) -> None:
    """700 MB of weights, the largest tensor 66 MB; a reader that maps the file or keeps shards shows far more."""
    save_tiny(
        tmp_path,
        "llama",
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    tensors = {name: value.bfloat16() for name, value in load_file(tmp_path / FILE).items()}
    save_file(tensors, tmp_path / FILE)
    if num_files > 1:
        split(tmp_path, num_files)
    out = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)], capture_output=True, text=True, check=True, timeout=300
    )
    measured = json.loads(out.stdout)
    largest = max(value.nbytes for value in tensors.values())
    assert measured["weight_bytes"] == sum(value.nbytes for value in tensors.values())
    assert measured["weight_bytes"] * 0.9 < measured["grown_bytes"] <= measured["weight_bytes"] + largest, measured
