"""Command-line flags of the configuration: one table, one meaning each, and only what was typed counts."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from headrace import env
from headrace.config.base import default_of
from headrace.config.errors import ConfigError, Problem
from headrace.config.llm_args import LlmArgs
from headrace.config.resolution import Resolved, Typed, resolve
from headrace.config.serving import ServerOptions
from headrace.log import LEVELS

_Command = TypeVar("_Command", bound=Callable[..., Any])
_STATE = "headrace.flags"
_SHOWN_FROM_CLASS = object()


@dataclass(frozen=True)
class Flag:
    """One flag and the setting it changes."""

    names: tuple[str, ...]
    """Spellings without dashes, preferred first; hyphens work wherever underscores do."""
    path: str
    """Dotted key of LlmArgs, or a field of ServerOptions."""
    type: Any
    help: str
    default: Any = _SHOWN_FROM_CLASS
    """Shown in the help; taken from the configuration class unless given."""
    multiple: bool = False
    off: str = ""
    """Spelling that switches a flag without value off again."""
    inverts: bool = False
    """The setting is the flag's opposite."""


REASONING_PARSERS = (
    "deepseek_r1, deepseek_v4, gemma4, glm45, glm47, kimi_k2, kimi_k3, minimax_m2, "
    "minimax_m3, mistral, nemotron_v3, openai, qwen3, qwen3_5"
)
TOOL_PARSERS = (
    "deepseek_v3, deepseek_v31, deepseek_v32, deepseek_v4, gemma4, glm45, glm47, hermes, kimi_k2, "
    "kimi_k3, llama3_json, minimax_m2, minimax_m3, mistral, openai, pythonic, qwen3, qwen3_coder"
)
"""Names that `server/parsers` has, without loading them; a test compares."""

LLM_FLAGS = (
    Flag(("tokenizer",), "tokenizer", str, "Tokenizer to use instead of the model's: folder or hub id."),
    Flag(("custom_tokenizer",), "custom_tokenizer", str, "Alias or import path of a tokenizer class."),
    Flag(("backend",), "backend", str, "Accepted for old command lines: pytorch."),
    Flag(("dtype",), "dtype", str, "Type of weights and activations."),
    Flag(("load_format",), "load_format", str, "auto, or dummy for random weights."),
    Flag(("max_beam_width",), "max_beam_width", int, "Widest beam search a request may ask for."),
    Flag(("max_batch_size",), "max_batch_size", int, "Most sequences in a step."),
    Flag(("max_num_tokens",), "max_num_tokens", int, "Most tokens computed in a step."),
    Flag(("max_seq_len",), "max_seq_len", str, "Longest sequence, or auto for what fits.", default="the model's"),
    Flag(("tensor_parallel_size", "tp_size"), "tensor_parallel_size", int, "Ranks that share each layer."),
    Flag(("pipeline_parallel_size", "pp_size"), "pipeline_parallel_size", int, "Stages the layers are cut into."),
    Flag(("context_parallel_size", "cp_size"), "context_parallel_size", int, "Ranks that share each sequence."),
    Flag(("moe_expert_parallel_size", "ep_size"), "moe_expert_parallel_size", int, "Ranks that divide the experts."),
    Flag(("moe_cluster_parallel_size", "cluster_size"), "moe_cluster_parallel_size", int, "Deprecated."),
    Flag(("gpus_per_node",), "gpus_per_node", int, "GPUs of a machine.", default="all"),
    Flag(
        ("free_gpu_memory_fraction", "kv_cache_free_gpu_memory_fraction", "kv_cache_free_gpu_mem_fraction"),
        "kv_cache_config.free_gpu_memory_fraction",
        float,
        "Share of free memory for the KV cache.",
    ),
    Flag(("kv_cache_dtype",), "kv_cache_config.dtype", str, "Type of the KV cache."),
    Flag(("trust_remote_code",), "trust_remote_code", bool, "Run Python code that comes with the checkpoint."),
    Flag(("revision", "hf_revision"), "revision", str, "Revision of the model on the hub."),
    Flag(
        ("enable_chunked_prefill",),
        "enable_chunked_prefill",
        bool,
        "Compute long prompts over several steps.",
        off="disable_chunked_prefill",
    ),
    Flag(("enable_attention_dp",), "enable_attention_dp", bool, "Data-parallel attention."),
    Flag(("reasoning_parser",), "reasoning_parser", str, f"Format of the reasoning: auto, {REASONING_PARSERS}."),
    Flag(("video_pruning_rate",), "multimodal_config.video_pruning_rate", float, "Share of video tokens dropped."),
    Flag(("generation_config",), "generation_config", str, "Source of sampling defaults: trtllm or auto."),
    Flag(("post_processor_hook",), "post_processor_hook", str, "Import path of a class that may rewrite output."),
    Flag(("otlp_traces_endpoint",), "otlp_traces_endpoint", str,
         "OpenTelemetry collector that gets a span of each request: http://HOST:4317."),
    Flag(("telemetry",), "telemetry_config.disabled", bool, "No effect: nothing is ever sent.", True,
         off="no_telemetry", inverts=True),
    Flag(("agent_percentage",), "reorder_policy_config.policy_args.agent_percentage", float, "Share kept for agents."),
    Flag(("agent_types",), "reorder_policy_config.policy_args.agent_types", str, "Agent types, by commas."),
    Flag(("model_impl",), "model_impl", str, "Model code: auto, native or transformers."),
    Flag(("fast_start",), "fast_start", bool, "Answer at once; CUDA graphs are captured as they come to be needed."),
    Flag(("engine_threads",), "engine_threads", int, "CPU threads of the engine.", default="by machine"),
)  # fmt: skip
"""Flags of every command that loads a model."""

