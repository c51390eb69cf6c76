"""Flags as a user types them, through click."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from headrace.cli.config import config_group
from headrace.cli.options import (
    LLM_FLAGS,
    SERVER_FLAGS,
    SERVING_LLM_FLAGS,
    llm_options,
    resolved_from_click,
    serve_options,
)
from headrace.config.errors import ConfigError
from headrace.config.llm_args import LlmArgs
from headrace.config.resolution import Resolved
from headrace.config.serving import ServerOptions

SEEN: list[Resolved] = []


@click.command()
@click.argument("model", required=False)
@serve_options
@click.pass_context
def serve(ctx: click.Context, model: str | None) -> None:
    try:
        SEEN.append(resolved_from_click(ctx, model))
    except ConfigError as error:
        click.echo(str(error), err=True)
        ctx.exit(2)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()
    for name in ("HEADRACE_LOG_LEVEL", "HEADRACE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def run(*words: str) -> Result:
    return CliRunner().invoke(serve, list(words))


def served(*words: str) -> Resolved:
    result = run(*words)
    assert result.exit_code == 0, result.output
    return SEEN[-1]


def test_nothing_typed_means_nothing_set() -> None:
    resolved = served("m")
    assert resolved.args.model_fields_set == {"model"}
    assert resolved.server == ServerOptions()


def test_a_command_line_of_the_documents() -> None:
    resolved = served(
        "/models/x", "--served_model_name", "zai/x", "--host", "0.0.0.0", "--port", "8001", "--max_batch_size", "128",
        "--max_num_tokens", "8192", "--tp_size", "8", "--ep_size", "1", "--pp_size", "1", "--backend", "pytorch",
    )  # fmt: skip
    args, server = resolved.args, resolved.server
    assert (args.model, args.max_batch_size, args.tensor_parallel_size) == ("/models/x", 128, 8)
    assert (server.host, server.port, server.served_model_name) == ("0.0.0.0", 8001, "zai/x")
    assert resolved.origin("tensor_parallel_size") == "--tp_size"


@pytest.mark.parametrize("spelling", ["--tensor_parallel_size", "--tensor-parallel-size", "--tp_size", "--tp-size"])
def test_every_spelling_of_a_flag(spelling: str) -> None:
    resolved = served("m", spelling, "2")
    assert resolved.args.tensor_parallel_size == 2 and resolved.origin("tensor_parallel_size") == spelling


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--free_gpu_memory_fraction", "2"], "--free_gpu_memory_fraction: kv_cache_config.free_gpu_memory_fraction"),
        (["--kv-cache-free-gpu-mem-fraction=2"], "--kv-cache-free-gpu-mem-fraction: kv_cache_config.free_gpu_memory"),
        (["--tp_size", "2", "--tensor-parallel-size", "0"], "--tensor-parallel-size: tensor_parallel_size"),
        (["--tensor_parallel_size", "0", "--tokenizer", "--tp_size"], "--tensor_parallel_size: tensor_parallel_size"),
        (["--max-queue-size=-1"], "--max-queue-size: max_queued_requests"),
    ],
    ids=str,
)
def test_an_error_names_a_flag_as_it_was_typed(words: list[str], named: str) -> None:
    result = run("m", *words)
    assert result.exit_code == 2 and result.output.startswith(named), result.output


def test_a_value_that_nobody_typed_has_the_documented_name() -> None:
    CliRunner().invoke(serve, ["m"], auto_envvar_prefix="X", env={"X_FLAG_TENSOR_PARALLEL_SIZE": "2"})
    assert SEEN[-1].origin("tensor_parallel_size") == "--tensor_parallel_size"


@pytest.mark.parametrize(
    "spelling",
    ["--free_gpu_memory_fraction", "--kv_cache_free_gpu_memory_fraction", "--kv-cache-free-gpu-memory-fraction"],
)
def test_flags_of_nested_settings(spelling: str) -> None:
    assert served("m", spelling, "0.5").args.kv_cache_config.free_gpu_memory_fraction == 0.5


def test_switches() -> None:
    assert served("m").args.enable_chunked_prefill
    assert served("m", "--enable_chunked_prefill").args.enable_chunked_prefill
    assert not served("m", "--disable-chunked-prefill").args.enable_chunked_prefill
    assert served("m", "--no-telemetry").args.telemetry_config.disabled
    assert not served("m", "--telemetry").args.telemetry_config.disabled
    assert served("m", "--trust_remote_code").args.trust_remote_code
    assert served("m", "--fail_fast_on_attention_window_too_large", "false").args.model == "m"


def test_a_switch_can_contradict_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    file.write_text("enable_chunked_prefill: true\n")
    for spelling in ("--disable_chunked_prefill", "--disable-chunked-prefill"):
        result = run("m", "--config", str(file), spelling)
        assert result.exit_code == 2
        assert f"{spelling} says false but {file}:1 says true" in result.output


@pytest.mark.parametrize("spelling", ["--config", "--extra_llm_api_options", "--extra-llm-api-options"])
def test_a_default_never_beats_the_file(spelling: str, tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    file.write_text("max_batch_size: 16\nkv_cache_config: {free_gpu_memory_fraction: 0.25}\n")
    args = served("m", spelling, str(file)).args
    assert (args.max_batch_size, args.kv_cache_config.free_gpu_memory_fraction) == (16, 0.25)


def test_a_default_that_was_typed_counts(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    file.write_text("max_batch_size: 16\n")
    assert run("m", "--config", str(file), "--max_batch_size", "2048").exit_code == 2
    assert served("m", "--config", str(file), "--max_batch_size", "16").args.max_batch_size == 16
    assert (
        served("m", "--config", str(file), "--max_batch_size", "9", "--set", "max_batch_size=9").args.max_batch_size
        == 9
    )


def test_bad_values_are_exit_code_2() -> None:
    for words in (["--max_batch_size", "x"], ["--max_seq_len", "x"], ["--port", "70000"], ["--media_io_kwargs", "{"]):
        result = run("m", *words)
        assert result.exit_code == 2, words
        assert words[0] in result.output
    assert run("--max_batch_size", "4").exit_code == 2
    assert "model: required" in run().output


def test_api_keys_of_flags_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "third, fourth")
    server = served("m", "--api_key", "first", "--api-key", "second").server
    assert [key.get_secret_value() for key in server.api_keys] == ["first", "second", "third", "fourth"]
    assert "first" not in repr(server)


def test_log_level_of_flag_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert served("m").server.log_level == "info"
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "DEBUG")
    assert served("m").server.log_level == "debug"
    assert served("m", "--log_level", "trace").server.log_level == "trace"
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "loud")
    assert "HEADRACE_LOG_LEVEL: log_level: expected one of" in run("m").output


def test_missing_features_are_refused_with_their_flag() -> None:
    result = run("m", "--grpc_protocol", "openengine", "--enable_attention_dp", "--agent_types", "a, b")
    assert result.exit_code == 2
    assert "--grpc_protocol: grpc_protocol: not available yet (this dialect of gRPC: use smg)" in result.output
    assert "--enable_attention_dp: enable_attention_dp: not available yet" in result.output
    assert "--agent_types: reorder_policy_config: not available yet" in result.output


def every_path(cls: type[Any]) -> set[str]:
    from headrace.config.errors import leaf_paths

    return set(leaf_paths(cls))


def test_flags_point_at_settings_that_exist() -> None:
    assert {flag.path for flag in (*LLM_FLAGS, *SERVING_LLM_FLAGS)} <= every_path(LlmArgs)
    assert {flag.path for flag in SERVER_FLAGS} <= set(ServerOptions.model_fields)
    names = [name for flag in (*LLM_FLAGS, *SERVING_LLM_FLAGS, *SERVER_FLAGS) for name in flag.names]
    assert len(names) == len(set(names))


REFERENCE_FLAGS = """
tokenizer custom_tokenizer host port backend log_level max_beam_width max_batch_size max_num_tokens max_seq_len
tensor_parallel_size tp_size pipeline_parallel_size pp_size context_parallel_size cp_size moe_expert_parallel_size
ep_size moe_cluster_parallel_size cluster_size gpus_per_node free_gpu_memory_fraction
kv_cache_free_gpu_memory_fraction kv_cache_dtype num_postprocess_workers num_serve_frontends
num_input_processor_workers num_media_load_workers trust_remote_code revision hf_revision config extra_llm_api_options
set reasoning_parser tool_parser metadata_server_config_file server_role disagg_cluster_uri
fail_fast_on_attention_window_too_large otlp_traces_endpoint enable_chunked_prefill enable_attention_dp media_io_kwargs
video_pruning_rate chat_template allow_request_chat_template served_model_name generation-config grpc grpc-protocol
middleware custom_module_dirs post_processor_hook report_addr enable_visual_gen visual_gen_args telemetry no-telemetry
agent_percentage agent_types
""".split()  # noqa: SIM905


def test_every_flag_of_the_reference_is_there() -> None:
    help_text = run("--help").output
    shown = set(re.findall(r"--[a-z0-9_]+", help_text))
    assert {f"--{name.replace('-', '_')}" for name in REFERENCE_FLAGS} <= shown


def test_help_shows_defaults() -> None:
    text = " ".join(run("--help").output.split())
    assert "Most sequences in a step. [default: 2048]" in text
    assert "Share of free memory for the KV cache. [default: 0.9]" in text
    assert "Address to listen on. [default: localhost]" in text
    assert "--tensor-parallel-size" not in text


def test_options_of_commands_without_a_server() -> None:
    @click.command()
    @llm_options
    @click.pass_context
    def chat(ctx: click.Context) -> None:
        click.echo(str(resolved_from_click(ctx, "m").args.max_batch_size))

    assert CliRunner().invoke(chat, ["--max_batch_size", "3"]).output == "3\n"
    assert CliRunner().invoke(chat, ["--port", "3"]).exit_code == 2


def config(*words: str) -> Result:
    return CliRunner().invoke(config_group, list(words))


def test_config_check(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yml", tmp_path / "bad.yml"
    good.write_text("max_batch_size: 4\ntorch_compile_config: {}\n")
    bad.write_text("max_bach_size: 4\n")
    assert config("check", str(good)).exit_code == 0
    assert f"{good}: no effect on this device: torch_compile_config" in config("check", str(good)).output
    result = config("check", str(good), str(bad), str(tmp_path / "none.yml"))
    assert result.exit_code == 2
    assert f"{good}: ok" in result.output
    assert f"{bad}:1: max_bach_size: unknown key, did you mean 'max_batch_size'?" in result.output
    assert "none.yml: no such file" in result.output
    assert config("check").exit_code == 2


def test_config_check_knows_disaggregated_services(tmp_path: Path) -> None:
    file = tmp_path / "d.yml"
    file.write_text("context_servers: {}\ngeneration_servers: {}\n")
    result = config("check", str(file))
    assert result.exit_code == 2
    assert f"{file}:1: context_servers: not available yet (disaggregated serving)" in result.output


def test_config_show(tmp_path: Path) -> None:
    file = tmp_path / "c.yml"
    file.write_text("max_batch_size: 4\n")
    result = config("show", "m", "--config", str(file), "--set", "stream_interval=2")
    assert result.exit_code == 0
    assert result.output == f"model: m  # MODEL\nmax_batch_size: 4  # {file}:1\nstream_interval: 2  # --set\n"
    assert '"stream_interval": "--set"' in config("show", "--set", "stream_interval=2", "--format", "json").output
    assert "tokens_per_block: 32" in config("show", "--all").output
    assert "nonsense: unknown key" in str(config("show", "--set", "nonsense=1").exception)


def test_config_schema(tmp_path: Path) -> None:
    assert config("schema").output.startswith("{\n")
    file = tmp_path / "s.json"
    assert config("schema", "disagg", "--output", str(file)).exit_code == 0
    assert '"context_servers"' in file.read_text()
    assert "can't be written" in config("schema", "--output", str(tmp_path / "no" / "s.json")).output
