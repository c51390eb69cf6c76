"""What the token-level service generates and what it refuses, with a real gRPC client."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_health.v1 import health_pb2

from headrace.front.errors import RequestError
from headrace.front.fake import FakeLoop, fake_info, says
from headrace.server.rpc import frames
from headrace.server.rpc.messages import SERVICE, message

from ..test_service import until
from .harness import Client, Code, Running, count_of, details, health, refused, request, running


class TestGenerate:
    def test_the_whole(self, client: Client) -> None:
        (answer,) = client.generate(request(request_id="mine", max_tokens=5))
        whole = answer.complete
        assert answer.request_id == "mine"
        assert list(whole.output_token_ids) == [97, 98, 99, 97, 98] and whole.finish_reason == "length"
        assert (whole.prompt_tokens, whole.completion_tokens, whole.sequence_index) == (3, 5, 0)

    def test_a_stream(self, client: Client) -> None:
        answers = client.generate(request(streaming=True, max_tokens=5))
        assert [answer.WhichOneof("response") for answer in answers[-1:]] == ["complete"]
        chunks = [answer.chunk for answer in answers[:-1]]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == list(answers[-1].complete.output_token_ids) == [97, 98, 99, 97, 98]
        assert chunks[-1].completion_tokens == 5 and len({answer.request_id for answer in answers}) == 1
        assert answers[0].request_id.startswith("gen-")

    def test_choices_and_logprobs(self, client: Client) -> None:
        given = request(streaming=True, max_tokens=3)
        given.sampling_config.num_return_sequences = 2
        given.sampling_config.temperature = 1.0
        given.output_config.logprobs = 2
        given.output_config.prompt_logprobs = 0
        given.output_config.return_perf_metrics = True
        answers = client.generate(given)
        wholes = [answer.complete for answer in answers if answer.HasField("complete")]
        assert sorted(whole.sequence_index for whole in wholes) == [0, 1]
        for whole in wholes:
            assert [one.token_id for one in whole.logprobs] == [97, 98, 99]
            assert whole.logprobs[0].logprob == -1.0 and whole.logprobs[0].top_logprobs[0].token_id == 98
            assert [one.token_id for one in whole.prompt_logprobs] == [98, 99]
            assert abs(whole.perf_metrics.arrival_time - time.time()) < 60
            assert whole.perf_metrics.last_token_time >= whole.perf_metrics.first_token_time
        chunked = [
            one.token_id for answer in answers for one in answer.chunk.logprobs if not answer.chunk.sequence_index
        ]
        assert chunked == [97, 98, 99]

    def test_beams(self, client: Client) -> None:
        given = request(max_tokens=4)
        given.sampling_config.beam_width = 2
        wholes = [answer.complete for answer in client.generate(given)]
        assert [len(whole.output_token_ids) for whole in wholes] == [4, 3]

    @pytest.mark.parametrize("streaming", [False, True])
    def test_ends(self, folder: Path, streaming: bool) -> None:
        """EOS and stop ids are shown to who asks for them; a stop string is found here."""
        loop = FakeLoop(fake_info(), script=says([97, 98, 99], then=257))
        with running(folder, loop=loop) as server, server.client() as client:

            def last(**fields: Any) -> Any:
                return client.generate(request(max_tokens=20, streaming=streaming, **fields))[-1].complete

            whole = last()
            assert list(whole.output_token_ids) == [97, 98, 99] and whole.finish_reason == "stop"
            assert whole.WhichOneof("matched_stop") is None
            assert list(last(include_stop_token_in_output=True).output_token_ids) == [97, 98, 99, 257]
            whole = last(stop_token_ids=[99])
            assert list(whole.output_token_ids) == [97, 98] and whole.matched_token_id == 99
            whole = last(stop=["bc"])
            assert whole.matched_stop_str == "bc" and whole.finish_reason == "stop"
            assert last(ignore_eos=True).finish_reason == "length" == last(end_id=-1).finish_reason
            assert list(last(end_id=98).output_token_ids) == [97]

    def test_a_grammar_reaches_the_runtime(self, client: Client, server: Running) -> None:
        given = request(max_tokens=400, streaming=True)
        given.guided_decoding.guide_type = 3
        given.guided_decoding.guide = "[a-c]+"
        call = client.call("Generate", given)
        next(call)
        (entry,) = server.runtime.loop.running.values()
        assert entry.request.grammar is not None and entry.request.grammar.kind == "regex"
        call.cancel()
        assert until(server.is_empty)

    def test_greedy_unless_something_is_said(self, client: Client, server: Running) -> None:
        def sampling(**fields: Any) -> Any:
            given = request(max_tokens=400, streaming=True)
            for name, value in fields.items():
                setattr(given.sampling_config, name, value)
            call = client.call("Generate", given, metadata=[("x-session-id", "talk")])
            next(call)
            (entry,) = server.runtime.loop.running.values()
            call.cancel()
            assert until(server.is_empty)
            assert entry.request.conversation == "talk"
            return entry.request.sampling

        assert sampling().temperature == 0.0
        assert (sampling(temperature=0.5, seed=2**63).temperature, sampling(top_k=3).top_k) == (0.5, 3)


def test_chunks_that_have_gathered_are_joined() -> None:
    """By sequence, in order, and before what ends them."""

    def chunk(sequence: int, *tokens: int) -> bytes:
        made = message("GenerateResponse")(request_id="r")
        made.chunk.token_ids.extend(tokens)
        made.chunk.sequence_index = sequence
        made.chunk.completion_tokens = tokens[-1]
        return frames.chunk_frame(made.SerializeToString(), sequence)

    whole = message("GenerateResponse")(request_id="r")
    whole.complete.sequence_index = 1
    data = chunk(0, 1) + chunk(1, 5) + chunk(0, 2, 3) + chunk(1, 6)
    data += frames.message_frame(whole.SerializeToString()) + chunk(0, 4)
    data += frames.error_frame(RequestError("no", param="p", code="c", status=429))
    *found, error = frames.read_frames(data)
    answers = [message("GenerateResponse").FromString(piece) for piece in found if isinstance(piece, bytes)]
    chunks = [(answer.chunk.sequence_index, list(answer.chunk.token_ids)) for answer in answers]
    assert chunks == [(0, [1, 2, 3]), (1, [5, 6]), (0, []), (0, [4])] and answers[2].HasField("complete")
    assert answers[0].chunk.completion_tokens == 3 and answers[0].request_id == "r"
    assert isinstance(error, RequestError) and (error.status, error.param, error.code) == (429, "p", "c")


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "param"),
        [
            ({"max_tokens": 0}, "max_tokens"),
            ({"ids": []}, "tokenized.input_token_ids"),
            ({"ids": [300]}, "tokenized.input_token_ids"),
            ({"ids": [1] * 4096}, "tokenized.input_token_ids"),
            ({"sampling_config": {"temperature": -1.0}}, "sampling_config.temperature"),
            ({"sampling_config": {"num_return_sequences": 200}}, "sampling_config.num_return_sequences"),
            ({"output_config": {"logprobs": 50}}, "output_config.logprobs"),
            ({"guided_decoding": {"guide": "x"}}, "guided_decoding"),
            ({"guided_decoding": {"guide_type": 5, "guide": "{"}}, "guided_decoding.guide"),
            ({"kv_cache_retention": {"config_json": "[]"}}, "kv_cache_retention.config_json"),
            ({"stop_words": [{"token_ids": [1, 2]}]}, "stop_words"),
            ({"embedding_bias": [1.0, 2.0]}, "embedding_bias"),
            ({"request_id": "x" * 300}, "request_id"),
        ],
    )
    def test_mistakes_name_their_field(self, client: Client, fields: dict[str, Any], param: str) -> None:
        error = refused(client, request(**fields))
        assert error.code() is Code.INVALID_ARGUMENT and error.details()
        (info,) = details(error, ErrorInfo)
        (bad,) = details(error, BadRequest)
        assert info.domain == "headrace" and info.metadata["param"] == param
        assert bad.field_violations[0].field == param and bad.field_violations[0].description == error.details()

    @pytest.mark.parametrize(
        "fields",
        [
            {"lora_config": {"task_id": 1}},
            {"multimodal_input": {"image_data": [b"x"]}},
            {"sampling_config": {"top_p_decay": 0.5}},
            {"output_config": {"return_context_logits": True}},
            {"disaggregated_params": {"request_type": 1}},
        ],
    )
    def test_what_is_not_there_is_not_ignored(self, client: Client, fields: dict[str, Any]) -> None:
        error = refused(client, request(**fields))
        assert error.code() is Code.UNIMPLEMENTED and next(iter(fields)) in error.details()

    def test_an_unknown_method(self, client: Client) -> None:
        with pytest.raises(grpc.RpcError) as caught:
            client.channel.unary_unary(f"/{SERVICE}/Fly")(b"", timeout=5)
        assert caught.value.code() is Code.UNIMPLEMENTED

    def test_they_are_counted(self, client: Client, server: Running) -> None:
        before = count_of(server, "400")
        refused(client, request(max_tokens=0))
        assert count_of(server, "400") == before + 1

    def test_a_full_queue(self, folder: Path) -> None:
        loop = FakeLoop(fake_info(max_batch_size=1))
        with running(folder, loop=loop, step_s=0.005, max_queued_requests=1) as server, server.client() as client:
            running_call = client.call("Generate", request(max_tokens=3000, streaming=True))
            next(running_call)
            waiting = client.call("Generate", request(max_tokens=3, streaming=True))
            assert until(lambda: len(loop.waiting) == 1)
            error = refused(client, request())
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert details(error, RetryInfo)[0].retry_delay.seconds >= 1
            assert details(error, ErrorInfo)[0].reason == "QUEUE_FULL"
            running_call.cancel()
            assert len(list(waiting)) == 4

    def test_an_id_that_runs(self, client: Client, server: Running) -> None:
        call = client.call("Generate", request(request_id="one", max_tokens=3000, streaming=True))
        next(call)
        assert refused(client, request(request_id="one")).code() is Code.ALREADY_EXISTS
        call.cancel()
        assert until(server.is_empty)
        assert client.generate(request(request_id="one"))

    def test_draining(self, folder: Path) -> None:
        with running(folder) as server, server.client() as client:
            server.loop.call_soon_threadsafe(server.service.drain)
            assert until(lambda: server.service.state == "draining")
            error = refused(client, request())
            assert error.code() is Code.UNAVAILABLE and details(error, RetryInfo)
            assert client.call("HealthCheck").status == "draining"
            assert until(lambda: health(client) == health_pb2.HealthCheckResponse.NOT_SERVING)