SERVING_LLM_FLAGS = (
    Flag(("num_postprocess_workers",), "num_postprocess_workers", int, "Processes that turn ids into text."),
    Flag(("num_serve_frontends",), "num_serve_frontends", int, "HTTP processes that share the port."),
    Flag(
        ("max_queued_requests", "max_queue_size"),
        "max_queued_requests",
        int,
        "Waiting requests before new ones get 429.",
    ),
    Flag(("max_queued_tokens",), "max_queued_tokens", int, "Waiting prompt tokens before new ones get 429."),
    Flag(("request_timeout_s",), "request_timeout_s", float, "Longest life of a request in seconds."),
    Flag(("shutdown_timeout_s",), "shutdown_timeout_s", float, "Seconds that running requests get on shutdown."),
    Flag(("stall_timeout_s",), "stall_timeout_s", float, "Seconds without a step after which the server isn't ready."),
    Flag(("stream_interval",), "stream_interval", int, "Tokens between two pieces of a stream."),
    Flag(("profile_dir",), "profile_dir", str, "Folder for traces of the engine (POST /start_profile)."),
)
"""Flags of the server that are settings of the engine."""

SERVER_FLAGS = (
    Flag(("host",), "host", str, "Address to listen on."),
    Flag(("port",), "port", int, "Port to listen on; 0 takes a free one."),
    Flag(("served_model_name",), "served_model_name", str, "Name of the model in the API.", default="MODEL"),
    Flag(("chat_template",), "chat_template", str, "Jinja chat template, as text or as a file."),
    Flag(("allow_request_chat_template",), "allow_request_chat_template", bool, "Let requests bring chat templates."),
    Flag(("api_key",), "api_keys", str, f"Key clients have to send (others can see it in the process list; better "
         f"{env.API_KEY.name}).", None, multiple=True),
    Flag(("api_key_file",), "api_key_file", str, "File of keys, one a line."),
    Flag(("metrics_without_key",), "metrics_without_key", bool, "Let metrics be read without a key."),
    Flag(("strict_fields",), "strict_fields", bool, "Refuse unknown fields of requests instead of warning."),
    Flag(("cors_origin",), "cors_origins", str, "Origin of web pages that may call, or *.", None, multiple=True),
    Flag(("ssl_certfile",), "ssl_certfile", str, "PEM file of the certificate: speak HTTPS."),
    Flag(("ssl_keyfile",), "ssl_keyfile", str, "PEM file of the certificate's private key."),
    Flag(("ssl_keyfile_password",), "ssl_keyfile_password", str, "Password of the private key."),
    Flag(("ssl_ca_certs",), "ssl_ca_certs", str, "PEM file of authorities that clients' certificates must be of."),
    Flag(("cache_salt_from_api_key",), "cache_salt_from_api_key", bool, "Share cached prefixes by API key only."),
    Flag(("middleware",), "middleware", str, "Import path of ASGI middleware.", None, multiple=True),
    Flag(("custom_module_dirs",), "custom_module_dirs", str, "Folder of modules to import.", None, multiple=True),
    Flag(("tool_parser",), "tool_parser", str, f"Format of tool calls: auto, {TOOL_PARSERS}."),
    Flag(("thinking_budget",), "thinking_budgets", str, "Most tokens of reasoning for a reasoning_effort, as "
         "EFFORT=TOKENS; 'default' is for chats without one.", None, multiple=True),
    Flag(("clamp_max_tokens",), "clamp_max_tokens", bool, "Lower max_tokens to what the context has room for instead "
         "of refusing the request."),
    Flag(("max_stored_responses",), "max_stored_responses", int, "Responses that are kept for later requests."),
    Flag(("max_stored_response_mb",), "max_stored_response_mb", int, "Megabytes of kept responses."),
    Flag(("embeddings_only",), "embeddings_only", bool, "Serve embeddings only ('headrace serve embeddings MODEL')."),
    Flag(("embedding_pooling",), "embedding_pooling", str, "Hidden states of an embedding: auto, last or mean."),
    Flag(("page",), "page", bool, "Serve the page for people at /: a playground and a dashboard.", off="no_page"),
    Flag(("show_cached_text",), "show_cached_text", bool, "Show texts of cached prefixes to whoever may use them."),
    Flag(("media_io_kwargs",), "media_io_kwargs", json.loads, "JSON parameters of media readers, by modality."),
    Flag(("num_input_processor_workers",), "num_input_processor_workers", int, "Threads that prepare inputs."),
    Flag(("num_media_load_workers",), "num_media_load_workers", int, "Threads that fetch media."),
    Flag(("grpc",), "grpc", bool, "Speak gRPC instead of HTTP."),
    Flag(("http_port",), "http_port", int, "Port for HTTP beside gRPC.", default="no HTTP"),
    Flag(("grpc_protocol",), "grpc_protocol", str, "Dialect of gRPC: smg or openengine."),
    Flag(("metadata_server_config_file",), "metadata_server_config_file", str, "YAML file of a metadata server."),
    Flag(("server_role",), "server_role", str, "Part of this server in a cluster."),
    Flag(("disagg_cluster_uri",), "disagg_cluster_uri", str, "Address of the cluster to join."),
    Flag(("report_addr",), "report_addr", str, "Address that is told where this server listens."),
    Flag(("enable_visual_gen",), "enable_visual_gen", bool, "Serve an image or video generator."),
    Flag(("visual_gen_args",), "visual_gen_args", str, "YAML file with its arguments."),
)  # fmt: skip
"""Flags of the server alone."""


