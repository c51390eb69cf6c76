"""Settings of serving: metrics, sleeping, usage data, cluster membership, and what only the HTTP server needs."""

from __future__ import annotations

import itertools
from typing import Any, Literal, cast

from pydantic import SecretStr, field_validator, model_validator
from typing_extensions import Self

from headrace.config.base import ConfigModel, beta, prototype, stable
from headrace.config.errors import ConfigError, Problem

LogLevel = Literal["internal_error", "error", "warning", "info", "verbose", "debug", "trace"]
Buckets = list[float] | None

BUDGETED_EFFORTS = ("default", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort` that may have a budget, and the word for its absence."""
MAX_THINKING_BUDGET = 1 << 30


class PrometheusMetricsConfig(ConfigModel):
    """Upper bounds of histogram buckets in seconds; null keeps the built-in ones."""

    e2e_request_latency_buckets: Buckets = prototype(None, "From arrival to the last token.")
    time_to_first_token_buckets: Buckets = prototype(None, "From arrival to the first token.")
    time_per_output_token_buckets: Buckets = prototype(None, "Between two tokens.")
    request_queue_time_buckets: Buckets = prototype(None, "In the waiting queue.")
    request_prefill_time_buckets: Buckets = prototype(None, "From the first step to the first token.")
    request_decode_time_buckets: Buckets = prototype(None, "From the first token to the last.")
    request_inference_time_buckets: Buckets = prototype(None, "From the first step to the last token.")

    @field_validator("*")
    @classmethod
    def _grow(cls, value: Buckets) -> Buckets:
        if value is not None and (not value or any(low >= high for low, high in itertools.pairwise(value))):
            raise ValueError("bounds must be a non-empty list in strictly increasing order")
        return value


RestoreMode = Literal["NONE", "MEMSET", "CPU", "PINNED"]
SLEEP_COMPONENTS = (
    "sampler", "drafter", "guided_decoder", "spec_resource_manager", "_no_capture_init_kv_cache",
    "_no_capture_init_extra_resources", "model_extra", "executor_extra", "kv_cache", "model", "draft_model",
    "model_weights", "draft_model_weights",
)  # fmt: skip


class SleepConfig(ConfigModel):
    """What happens to device memory while the engine sleeps."""

    restore_modes: dict[str, RestoreMode] = prototype(
        {}, "How each component's memory comes back; kv_cache is NONE unless named, others are kept on the host."
    )

    @field_validator("restore_modes")
    @classmethod
    def _known_components(cls, value: dict[str, RestoreMode]) -> dict[str, RestoreMode]:
        unknown = sorted(value.keys() - set(SLEEP_COMPONENTS))
        if unknown:
            raise ValueError(f"unknown component '{unknown[0]}'; valid: {', '.join(SLEEP_COMPONENTS)}")
        return value


class TelemetryConfig(ConfigModel):
    """Usage data. Headrace collects none; the keys are accepted so that old files load."""

    disabled: bool = stable(False, "Has no effect: nothing is ever sent.")
    usage_context: str | None = stable(None, "Has no effect and can't be set.")

    @field_validator("usage_context")
    @classmethod
    def _not_ours_to_set(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("can't be set: remove the key")
        return value


class MinimalInstances(ConfigModel):
    """Servers a cluster needs before it answers."""

    context_servers: int = prototype(1, "Context servers.", ge=0)
    generation_servers: int = prototype(1, "Generation servers.", ge=0)


class DisaggClusterConfig(ConfigModel):
    """A cluster whose servers find each other through a store."""

    cluster_uri: str = prototype(..., "Address of the store: http://host:port or etcd://host:port.")
    cluster_name: str = prototype("", "Name of the cluster within the store.")
    minimal_instances: MinimalInstances = prototype(MinimalInstances, "Servers needed before requests are taken.")
    heartbeat_interval_sec: int = prototype(5, "Seconds between signs of life.", gt=0)
    inactive_timeout_sec: int = prototype(10, "Silence after which a server counts as gone.", gt=0)

    @field_validator("cluster_uri")
    @classmethod
    def _known_scheme(cls, value: str) -> str:
        if not value.startswith(("http://", "https://", "etcd://")):
            raise ValueError(f"must start with http:// or etcd://, got '{value}'")
        return value

    @model_validator(mode="after")
    def _beats_before_timeout(self) -> Self:
        if self.inactive_timeout_sec <= self.heartbeat_interval_sec:
            message = f"must be greater than heartbeat_interval_sec ({self.heartbeat_interval_sec})"
            raise ConfigError(Problem("inactive_timeout_sec", message))
        return self


class ServerOptions(ConfigModel):
    """What the HTTP server needs beside the engine's arguments: flags, and the YAML keys that only it reads."""

    host: str = beta("localhost", "Address to listen on.", min_length=1)
    port: int = beta(8000, "Port to listen on; 0 takes a free one.", ge=0, le=65535)
    served_model_name: str | None = prototype(None, "Name of the model in the API; null is the MODEL argument.")
    log_level: LogLevel = beta("info", "Least important messages that are shown.")
    chat_template: str | None = prototype(None, "Jinja chat template, as text or as a file.")
    allow_request_chat_template: bool = prototype(False, "Let a request bring its own chat template.")
    api_keys: list[SecretStr] = stable([], "Keys of which a client has to send one; none leaves the server open.")
    api_key_file: str | None = stable(None, "File of keys, one a line; blank lines and lines from # on do not count.")
    metrics_without_key: bool = stable(False, "Let metrics be read without an API key.")
    strict_fields: bool = stable(False, "Refuse bodies with unknown fields instead of warning.")
    cors_origins: list[str] = stable([], "Origins of web pages that may call, for example https://example.com, or *.")
    ssl_certfile: str | None = stable(None, "PEM file of the certificate and its chain: the server speaks HTTPS.")
    ssl_keyfile: str | None = stable(None, "PEM file of its private key, where the certificate's file has none.")
    ssl_keyfile_password: SecretStr | None = stable(None, "Password of that key.")
    ssl_ca_certs: str | None = stable(None, "PEM file of authorities: clients have to show a certificate of theirs.")
    cache_salt_from_api_key: bool = prototype(False, "Share cached prefixes among requests of one API key only.")
    middleware: list[str] = prototype([], "Import paths of ASGI middleware.")
    custom_module_dirs: list[str] = prototype([], "Folders of Python modules to import first.")
    tool_parser: str | None = prototype(None, "Parser of tool calls, or auto.")
    thinking_budgets: dict[str, int] = stable(
        {}, "Most tokens of reasoning by a chat's reasoning_effort; `default` is for chats without one."
    )
    clamp_max_tokens: bool = stable(
        False, "Ask for fewer new tokens instead of refusing where the context has no room."
    )
    max_stored_responses: int = stable(1000, "Responses of /v1/responses that are kept; 0 keeps none.", ge=0)
    max_stored_response_mb: int = stable(256, "Megabytes that they may take together.", ge=0)
    embeddings_only: bool = stable(False, "Serve /v1/embeddings and nothing that generates.")
    embedding_pooling: Literal["auto", "last", "mean"] = stable(
        "auto", "Hidden states of an embedding; auto is what the model's files state, else the last token's."
    )
    page: bool = stable(True, "Serve the page for people at /.")
    show_cached_text: bool = stable(
        False, "Show the texts of cached prefixes to whoever may use them; by default only their lengths are shown."
    )
    media_io_kwargs: dict[str, Any] | None = prototype(None, "Parameters of media readers, by modality.")
    num_input_processor_workers: int = prototype(8, "Threads that prepare inputs.", gt=0)
    num_media_load_workers: int = prototype(8, "Threads that fetch media.", gt=0)
    grpc: bool = prototype(False, "Speak gRPC instead of HTTP.")
    http_port: int | None = prototype(None, "Port for HTTP beside gRPC; null is no HTTP.", ge=0, le=65535)
    grpc_protocol: Literal["smg", "openengine"] = prototype("smg", "Dialect of gRPC.")
    metadata_server_config_file: str | None = prototype(None, "YAML file of a metadata server.")
    server_role: Literal["CONTEXT", "GENERATION", "MM_ENCODER", "VISUAL_GEN", "EMBEDDING"] | None = prototype(
        None, "Part of this server in a cluster."
    )
    disagg_cluster_uri: str | None = prototype(None, "Address of the cluster to join.")
    report_addr: str | None = prototype(None, "Address that is told where this server listens.")
    enable_visual_gen: bool = prototype(False, "Serve an image or video generator.")
    visual_gen_args: str | None = prototype(None, "YAML file with its arguments.")
    disagg_cluster: DisaggClusterConfig | None = prototype(None, "Cluster to join.")
    internal_request_auth_key: SecretStr | None = prototype(None, "Key between servers of a cluster.", min_length=1)

    @field_validator("api_keys")
    @classmethod
    def _no_empty_key(cls, value: list[SecretStr]) -> list[SecretStr]:
        """A header without a key would equal an empty one; one with a space at its ends is never equal."""
        for key in value:
            text = key.get_secret_value()
            if not text or text != text.strip():
                raise ValueError("a key must not be empty, nor begin or end with a space: give another, or none at all")
        return value

    @field_validator("thinking_budgets", mode="before")
    @classmethod
    def _as_typed(cls, value: Any) -> Any:
        """From flags they come as a list of EFFORT=TOKENS."""
        if not isinstance(value, list):
            return value
        pairs = [str(item).partition("=") for item in cast("list[Any]", value)]
        wrong = next(("".join(pair) for pair in pairs if not pair[2].isdecimal()), None)
        if wrong is not None:
            raise ValueError(f"give EFFORT=TOKENS, for example low=1024, got '{wrong}'")
        return {effort: int(tokens) for effort, _, tokens in pairs}

    @field_validator("thinking_budgets")
    @classmethod
    def _known_efforts(cls, value: dict[str, int]) -> dict[str, int]:
        for effort, tokens in value.items():
            if effort not in BUDGETED_EFFORTS:
                raise ValueError(f"'{effort}' is no effort; valid: {', '.join(BUDGETED_EFFORTS)}")
            if not 0 <= tokens <= MAX_THINKING_BUDGET:
                raise ValueError(f"a budget is from 0 to {MAX_THINKING_BUDGET} tokens, got {tokens} for '{effort}'")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _an_origin(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.count("/") != 2):
                raise ValueError(f"an origin is scheme://host[:port] without a path, or *, got '{origin}'")
        return value

    @model_validator(mode="after")
    def _a_certificate_first(self) -> Self:
        for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
            if self.__dict__[name] is not None and self.ssl_certfile is None:
                raise ConfigError(Problem(name, "means nothing without a certificate: give --ssl_certfile"))
        return self

    @model_validator(mode="after")
    def _http_beside_grpc(self) -> Self:
        if self.http_port is not None and not self.grpc:
            raise ConfigError(Problem("http_port", "is for HTTP beside --grpc: without it, HTTP listens at --port"))
        if self.grpc and self.ssl_keyfile_password is not None:
            raise ConfigError(Problem("ssl_keyfile_password", "gRPC takes no encrypted key: decrypt it into a file"))
        return self

    @model_validator(mode="after")
    def _keys_for_salts(self) -> Self:
        if self.cache_salt_from_api_key and not self.api_keys:
            problem = Problem(
                "cache_salt_from_api_key", "there are no API keys to tell clients apart by: give --api_key"
            )
            raise ConfigError(problem)
        return self

    @field_validator("server_role", mode="before")
    @classmethod
    def _upper(cls, value: Any) -> Any:
        return value.upper() if isinstance(value, str) else value


SERVER_YAML_KEYS = ("allow_request_chat_template", "disagg_cluster", "internal_request_auth_key")
"""Keys of a `--config` file that belong to the server and not to the engine."""
