"""The routes of operators: health, metrics, statistics, the configuration, the profiler."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from headrace import wire
from headrace.front.errors import RequestError
from headrace.server.bodies import ProfileBody, parse_body
from headrace.server.errors import Unavailable, error_response
from headrace.server.metrics import Infos
from headrace.server.reading import read_json
from headrace.server.replies import refusal_of, reply
from headrace.server.service import Service
from headrace.server.tenancy import Caller

__all__ = ["add_operation_routes"]

SCRAPE_TIMEOUT_S = 2.0
"""Prometheus gives up after ten: a stuck engine must not hide the server's own numbers."""
PROBE_TIMEOUT_S = 10.0
PROBE = b'{"prompt": [0], "max_tokens": 1, "temperature": 0, "ignore_eos": true, "priority": 1}'
PROFILE_TIMEOUT_S = 60.0
"""A trace of many steps takes long to write."""


def add_operation_routes(app: FastAPI, service: Service, version: str) -> None:
    routes = _OperationRoutes(service, version)
    app.add_route("/health", routes.health, ["GET"])
    app.add_route("/health/ready", routes.ready, ["GET"])
    app.add_route("/health_generate", routes.generate, ["GET"])
    app.add_route("/version", routes.version, ["GET"])
    app.add_route("/server_info", routes.server_info, ["GET"])
    app.add_route("/metrics", routes.metrics, ["GET"])
    app.add_route("/prometheus/metrics", routes.metrics, ["GET"])
    app.add_route("/stats", routes.stats, ["GET"])
    app.add_route("/iteration_stats", routes.iteration_stats, ["GET"])
    app.add_route("/start_profile", routes.start_profile, ["POST"])
    app.add_route("/stop_profile", routes.stop_profile, ["POST"])