class _Option(click.Option):
    """An option whose hyphenated spellings work without filling the help, and that keeps the one that was typed."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts, self.secondary_opts
        self.opts, self.secondary_opts = _with_hyphens(self.opts), _with_hyphens(self.secondary_opts)
        try:
            super().add_to_parser(parser, ctx)
            for spelling in (*self.opts, *self.secondary_opts):
                self._keep_spelling(parser, ctx, spelling)
        finally:
            self.opts, self.secondary_opts = shown

    def _keep_spelling(self, parser: Any, ctx: click.Context, spelling: str) -> None:
        """click has no way to ask which of its names an option was given by: its parser's table is no promise, and
        without it the first name stands for all."""
        table: dict[str, Any] = vars(parser).get("_long_opt", {})
        if spelling not in table:
            return

        def process(take: Callable[..., None], value: Any, state: Any) -> None:
            _state(ctx).spellings[self.name or ""] = spelling
            take(value, state)

        table[spelling] = copy.copy(table[spelling])
        table[spelling].process = functools.partial(process, table[spelling].process)


def _with_hyphens(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(spelling for name in names for spelling in (name, "--" + name[2:].replace("_", "-"))))


class _State:
    """What was typed on one command line."""

    def __init__(self) -> None:
        self.llm: dict[str, Typed] = {}
        self.server: dict[str, Typed] = {}
        self.config: str | None = None
        self.sets: tuple[str, ...] = ()
        self.spellings: dict[str, str] = {}
        """By the option's name in Python: the spelling by which it was given, the last one if several."""

    def spelling(self, param: click.Parameter, documented: str) -> str:
        """As it was typed; `documented` is for values that came from elsewhere."""
        return self.spellings.get(param.name or "", documented)


def _state(ctx: click.Context) -> _State:
    return ctx.meta.setdefault(_STATE, _State())


def llm_options(command: _Command) -> _Command:
    """Add `--config`, `--set`, `--log_level` and the flags of a model; the function gets no argument of it."""
    return _add(command, [*_common(), *(_option(flag, LlmArgs) for flag in LLM_FLAGS)])


def serve_options(command: _Command) -> _Command:
    """Add the flags of a model and of the server."""
    flags = [*(_option(flag, LlmArgs) for flag in (*LLM_FLAGS, *SERVING_LLM_FLAGS))]
    window = _Option(
        ["--fail_fast_on_attention_window_too_large"],
        expose_value=False,
        default=True,
        type=bool,
        show_default=True,
        help="Deprecated, no effect: windows that do not fit always fail at start.",
    )
    return _add(command, [*(_option(flag, ServerOptions) for flag in SERVER_FLAGS), *_common(), *flags, window])


