"""The file of a disaggregated service: an orchestrator in front of context and generation servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import ConfigDict, SecretStr, ValidationError, field_validator, model_validator
from typing_extensions import Self

from headrace.config.base import ConfigModel, deprecated, prototype, stable
from headrace.config.errors import ConfigError, Problem, join, problems_from, unknown_key
from headrace.config.llm_args import LlmArgs
from headrace.config.serving import DisaggClusterConfig
from headrace.config.source import Document, read_document

FLAT_ALIASES = {
    "kv_cache_dtype": "kv_cache_config.dtype",
    "free_gpu_memory_fraction": "kv_cache_config.free_gpu_memory_fraction",
    "video_pruning_rate": "multimodal_config.video_pruning_rate",
}
"""Short spellings that this file, and no other, has."""


class RouterArgs(ConfigModel):
    """Parameters of a router; each router reads its own."""

    model_config = ConfigDict(allow_inf_nan=True)  # load_cap: no limit

    use_tokens: bool = prototype(False, "Count tokens instead of requests.")
    max_batch_size: int = prototype(64, "Requests a server is thought to run at once.", gt=0)
    tokens_per_block: int | None = prototype(None, "Block size; null is that of the servers' KV cache.", gt=0)
    custom_tokenizer: str | None = prototype(None, "Tokenizer class of the router.")
    tokenizer_dir: str | None = prototype(None, "Tokenizer folder of the router.")
    use_harmony: bool | None = prototype(None, "Render prompts with harmony.")
    model_path: str | None = prototype(None, "Model folder of the router.")
    track_routed_blocks: bool = prototype(True, "Count the blocks of requests that are on their way.")
    load_weight: float = prototype(0.25, "Weight of load against cache hits.", ge=0)
    load_cap: float = prototype(float("inf"), "Load above which a server gets no more for its hits.", gt=0)
    max_sessions: int | None = prototype(None, "Conversations that are remembered.", gt=0)


class RouterConfig(ConfigModel):
    """How a group's requests are spread over its servers."""

    type: Literal["round_robin", "load_balancing", "kv_cache_aware", "conversation"] = stable("round_robin", "Router.")
    args: RouterArgs = stable(RouterArgs, "Its parameters.")


class ServerGroupConfig(ConfigModel):
    """Servers of one kind; every key of LlmArgs may stand here too."""

    TRANSPARENT: ClassVar[frozenset[str]] = frozenset({"llm"})
    """Fields whose own name is no part of a key's path: files write the keys of `llm` beside the others."""

    num_instances: int = stable(1, "Number of servers.", ge=0)
    urls: list[str] = stable([], "Their addresses, host:port each.")
    router: RouterConfig = stable(RouterConfig, "How requests are spread over them.")
    llm: LlmArgs = stable(LlmArgs, "Settings of the servers.")

    @model_validator(mode="before")
    @classmethod
    def _collect(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        values = cast("dict[str, Any]", data)
        if "llm" in values and not isinstance(values["llm"], LlmArgs):
            raise ConfigError(Problem("llm", unknown_key("llm", cls)))
        llm = {name: value for name, value in values.items() if _is_llm_key(name)}
        own = {name: value for name, value in values.items() if name not in llm}
        return {**own, "llm": llm} if llm else own

    @field_validator("urls")
    @classmethod
    def _host_and_port(cls, value: list[str]) -> list[str]:
        for url in value:
            port = url.rsplit(":", 1)[-1]
            if ":" not in url or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"expected host:port, got '{url}'")
        return value

    @model_validator(mode="after")
    def _one_url_each(self) -> Self:
        if self.urls and len(self.urls) != self.num_instances:
            raise ConfigError(Problem("urls", f"names {len(self.urls)} but num_instances is {self.num_instances}"))
        return self


class ConditionalDisaggConfig(ConfigModel):
    """When the generation server computes a prompt itself."""

    max_local_prefill_length: int = prototype(0, "Prompts with fewer uncached tokens are not sent away.", ge=0)


class OtlpConfig(ConfigModel):
    """Where traces go."""

    otlp_traces_endpoint: str | None = prototype(None, "Address that OpenTelemetry traces are sent to.")


