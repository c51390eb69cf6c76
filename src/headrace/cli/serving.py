"""From the resolved configuration to what a server process is told; the same in each of several."""

from __future__ import annotations

import importlib
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, Literal

from headrace import __version__
from headrace.cli.fronts import num_fronts
from headrace.config.llm_args import LlmArgs
from headrace.config.serving import ServerOptions
from headrace.config.show import plain
from headrace.front.tracing import open_tracer
from headrace.server.parsing import parser_name
from headrace.server.rules import RequestRules
from headrace.server.run import Tls, Way, bind
from headrace.server.service import Apis, Operations, Service, ServiceOptions

SECRETS = ("api_keys", "internal_request_auth_key", "ssl_keyfile_password")


def service_options(args: LlmArgs, options: ServerOptions, *, front: int) -> ServiceOptions:
    """Of the server process with number `front`, from 1.

    Raises:
        ValueError: a middleware that can't be imported, a folder for traces that is none, a collector's address that
            can't be used.
    """
    if args.profile_dir is not None and not os.access(args.profile_dir, os.W_OK | os.X_OK):
        raise ValueError(f"profile_dir: {args.profile_dir} is no folder that can be written to: create it first")
    shown = {name: plain(value) for name, value in options.__dict__.items() if name not in SECRETS}
    count = num_fronts(args)
    buckets = args.prometheus_metrics_config
    return ServiceOptions(
        model_name=options.served_model_name or args.model,
        stream_interval=args.stream_interval,
        request_timeout_s=args.request_timeout_s,
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        shutdown_timeout_s=args.shutdown_timeout_s,
        stall_timeout_s=args.stall_timeout_s,
        num_workers=options.num_input_processor_workers,
        reasoning_parser=_parser(args.reasoning_parser, "reasoning"),
        tool_parser=_parser(options.tool_parser, "tool"),
        api_keys=tuple(key.get_secret_value() for key in options.api_keys),
        cache_salt_from_api_key=options.cache_salt_from_api_key,
        rules=_rules(args, options),
        apis=Apis(
            max_stored_responses=options.max_stored_responses,
            max_stored_response_bytes=options.max_stored_response_mb << 20,
            embeddings_only=options.embeddings_only,
            embedding_pooling=options.embedding_pooling,
        ),
        operations=Operations(
            front=front,
            num_fronts=count,
            metrics_open=options.metrics_without_key,
            strict_fields=options.strict_fields,
            cors_origins=tuple(options.cors_origins),
            middleware=tuple(_imported(path) for path in options.middleware),
            buckets={} if buckets is None else dict(buckets.__dict__),
            can_profile=args.profile_dir is not None,
            tracer=open_tracer(args.otlp_traces_endpoint),
            page=options.page,
            show_cached_text=options.show_cached_text,
            shown={**shown, "has_api_keys": bool(options.api_keys), "num_processes": count},
        ),
    )


def _rules(args: LlmArgs, options: ServerOptions) -> RequestRules:
    """Raises ValueError: a budget for reasoning that nobody could find."""
    if options.thinking_budgets and args.reasoning_parser is None:
        raise ValueError("thinking_budgets: how does this model mark its reasoning? Give --reasoning_parser (or auto)")
    return RequestRules(
        thinking_budgets=options.thinking_budgets,
        clamps_max_tokens=options.clamp_max_tokens,
        takes_templates=options.allow_request_chat_template,
    )


def _parser(given: str | None, kind: Literal["reasoning", "tool"]) -> str | None:
    """Raises ValueError: no parser of that name."""
    return None if given is None else parser_name(given, kind)


def tls_of(options: ServerOptions) -> Tls | None:
    """Raises ValueError: the files are none that TLS can use."""
    if options.ssl_certfile is None:
        return None
    password = options.ssl_keyfile_password
    secret = None if password is None else password.get_secret_value()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=secret or "")
    except (OSError, ssl.SSLError, ValueError) as error:
        files = " with ".join(filter(None, [options.ssl_certfile, options.ssl_keyfile]))
        raise ValueError(f"ssl_certfile: {files}: {_why(error)}: give a PEM certificate and its key") from None
    try:
        if options.ssl_ca_certs is not None:
            context.load_verify_locations(options.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"ssl_ca_certs: {options.ssl_ca_certs}: {_why(error)}: give a PEM file") from None
    return Tls(options.ssl_certfile, options.ssl_keyfile, secret, options.ssl_ca_certs)


def rpc_of(options: ServerOptions, place: socket.socket, tls: Tls | None) -> Callable[[Service], Way] | None:
    """What makes the gRPC server; None where HTTP is spoken. `place` has its address."""
    if not options.grpc:
        return None
    from headrace.server.rpc.server import RpcServer

    return lambda service: RpcServer(service, place, tls, __version__)


def place_of(options: ServerOptions) -> socket.socket:
    """A socket with the server's address.

    Raises:
        ValueError: gRPC is wanted and its packages are missing.
        OSError: the address can't be had.
    """
    if not options.grpc:
        return bind(options.host, options.port)
    try:
        from headrace.server.rpc import server  # noqa: F401 - all of its packages
        from headrace.server.rpc.place import reserve
    except ImportError as error:
        name = (error.name or "grpc").split(".")[0]
        raise ValueError(f"grpc: needs the package {name}: install headrace[grpc]") from None
    return reserve(options.host, options.port)


def _imported(path: str) -> Any:
    """An ASGI middleware class from `package.module:Class` or `package.module.Class`."""
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"middleware: {path} can't be imported ({error}): give package.module.Class") from None
    if not callable(found):
        raise ValueError(f"middleware: {path} is no class: give an ASGI middleware that is made with the application")
    return found


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