def resolved_from_click(ctx: click.Context, model: str | None, *, needs_model: bool = True) -> Resolved:
    """Resolve what was typed on the command line of `ctx`, and the server's environment variables.

    Raises:
        ConfigError: with a line for each problem; the exit code is 2.
    """
    state = _state(ctx)
    flags = dict(state.llm)
    if model is not None:
        flags["model"] = Typed("MODEL", model)
    server = {"log_level": Typed(env.LOG_LEVEL.name, env.log_level()), **state.server}
    keys = server.get("api_keys", Typed("--api_key", []))
    if "api_key_file" in server:
        keys = Typed("--api_key_file", [*keys.value, *_keys_in(server["api_key_file"].value)])
    if env.api_keys():
        keys = Typed(env.API_KEY.name, [*keys.value, *env.api_keys()])
    if keys.value:
        server["api_keys"] = keys
    return resolve(config=state.config, flags=flags, server_flags=server, sets=state.sets, needs_model=needs_model)


def _keys_in(file: str) -> list[str]:
    """Raises ConfigError: it can't be read, or has no keys and would leave the server open."""
    try:
        lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is no text"
        message = f"{file}: {reason}: give one with a key a line"
        raise ConfigError(Problem("api_key_file", message, "--api_key_file")) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(Problem("api_key_file", f"{file} has no keys: write one on each line", "--api_key_file"))
    return keys


def _add(command: _Command, options: Sequence[click.Option]) -> _Command:
    """As click's decorators do: on the command if there is one, else for the one to come."""
    if isinstance(command, click.Command):
        command.params.extend(options)
        return cast("_Command", command)
    pending: list[click.Parameter] = command.__dict__.setdefault("__click_params__", [])
    pending.extend(reversed(options))
    return command


def _common() -> list[click.Option]:
    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        state = _state(ctx)
        if param.name == "config":
            state.config = value
        elif param.name == "sets":
            state.sets = tuple(value)
        elif ctx.get_parameter_source(param.name or "") is not ParameterSource.DEFAULT:
            state.server["log_level"] = Typed("--log_level", value)

    return [
        _Option(
            ["--config", "--extra_llm_api_options", "config"],
            metavar="FILE",
            type=click.Path(),
            expose_value=False,
            callback=keep,
            help="YAML file of settings.",
        ),
        _Option(
            ["--set", "sets"],
            metavar="PATH=YAML",
            multiple=True,
            expose_value=False,
            callback=keep,
            help="Change one setting over file and flags, for example kv_cache_config.dtype=auto; repeatable.",
        ),
        _Option(
            ["--log_level"],
            type=click.Choice(sorted(LEVELS), case_sensitive=False),
            expose_value=False,
            callback=keep,
            default="info",
            show_default=True,
            help="Least important messages shown; chat and generate show warnings unless another one is given.",
        ),
    ]


def _option(flag: Flag, cls: type[LlmArgs] | type[ServerOptions]) -> click.Option:
    def keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if ctx.get_parameter_source(param.name or "") in (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP):
            return
        state = _state(ctx)
        typed = state.spelling(param, f"--{flag.names[0]}")
        if flag.type is bool:
            value = value != flag.inverts
        elif flag.path.endswith("agent_types"):
            value = [part.strip() for part in value.split(",")]
        elif flag.multiple:
            value = list(value)
        (state.llm if cls is LlmArgs else state.server)[flag.path] = Typed(typed, value)

    default = _shown_default(flag, cls)
    names = [f"--{name}" for name in flag.names]
    if flag.off:
        names[0] += f"/--{flag.off}"
    return _Option(
        [*names, f"flag_{flag.names[0]}"],
        type=None if flag.type is bool else _Parsed(flag.type) if flag.type is json.loads else flag.type,
        is_flag=flag.type is bool,
        default=default if flag.default is _SHOWN_FROM_CLASS or flag.type is bool else None,
        multiple=flag.multiple,
        expose_value=False,
        callback=keep,
        show_default=flag.default if isinstance(flag.default, str) else default is not None,
        metavar=None if flag.type in (bool, int, float) else "TEXT",
        help=flag.help,
    )


def _shown_default(flag: Flag, cls: type[LlmArgs] | type[ServerOptions]) -> Any:
    if flag.default is not _SHOWN_FROM_CLASS:
        return flag.default
    *parents, name = flag.path.split(".")
    owner: Any = cls
    for parent in parents:
        held = default_of(owner, parent)
        if held is None:
            return None
        owner = type(held)
    default = default_of(owner, name)
    return str(default) if isinstance(default, Enum) else default


class _Parsed(click.ParamType):
    """A value read by a function that raises ValueError."""

    name = "json"

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(f"not valid JSON: {error}", param, ctx)
