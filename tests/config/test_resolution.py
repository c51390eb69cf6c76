"""Defaults < file < typed flags < --set, with the origin of each value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import KvCacheConfig, LlmArgs
from headrace.config.errors import KEYS_ARE_IN, ConfigError
from headrace.config.resolution import SET_REFUSED, Typed, resolve

TP = "tensor_parallel_size"
FRACTION = "kv_cache_config.free_gpu_memory_fraction"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("config.yml")


def refused(**inputs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolve(**{"needs_model": False, **inputs})
    return str(caught.value).splitlines()


def test_each_source_beats_the_one_below(file: Path) -> None:
    file.write_text("max_batch_size: 16\nmax_num_tokens: 256\nstream_interval: 4\n")
    resolved = resolve(
        config=file,
        flags={"model": Typed("MODEL", "m"), "max_beam_width": Typed("--max_beam_width", 2)},
        sets=["max_num_tokens=512"],
    )
    args = resolved.args
    assert (args.max_batch_size, args.max_num_tokens, args.stream_interval, args.max_beam_width) == (16, 512, 4, 2)
    assert args.max_seq_len is None
    assert {
        path: resolved.origin(path) for path in ("max_batch_size", "max_num_tokens", "max_beam_width", "model")
    } == {
        "max_batch_size": "config.yml:1",
        "max_num_tokens": "--set",
        "max_beam_width": "--max_beam_width",
        "model": "MODEL",
    }
    assert args.is_frozen


def test_a_flag_adds_to_an_object_of_the_file_without_its_defaults(file: Path) -> None:
    file.write_text("kv_cache_config:\n  enable_block_reuse: false\n  tokens_per_block: 64\n")
    resolved = resolve(config=file, flags={FRACTION: Typed("--free_gpu_memory_fraction", 0.5)}, needs_model=False)
    cache = resolved.args.kv_cache_config
    assert (cache.enable_block_reuse, cache.tokens_per_block, cache.free_gpu_memory_fraction) == (False, 64, 0.5)
    assert cache.model_fields_set == {"enable_block_reuse", "tokens_per_block", "free_gpu_memory_fraction"}


def test_a_flag_that_contradicts_the_file_is_refused_with_both_values_and_places(file: Path) -> None:
    file.write_text("\n\ntensor_parallel_size: 2\nkv_cache_config: {free_gpu_memory_fraction: 0.9}\n")
    flags = {TP: Typed("--tp_size", 4), FRACTION: Typed("--free_gpu_memory_fraction", 0.5)}
    assert refused(config=file, flags=flags) == [
        f"{TP}: --tp_size says 4 but config.yml:3 says 2: remove one of them, or decide with --set {TP}=VALUE",
        f"{FRACTION}: --free_gpu_memory_fraction says 0.5 but config.yml:4 says 0.9: remove one of them, "
        f"or decide with --set {FRACTION}=VALUE",
    ]


def test_set_decides_a_contradiction(file: Path) -> None:
    file.write_text("tensor_parallel_size: 2\nkv_cache_config: {free_gpu_memory_fraction: 0.9}\n")
    flags = {TP: Typed("--tp_size", 4), FRACTION: Typed("--fraction", 0.5)}
    resolved = resolve(config=file, flags=flags, sets=[f"{TP}=8", "kv_cache_config={}"], needs_model=False)
    assert resolved.args.tensor_parallel_size == 8
    assert resolved.args.kv_cache_config == KvCacheConfig()
    assert resolved.origin(TP) == "--set"


@pytest.mark.parametrize(
    ("written", "typed"), [("2", 2), ("'2'", 2), ("2.0", 2), ("null", 2)], ids=["same", "text", "float", "null"]
)
def test_the_same_value_twice_is_no_contradiction(file: Path, written: str, typed: int) -> None:
    file.write_text(f"tensor_parallel_size: {written}\n")
    assert resolve(config=file, flags={TP: Typed("--tp_size", typed)}, needs_model=False).args.tensor_parallel_size == 2


def test_spelling_and_aliases_do_not_contradict(file: Path) -> None:
    file.write_text("hf_revision: main\nattn_backend: vanilla\nenable_chunked_prefill: false\n")
    flags = {
        "revision": Typed("--revision", "main"),
        "attn_backend": Typed("--attn_backend", "VANILLA"),
        "enable_chunked_prefill": Typed("--disable_chunked_prefill", False),
    }
    assert resolve(config=file, flags=flags, needs_model=False).args.revision == "main"
    assert "config.yml:1 says main" in refused(config=file, flags={"revision": Typed("--revision", "dev")})[0]


def test_a_model_in_the_file_and_another_on_the_line(file: Path) -> None:
    file.write_text("model: a\n")
    assert resolve(config=file).args.model == "a"
    assert resolve(config=file, flags={"model": Typed("MODEL", "a")}).args.model == "a"
    assert refused(config=file, flags={"model": Typed("MODEL", "b")}) == [
        "model: MODEL says b but config.yml:1 says a: remove one of them"
    ]


def test_a_model_is_needed() -> None:
    assert refused(needs_model=True) == ["model: required: give MODEL, or the key in the file"]


def test_problems_come_in_the_order_of_the_file(file: Path) -> None:
    file.write_text(
        "enable_attention_dp: true\nkv_cache_config:\n  tokens_per_blok: 3\nmax_batch_size: 0\nmax_seq_len: x\n"
    )
    assert refused(config=file) == [
        "config.yml:3: kv_cache_config.tokens_per_blok: unknown key, did you mean 'tokens_per_block'?",
        "config.yml:4: max_batch_size: must be greater than or equal to 1, got 0",
        "config.yml:5: max_seq_len: expected a whole number or auto, got 'x'",
    ]


def test_a_bad_flag_is_named(file: Path) -> None:
    file.write_text("kv_cache_config: {tokens_per_block: 64}\n")
    assert refused(config=file, flags={FRACTION: Typed("--free_gpu_memory_fraction", 2.0)}) == [
        f"--free_gpu_memory_fraction: {FRACTION}: must be less than or equal to 1, got 2.0"
    ]


def test_python_objects_can_not_come_from_a_file(file: Path) -> None:
    file.write_text("checkpoint_loader: x\nspeculative_config: {decoding_type: User_Provided, drafter: y}\n")
    lines = refused(config=file)
    assert "config.yml:1: checkpoint_loader: holds a Python object: it can only be set through the Python API" in lines
    assert any(line.startswith("config.yml:2: speculative_config.drafter: holds a Python object") for line in lines)


def test_an_object_that_is_no_mapping_stays_an_error_under_a_flag(file: Path) -> None:
    file.write_text("kv_cache_config: 5\n")
    assert refused(config=file, flags={FRACTION: Typed("--fraction", 0.5)}) == [
        "config.yml:1: kv_cache_config: expected a mapping, got 5"
    ]


def test_set_reads_yaml_and_the_last_one_wins() -> None:
    sets = ["max_seq_len=16", "max_seq_len=auto", "kv_cache_config.max_tokens=null", "model_kwargs={a: [1, 2]}"]
    args = resolve(sets=sets, needs_model=False).args
    assert args.max_seq_len == "auto"
    assert args.kv_cache_config.max_tokens is None
    assert args.model_kwargs == {"a": [1, 2]}


def test_set_replaces_the_whole_value(file: Path) -> None:
    file.write_text("scheduler_config: {waiting_queue_policy: priority, use_python_scheduler: true}\n")
    policy = resolve(config=file, sets=["scheduler_config={use_python_scheduler: false}"], needs_model=False)
    assert policy.args.scheduler_config.waiting_queue_policy.value == "fcfs"
    one = resolve(config=file, sets=["scheduler_config.use_python_scheduler=false"], needs_model=False)
    assert one.args.scheduler_config.waiting_queue_policy.value == "priority"


def test_set_turns_something_on_that_the_file_turned_off(file: Path) -> None:
    file.write_text("cuda_graph_config: null\n")
    args = resolve(config=file, sets=["cuda_graph_config.enable_padding=true"], needs_model=False).args
    assert args.cuda_graph_config is not None
    assert args.cuda_graph_config.enable_padding


@pytest.mark.parametrize("path", [*SET_REFUSED, "telemetry_config.disabled", "env_overrides.HF_TOKEN"])
def test_set_refuses_some_paths(path: str) -> None:
    assert refused(sets=[f"{path}=1"]) == [f"--set: {path}: can't be changed with --set"]


def test_set_refuses_what_it_can_not_read() -> None:
    assert refused(sets=["max_seq_len"]) == ["--set: expected PATH=VALUE, got 'max_seq_len'"]
    assert refused(sets=["a..b=1"]) == ["--set: expected PATH=VALUE, got 'a..b=1'"]
    assert refused(sets=["max_seq_len=[1"])[0].startswith("--set: max_seq_len: not a YAML value")
    assert refused(sets=["max_seq_lenn=1"]) == ["--set: max_seq_lenn: unknown key, did you mean 'max_seq_len'?"]
    assert refused(sets=["foo.bar=1"]) == [f"--set: foo: unknown key: {KEYS_ARE_IN}"]
    assert refused(sets=["max_batch_size.x=1"]) == ["--set: max_batch_size: expected a whole number, got {'x': 1}"]


def test_set_refuses_a_parent_and_its_child() -> None:
    lines = refused(sets=["kv_cache_config.max_tokens=64", "kv_cache_config={}"])
    assert lines == ["--set: kv_cache_config.max_tokens: --set also replaces kv_cache_config as a whole: keep one"]


def test_arguments_of_the_python_api_are_copied() -> None:
    cache = KvCacheConfig(max_tokens=64)
    resolved = resolve(arguments={"model": "m", "kv_cache_config": cache})
    assert resolved.args.kv_cache_config.max_tokens == 64
    cache.max_tokens = 128
    assert resolved.args.kv_cache_config.max_tokens == 64
    assert resolved.origin("kv_cache_config.max_tokens") == "argument"


def test_server_keys_of_the_file(file: Path) -> None:
    file.write_text("allow_request_chat_template: true\ninternal_request_auth_key: secret\n"
                    "disagg_cluster: {cluster_uri: 'http://a:1'}\n")  # fmt: skip
    server = resolve(config=file, needs_model=False, refuse_missing_features=False).server
    assert server.allow_request_chat_template
    assert server.internal_request_auth_key is not None
    assert server.internal_request_auth_key.get_secret_value() == "secret"
    assert server.disagg_cluster is not None
    assert "secret" not in repr(server)
    assert [line.split(": ")[0] for line in refused(config=file)] == ["config.yml:2", "config.yml:3"]


def test_server_keys_and_flags_can_contradict_too(file: Path) -> None:
    file.write_text("allow_request_chat_template: false\n")
    flag = {"allow_request_chat_template": Typed("--allow_request_chat_template", True)}
    assert "--allow_request_chat_template says true but config.yml:1 says false" in refused(
        config=file, server_flags=flag
    )[0]  # fmt: skip
    bad = {"port": Typed("--port", 70000)}
    assert refused(server_flags=bad) == ["--port: port: must be less than or equal to 65535, got 70000"]


def test_an_empty_file_is_all_defaults(file: Path) -> None:
    file.write_text("")
    assert resolve(config=file, needs_model=False).args == LlmArgs()


def test_notes_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "headrace.config"):
        resolve(arguments={"sampler_type": "auto"}, needs_model=False).log_notes()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "sampler_type: deprecated. Ignored: there is one sampler."),
        ("INFO", "no effect on this device: sampler_type"),
    ]


LIMITS = ("max_batch_size", "max_num_tokens", "max_beam_width", "stream_interval")
VALUES = st.dictionaries(st.sampled_from(LIMITS), st.integers(1, 4), max_size=4)


@given(written=VALUES, typed=VALUES, forced=VALUES)
def test_the_highest_source_wins_or_the_contradiction_is_named(
    tmp_path_factory: pytest.TempPathFactory, written: dict[str, int], typed: dict[str, int], forced: dict[str, int]
) -> None:
    file = tmp_path_factory.mktemp("c") / "c.yml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in written.items()))
    inputs: dict[str, Any] = {
        "config": file,
        "flags": {name: Typed(f"--{name}", value) for name, value in typed.items()},
        "sets": [f"{name}={value}" for name, value in forced.items()],
    }
    clashes = {name for name in written.keys() & typed.keys() - forced.keys() if written[name] != typed[name]}
    if clashes:
        assert {line.split(":")[0] for line in refused(**inputs)} == clashes
        return
    resolved = resolve(**inputs, needs_model=False)
    for name in LIMITS:
        expected = forced.get(name, typed.get(name, written.get(name, getattr(LlmArgs(), name))))
        assert getattr(resolved.args, name) == expected
        if name in forced:
            assert resolved.origin(name) == "--set"
