"""How calls of the token-level service end, and what lies around them: health, reflection, events, keys, TLS, spans."""

from __future__ import annotations

import importlib.util
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest as Asked
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.front.fake import FakeLoop, fake_info
from headrace.front.tracing import tracer_over
from headrace.server.rpc import servicer
from headrace.server.rpc.kv_stream import KvBatches
from headrace.server.rpc.messages import SERVICE, message
from headrace.server.rpc.place import reserve
from headrace.server.run import Tls
from headrace.server.service import Operations

from ..harness import MODEL
from ..test_service import until
from .harness import Client, Code, Running, count_of, details, health, refused, request, running


class TestEnds:
    def test_a_cancelled_call_frees_its_work(self, client: Client, server: Running) -> None:
        call = client.call("Generate", request(max_tokens=3000, streaming=True))
        next(call)
        call.cancel()
        assert until(server.is_empty)
        assert server.runtime.loop.aborted[-1][1] == "abort"

    def test_a_deadline(self, client: Client, server: Running) -> None:
        start_s = time.monotonic()
        error = refused(client, request(max_tokens=4000, streaming=True), timeout=0.3)
        assert error.code() is Code.DEADLINE_EXCEEDED and time.monotonic() - start_s < 5
        assert until(server.is_empty)

    def test_the_runtime_knows_the_deadline(self, client: Client, server: Running) -> None:
        call = client.call("Generate", request(max_tokens=3000, streaming=True), timeout=7)
        next(call)
        (entry,) = server.runtime.loop.running.values()
        assert entry.request.timeout_s is not None and 5 < entry.request.timeout_s < 7.1
        call.cancel()
        assert until(server.is_empty)

    def test_abort(self, client: Client, server: Running) -> None:
        call = client.call("Generate", request(request_id="long", max_tokens=3000, streaming=True))
        next(call)
        abort = message("AbortRequest")
        assert not client.call("Abort", abort(request_id="other")).success
        assert client.call("Abort", abort(request_id="long")).success
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is Code.CANCELLED and "request_id" in str(caught.value.details())
        assert until(server.is_empty)
        text = server.service.meter.metrics.render(None, {}, {}).decode()
        assert 'reason="requested"} 1.0' in text

    @pytest.mark.parametrize("streaming", [False, True])
    def test_a_fault(self, folder: Path, streaming: bool) -> None:
        loop = FakeLoop(fake_info())
        with running(folder, loop=loop, step_s=0.002) as server, server.client() as client:
            call = client.call("Generate", request(max_tokens=1000, streaming=streaming))
            assert until(lambda: any(entry.num_tokens > 5 for entry in loop.running.values()))
            loop.fault = "broken kernel"
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is Code.INTERNAL and "broken kernel" in caught.value.details()
            assert details(caught.value, ErrorInfo)[0].reason == "REQUEST_FAILED"

    def test_many_streams(self, client: Client, server: Running) -> None:
        def one(number: int) -> list[int]:
            answers = client.generate(request([number % 200, 7], max_tokens=20, streaming=True), timeout=60)
            return list(answers[-1].complete.output_token_ids)

        with ThreadPoolExecutor(64) as pool:
            outputs = list(pool.map(one, range(200)))
        assert outputs == [[number % 200, 7] * 10 for number in range(200)]
        assert until(server.is_empty)

    def test_calls_that_end_in_every_way_add_up(self, folder: Path) -> None:
        chance = random.Random(1)
        ways = [chance.choice(["whole", "cancel", "deadline", "refused"]) for _ in range(60)]

        def one(way: str) -> None:
            try:
                call = client.call(
                    "Generate",
                    request(max_tokens=5 if way == "whole" else 0 if way == "refused" else 3000, streaming=True),
                    timeout=1.0 if way == "deadline" else 60,  # it has arrived by then, on a busy machine too
                )
                for number, _ in enumerate(call):
                    if way == "cancel" and number == 3:
                        call.cancel()
            except grpc.RpcError:
                assert way != "whole"

        with running(folder, step_s=0.001) as server, server.client() as client:
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(one, ways))
            assert until(server.is_empty)
            text = server.service.meter.metrics.render(None, {}, {}).decode()
            assert server.service.meter.num_open == 0
        found = {name: total_of(text, name) for name in ("requests_accepted", "requests", "request_abort")}
        taken = len(ways) - ways.count("refused")
        assert found["requests_accepted"] == found["requests"] == taken
        late = re.findall(r'finish_reason="timeout".*} (\d+)\.0', text)
        assert found["request_abort"] + int(late[0]) == taken - ways.count("whole")
        assert int(late[0]) > 0 and found["request_abort"] >= ways.count("cancel")
        assert total_of(text, "request_error") == ways.count("refused")

    def test_a_client_that_takes_nothing_is_given_up(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(servicer, "STALL_TIMEOUT_S", 0.5)
        info = fake_info(max_seq_len=40_000)
        with running(folder, loop=FakeLoop(info), step_s=0.0) as server:
            options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
            with grpc.insecure_channel(server.address, options=options) as channel:
                given = request(max_tokens=30_000, streaming=True)
                given.output_config.logprobs = 20
                call = Client(channel).call("Generate", given, timeout=60)
                next(call)
                assert until(lambda: not server.service.jobs, 20)
                with pytest.raises(grpc.RpcError):
                    list(call)
                assert until(server.is_empty, 20)


class TestTheRest:
    def test_health_and_what_is_served(self, client: Client) -> None:
        # It is told some times a second: at first, and behind a slow step, the last word may be the other one.
        for name in (SERVICE, ""):
            assert until(lambda name=name: health(client, name) == health_pb2.HealthCheckResponse.SERVING)
        watched = client.health.Watch(health_pb2.HealthCheckRequest(), timeout=5)
        assert any(each.status == health_pb2.HealthCheckResponse.SERVING for each in watched)
        watched.cancel()
        assert client.call("HealthCheck").status == "OK"
        info = client.call("GetModelInfo")
        assert (info.model_id, info.max_seq_len, info.vocab_size, info.max_batch_size) == (MODEL, 4096, 258, 256)
        assert client.call("GetServerInfo").world_size == 1

    def test_embed(self, client: Client) -> None:
        given = message("EmbedRequest")(request_id="e")
        given.tokenized.input_token_ids.extend([97, 98, 99])
        answer = client.call("Embed", given)
        assert answer.request_id == "e" and answer.prompt_tokens == 3 and len(answer.embedding) == 4
        assert sum(value * value for value in answer.embedding) == pytest.approx(1, abs=1e-5)
        with pytest.raises(grpc.RpcError) as caught:
            client.call("Embed")
        assert caught.value.code() is Code.INVALID_ARGUMENT

    def test_reflection(self, client: Client) -> None:
        """What grpcurl does: list the services, and read their files."""
        stub = ServerReflectionStub(client.channel)
        asked = [Asked(list_services=""), Asked(file_containing_symbol=SERVICE)]
        asked += [Asked(file_containing_symbol="smg.grpc.common.KvEventBatch")]
        listed, *files = stub.ServerReflectionInfo(iter(asked), timeout=5)
        names = {service.name for service in listed.list_services_response.service}
        assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        found = [FileDescriptorProto.FromString(f.file_descriptor_response.file_descriptor_proto[0]) for f in files]
        assert [file.name for file in found] == ["trtllm_service.proto", "kv_events.proto"]

    def test_kv_events(self, client: Client, server: Running) -> None:
        block = {
            "block_hash": "ff" * 32,
            "tokens": [{"token_id": 5}, {"token_id": 6}],
            "cache_level": 0,
            "cache_salt": None,
            "lora_id": None,
        }
        told = [
            event(0, {"type": "created", "num_blocks_per_cache_level": [4]}),
            event(1, {"type": "stored", "parent_hash": "00" * 7 + "01" + "00" * 24, "blocks": [block]}),
            event(2, {"type": "stored", "parent_hash": None, "blocks": [{**block, "cache_salt": "s"}]}),
            event(3, {"type": "removed", "block_hashes": ["00" * 7 + "02" + "00" * 24]}),
            event(4, {"type": "removed", "block_hashes": ["03" * 32]}, window=16),
        ]
        server.runtime.loop.kv_events = told
        call = client.call("SubscribeKvEvents")
        batch = next(call)
        with pytest.raises(grpc.RpcError) as caught:
            next(client.call("SubscribeKvEvents"))
        assert caught.value.code() is Code.FAILED_PRECONDITION
        assert batch.sequence_number == 1 and [one.event_id for one in batch.events] == [1, 3]
        (stored,) = batch.events[0].stored.blocks
        assert (stored.block_hash, list(stored.token_ids), stored.block_size) == (-1, [5, 6], 2)
        assert batch.events[0].stored.parent_block_hash == 1 and list(batch.events[1].removed.block_hashes) == [2]
        server.runtime.loop.kv_events = [event(5, {"type": "removed", "block_hashes": [7]})]
        assert next(call).sequence_number == 2
        call.cancel()
        assert KvBatches().batch_of([]) is None

    def test_keys(self, folder: Path) -> None:
        with running(folder, api_keys=("one", "two")) as server, server.client() as client:
            error = refused(client, request())
            assert error.code() is Code.UNAUTHENTICATED and details(error, ErrorInfo)[0].reason == "INVALID_API_KEY"
            assert refused(client, request(), metadata=[("authorization", "Bearer three")]).code() is (
                Code.UNAUTHENTICATED
            )
            assert client.generate(request(), metadata=[("authorization", "Bearer two")])
            assert client.generate(request(), metadata=[("x-api-key", "one")])
            assert client.call("HealthCheck").status == "OK" and health(client)
            with pytest.raises(grpc.RpcError) as caught:
                client.call("GetModelInfo")
            assert caught.value.code() is Code.UNAUTHENTICATED
            assert count_of(server, "401") == 3

    def test_tls_with_client_certificates(self, folder: Path) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        chain, key, roots = (folder / name for name in ("chain.pem", "key.pem", "roots.pem"))
        certificate.cert_chain_pems[0].write_to_path(str(chain))
        certificate.private_key_pem.write_to_path(str(key))
        authority.cert_pem.write_to_path(str(roots))
        with running(folder, tls=Tls(str(chain), str(key), None, str(roots))) as server:
            mine = grpc.ssl_channel_credentials(roots.read_bytes(), key.read_bytes(), chain.read_bytes())
            with grpc.secure_channel(server.address, mine) as channel:
                assert Client(channel).generate(request())
            without = grpc.ssl_channel_credentials(roots.read_bytes())
            with grpc.secure_channel(server.address, without) as channel:
                assert refused(Client(channel), request(), timeout=5).code() is Code.UNAVAILABLE

    def test_spans(self, folder: Path) -> None:
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        with running(folder, operations=Operations(tracer=tracer_over(provider))) as server, server.client() as client:
            assert client.generate(request(), metadata=[("traceparent", parent)])
            assert until(lambda: len(exporter.get_finished_spans()) == 4)
        root = exporter.get_finished_spans()[-1]
        assert root.context is not None and f"{root.context.trace_id:032x}" == parent.split("-")[1]


def total_of(text: str, name: str) -> float:
    """Over all labels."""
    lines = [line for line in text.splitlines() if line.startswith(f"trtllm_{name}_total{{")]
    return sum(float(line.split()[-1]) for line in lines)


def event(number: int, data: dict[str, Any], *, window: int = 4096) -> dict[str, Any]:
    return {"event_id": number, "data": data, "window_size": window, "hash_algo": "v2_sha256"}


def test_an_address_that_is_taken() -> None:
    with reserve("127.0.0.1", 0) as place, pytest.raises(OSError, match="choose another --port"):
        reserve("127.0.0.1", place.getsockname()[1])


def test_the_descriptors_are_what_the_files_say() -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    path = Path(__file__).parents[3] / "tools/protos.py"
    spec = importlib.util.spec_from_file_location("protos", path)
    assert spec is not None and spec.loader is not None
    protos = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(protos)
    assert protos.are_current(), "run python tools/protos.py"


def test_a_client_that_was_generated_from_the_files(server: Running, tmp_path: Path) -> None:
    """As docs/serving.md has it; in a process of its own, where nothing of ours is loaded."""
    protos = Path(__file__).parents[3] / "src/headrace/server/rpc"
    names = ["trtllm_service.proto", "kv_events.proto"]
    words = [f"-I{protos}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}", *names]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *words], check=True, timeout=60)
    program = f"""
import grpc, trtllm_service_pb2 as pb, trtllm_service_pb2_grpc as rpc
with grpc.insecure_channel("{server.address}") as channel:
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_token_ids=[97, 98]), max_tokens=3)
    (answer,) = rpc.TrtllmServiceStub(channel).Generate(request, timeout=20)
    print(list(answer.complete.output_token_ids), answer.complete.finish_reason)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[97, 98, 97] length\n", done.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.cli.serving import place_of
    from headrace.config.serving import ServerOptions

    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in [name for name in sys.modules if name.startswith("headrace.server.rpc")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"grpc: needs the package grpc: install headrace\[grpc\]"):
        place_of(ServerOptions(grpc=True, port=0))