class DisaggConfig(ConfigModel):
    """A disaggregated service. Keys of LlmArgs at the top level hold for both groups of servers."""

    hostname: str = stable("localhost", "Address to listen on.", min_length=1)
    port: int = stable(8000, "Port to listen on.", ge=0, le=65535)
    max_retries: int = stable(1, "Times a request is sent again after a server failed.", ge=0)
    context_servers: ServerGroupConfig | None = stable(None, "Servers that compute prompts.")
    generation_servers: ServerGroupConfig | None = stable(None, "Servers that generate.")
    conditional_disagg_config: ConditionalDisaggConfig | None = prototype(None, "When a prompt stays where it is.")
    otlp_config: OtlpConfig | None = prototype(None, "Where traces go.")
    disagg_cluster: DisaggClusterConfig | None = prototype(None, "Find the servers through a cluster instead of urls.")
    node_id: int | None = stable(None, "Number of this machine in request ids; null derives it.", ge=0, le=255)
    schedule_style: Literal["context_first", "generation_first"] = prototype(
        "context_first", "Which side reserves room first."
    )
    allow_request_chat_template: bool = prototype(False, "Let a request bring its own chat template.")
    gen_strip_message_history: bool = prototype(False, "Leave the messages out of what generation servers are sent.")
    gen_tokids_ctxbytes: bool = prototype(False, "Send prompt ids to generation servers in packed form.")
    num_workers: int = prototype(1, "Processes of the orchestrator.", ge=1)
    disagg_coordinator_url: str | None = prototype(None, "Address of a coordinator of several orchestrators.")
    return_perf_metrics: bool = prototype(False, "Measure each request.")
    perf_metrics_output_dir: str | None = prototype(None, "Folder for a JSON-lines file of request figures.")
    perf_metrics_max_requests: int = deprecated(0, "Has no effect.", ge=0)
    server_keep_alive_timeout: int = prototype(10, "Seconds an idle connection stays open.", ge=0)
    conversation_affinity_header_for_subagents: str | None = prototype(None, "Header that names a conversation.")
    subagent_affinity_scope: Literal["context", "both"] = prototype(
        "context", "Groups that keep conversations together."
    )
    internal_request_auth_key: SecretStr | None = prototype(None, "Key between the servers.", min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, data: Any) -> Any:
        """Hand top-level keys of LlmArgs to both groups; a group may repeat a value, not change it."""
        if not isinstance(data, dict):
            return data
        values = cast("dict[str, Any]", data)
        shared = {name: item for name, item in values.items() if name not in cls.model_fields and _is_llm_key(name)}
        result = {name: item for name, item in values.items() if name not in shared}
        shared, problems = _spelled_out(shared, "")
        for group in ("context_servers", "generation_servers"):
            own = values.get(group)
            if not isinstance(own, dict):
                continue
            spelled, unclear = _spelled_out(cast("dict[str, Any]", own), group)
            result[group], differing = _merged(shared, spelled, group)
            problems += unclear + differing
        if problems:
            raise ConfigError(problems)
        return result

    @model_validator(mode="after")
    def _servers_are_known(self) -> Self:
        if self.disagg_cluster is not None:
            return self
        for name in ("context_servers", "generation_servers"):
            if self.__dict__[name] is None:
                raise ConfigError(Problem(name, "required unless disagg_cluster is set"))
        if (self.conditional_disagg_config is not None) and self.generation_servers is not None:
            if self.generation_servers.router.type != "kv_cache_aware":
                message = "conditional_disagg_config needs the router kv_cache_aware"
                raise ConfigError(Problem("generation_servers.router.type", message))
        return self


class MetadataServerConfig(ConfigModel):
    """The file of a metadata server through which servers are found."""

    server_type: Literal["etcd"] = prototype("etcd", "Kind of server.")
    hostname: str = prototype("localhost", "Its address.")
    port: int = prototype(2379, "Its port.", ge=1, le=65535)
    health_check_timeout: float = prototype(5.0, "Seconds to wait for its answer.", gt=0)
    refresh_interval: float = prototype(10.0, "Seconds between looks at the list of servers.", gt=0)


def is_disagg(document: Document) -> bool:
    """Whether a file describes a disaggregated service rather than one engine."""
    return "context_servers" in document.values or "generation_servers" in document.values


def load_disagg(document: Document | str | Path, *, refuse_missing_features: bool = True) -> DisaggConfig:
    """The disaggregated service in a file. ConfigError has a line for each problem."""
    document = document if isinstance(document, Document) else read_document(document)
    try:
        config = DisaggConfig.model_validate(document.values)
    except ValidationError as error:
        found = sorted(problems_from(error, DisaggConfig), key=lambda problem: document.line(problem.path))
        raise ConfigError([replace(problem, source=document.where(problem.path)) for problem in found]) from None
    if refuse_missing_features:
        first = next(name for name in ("context_servers", "generation_servers") if name in document.values)
        raise ConfigError(Problem(first, "not available yet (disaggregated serving)", document.where(first)))
    return config.freeze()


def _is_llm_key(name: str) -> bool:
    return name in LlmArgs.model_fields or name in LlmArgs.ALIASES or name in FLAT_ALIASES


def _spelled_out(values: dict[str, Any], prefix: str) -> tuple[dict[str, Any], list[Problem]]:
    """The same values with short spellings moved to where they belong."""
    result = dict(values)
    problems: list[Problem] = []
    for short, path in FLAT_ALIASES.items():
        if short not in result:
            continue
        parent, name = path.split(".")
        held: Any = result.get(parent, {})
        if isinstance(held, dict):
            below = cast("dict[str, Any]", held)
            if name in below and below[name] != result[short]:
                problems.append(Problem(join(prefix, short), f"contradicts {path} ({below[name]}): keep one of them"))
            result[parent] = {**below, name: result.pop(short)}
    return result, problems


def _merged(shared: dict[str, Any], own: dict[str, Any], path: str) -> tuple[dict[str, Any], list[Problem]]:
    """Both sets of keys, mappings key by key, and a problem for each value that differs."""
    result, problems = {**shared, **own}, list[Problem]()
    for name in shared.keys() & own.keys():
        above, here = shared[name], own[name]
        if isinstance(above, dict) and isinstance(here, dict):
            below = cast("dict[str, Any]", above), cast("dict[str, Any]", here)
            result[name], found = _merged(*below, join(path, name))
            problems += found
        elif above != here:
            problems.append(Problem(join(path, name), f"is {here} here but {above} at the top level: keep one of them"))
    return result, problems