class _OperationRoutes:
    def __init__(self, service: Service, version: str) -> None:
        self._service = service
        self._version = version
        self._told: wire.Metrics | None = None
        """What the runtime said last."""

    async def health(self, request: Request) -> Response:
        """200 while the process is up, whatever the engine does."""
        return Response()

    async def ready(self, request: Request) -> Response:
        """200 when requests are answered; 503 while loading, draining, without an engine or with a stuck one."""
        state = self._state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def generate(self, request: Request) -> Response:
        """200 once the engine has made a token for this very request."""
        try:
            await self._probe()
        except Exception as error:
            return error_response(refusal_of(error))
        return PlainTextResponse("OK")

    async def version(self, request: Request) -> Response:
        """The server's version."""
        return JSONResponse({"version": self._version})

    async def metrics(self, request: Request) -> Response:
        """All series in Prometheus' text form; also while the model loads and after the engine has failed."""
        service = self._service
        try:
            answer = await service.ask(wire.GetMetrics(), timeout_s=SCRAPE_TIMEOUT_S)
            assert isinstance(answer, wire.Metrics)
            self._told = answer
        except Unavailable:
            pass  # the last known values stand
        gauges = {"engine_ready": float(self._state == "ready"), "engine_stalled": float(service.stall.is_stalled)}
        gauges |= self._memory()
        text = await asyncio.to_thread(service.meter.metrics.render, self._told, gauges, self._infos())
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def server_info(self, request: Request) -> Response:
        """What the engine settled on, and the resolved configuration without its secrets."""
        return await reply(self._info)

    async def stats(self, request: Request) -> Response:
        """The state now; reading it changes nothing."""
        return await reply(self._stats)

    async def iteration_stats(self, request: Request) -> Response:
        """A record for each step since the last call, for one reader."""
        return await reply(self._iterations)

    async def start_profile(self, request: Request) -> Response:
        """Begin a trace of the engine, in the folder that the operator named."""
        return await reply(lambda: self._start_profile(request))

    async def stop_profile(self, request: Request) -> Response:
        """End the trace; answered when it is written."""
        return await reply(self._stop_profile)

    @property
    def _state(self) -> str:
        return "stalled" if self._service.stall.is_stalled else self._service.state

    async def _probe(self) -> None:
        service = self._service
        prepared = service.kitchen().completion(PROBE, Caller(request_id="health_generate"))
        job = service.submit(prepared, is_probe=True)
        try:
            await asyncio.wait_for(job.feed.next(), PROBE_TIMEOUT_S)
        except (TimeoutError, asyncio.TimeoutError):
            raise Unavailable(f"the engine made no token in {PROBE_TIMEOUT_S:g} s", code="no_answer") from None
        finally:
            service.abort(job)  # finds something to do only where the token did not come
        if job.feed.error is not None:
            raise job.feed.error

    async def _info(self) -> dict[str, Any]:
        service, info = self._service, self._service.info()
        return {
            "version": self._version,
            "model": info.model,
            "model_type": info.model_type,
            "served_model_name": service.options.model_name,
            "max_seq_len": info.max_seq_len,
            "max_num_tokens": info.max_num_tokens,
            "max_batch_size": info.max_batch_size,
            "startup_s": info.startup.seconds,
            "kv_cache": {
                "num_blocks": info.kv_num_blocks,
                "tokens_per_block": info.tokens_per_block,
                "max_tokens": info.max_kv_tokens,
                "block_reuse": info.reuse.is_on,
                "reuse_granularity": info.reuse.granularity,
                "event_buffer_max_size": info.reuse.event_buffer,
                "salt_from_api_key": service.options.cache_salt_from_api_key,
                "scales": {str(layer): scales for layer, scales in info.startup.kv_scales.items()},
            },
            "memory": info.startup.memory,
            "configuration": info.startup.settings,
            "server": service.options.operations.shown,
        }

    async def _stats(self) -> dict[str, Any]:
        service = self._service
        answer = await service.ask(wire.GetStats(drain=False))
        assert isinstance(answer, wire.Stats)
        router, counters = service.router, service.counters
        server = {
            "state": self._state,
            "acceptedRequests": counters.accepted,
            "rejectedRequests": counters.rejected,
            "disconnectedRequests": counters.disconnected,
            "runningRequests": len(service.jobs),
            "waitingSequences": router.num_waiting,
            "waitingTokens": router.num_waiting_tokens,
        }
        return {**(answer.iterations[-1] if answer.iterations else {}), "server": server}

    async def _iterations(self) -> list[dict[str, Any]]:
        if self._service.info().startup.settings.get("enable_iter_perf_stats") is False:
            raise RequestError(
                "no statistics of steps are kept: start with enable_iter_perf_stats: true in the --config file",
                code="not_enabled",
            )
        answer = await self._service.ask(wire.GetStats())
        assert isinstance(answer, wire.Stats)
        return answer.iterations

    async def _start_profile(self, request: Request) -> dict[str, Any]:
        async with read_json(request) as data:
            body, _ = parse_body(data, ProfileBody)
        kinds = {"GPU" if kind == "CUDA_PROFILER" else kind for kind in body.activities or ()}
        return await self._profile(
            wire.Profile(
                start=True,
                num_steps=body.num_steps or 0,
                start_step=body.start_step or 0,
                activities=sorted(kinds),
            )
        )

    async def _stop_profile(self) -> dict[str, Any]:
        return await self._profile(wire.Profile(start=False))

    async def _profile(self, wanted: wire.Profile) -> dict[str, Any]:
        if not self._service.options.operations.can_profile:
            raise RequestError("profiling is off: start the server with --profile_dir FOLDER", code="not_enabled")
        answer = await self._service.ask(wanted, timeout_s=PROFILE_TIMEOUT_S)
        assert isinstance(answer, wire.Profiled)
        if answer.error:
            raise RequestError(answer.error, code="profiler_state", status=409)
        return {"message": answer.message, "files": answer.files}

    def _model(self) -> wire.ModelInfo | None:
        """None while it is loading, and when it is gone."""
        try:
            return self._service.info()
        except Unavailable:
            return None

    def _memory(self) -> dict[str, float]:
        """Of the plan of a rank: what is taken at start is all there is."""
        info = self._model()
        memory = {} if info is None else info.startup.memory
        if not memory or memory["device"].startswith("cpu"):
            return {"gpu_memory_usage_bytes": 0.0, "pinned_memory_usage_bytes": 0.0}
        taken = {"device": 0.0, "host": 0.0}
        for row in memory["rows"]:
            if row["tier"] in taken and row["use"] != "reserve":
                taken[row["tier"]] += row["bytes"]
        return {"gpu_memory_usage_bytes": taken["device"], "pinned_memory_usage_bytes": taken["host"]}

    def _infos(self) -> Infos:
        info = self._model()
        if info is None:
            return {}
        settings = info.startup.settings
        kv: dict[str, Any] = settings.get("kv_cache_config") or {}
        drafts: dict[str, Any] = settings.get("speculative_config") or {}
        size = int(settings.get("tensor_parallel_size") or 1)
        return {
            "model_config_info": {
                "model": info.model,
                "served_model_name": self._service.options.model_name,
                "dtype": settings.get("dtype", ""),
                "quantization": info.startup.quantization,
                "max_model_len": info.max_seq_len,
                "gpu_type": info.startup.memory.get("device", ""),
            },
            "parallel_config_info": {
                "tensor_parallel_size": size,
                "pipeline_parallel_size": settings.get("pipeline_parallel_size") or 1,
                "context_parallel_size": settings.get("context_parallel_size") or 1,
                "gpu_count": size,
                "expert_parallel_size": settings.get("moe_expert_parallel_size") or 1,
            },
            "speculative_config_info": {
                "spec_enabled": settings.get("speculative_config") is not None,
                "spec_method": drafts.get("decoding_type") or "",
                "spec_num_tokens": drafts.get("max_draft_len") or 0,
                "spec_draft_model": drafts.get("speculative_model") or "",
            },
            "kv_cache_config_info": {
                "page_size": info.tokens_per_block,
                "enable_block_reuse": info.reuse.is_on,
                "enable_partial_reuse": kv.get("enable_partial_reuse", ""),
                "free_gpu_memory_fraction": kv.get("free_gpu_memory_fraction", ""),
                "cache_dtype": kv.get("dtype", ""),
            },
        }
