"""What lies around the routes: ids and counts, other sites' pages, keys, the operator's own middleware."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from headrace.server.auth import METRICS_PATHS, OPEN_PATHS, ApiKeys
from headrace.server.envelope import Envelope
from headrace.server.page import PAGE_PATHS
from headrace.server.service import Service

__all__ = ["wrap"]

SHOWN_HEADERS = ("x-request-id", "x-headrace-warnings", "server-timing", "retry-after")
PREFLIGHT_AGE_S = 600


def wrap(app: FastAPI, service: Service) -> None:
    """From the inside out: the one added last sees a request first."""
    operations = service.options.operations
    for middleware in reversed(operations.middleware):
        app.add_middleware(middleware)
    if service.options.api_keys:
        paths = OPEN_PATHS
        if operations.metrics_open:
            paths |= METRICS_PATHS
        if operations.page:
            paths |= PAGE_PATHS
        app.add_middleware(ApiKeys, keys=service.options.api_keys, open_paths=paths)
    if operations.cors_origins:  # outside the keys: a browser asks for permission without one
        app.add_middleware(
            CORSMiddleware,
            allow_origins=operations.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=SHOWN_HEADERS,
            max_age=PREFLIGHT_AGE_S,
        )
    app.add_middleware(Envelope, metrics=service.meter.metrics)
