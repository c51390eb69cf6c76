"""The Python API: over the fake runtime, and over a tiny real model."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import wire
from headrace.config.resolution import resolve
from headrace.front.client import Link
from headrace.front.fake import FakeLoop, FakeRuntime, fake_info
from headrace.front.prompts import PreprocessedInputs
from headrace.front.request_output import RequestOutput
from headrace.llm import LLM, RequestError, RequestFailed
from headrace.params import LoRARequest, SamplingParams
from headrace.text.tokenizer import ByteTokenizer


def make_llm(
    folder: Path, *, loop: FakeLoop | None = None, step_s: float = 0.0, failed: wire.Failed | None = None, **args: Any
) -> LLM:
    (folder / "config.json").write_text(json.dumps({"model_type": "fake", "eos_token_id": 257}))
    resolved = resolve(arguments={"model": str(folder), "tokenizer": ByteTokenizer(), **args})

    def open_runtime(_: Any, __: Any, on_message: Callable[[wire.Down], None]) -> Link:
        return FakeRuntime(on_message, loop=loop or FakeLoop(fake_info()), step_s=step_s, fails_with=failed)

    return LLM.from_args(resolved.args, open_runtime=open_runtime)


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    with make_llm(tmp_path) as found:
        yield found


def texts(outputs: RequestOutput | list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in (outputs if isinstance(outputs, list) else [outputs])]


class TestGenerate:
    def test_prompt_forms(self, llm: LLM) -> None:
        params = SamplingParams(max_tokens=3)
        for prompt in ("abc", {"prompt": "abc"}, [256, 97, 98], {"prompt_token_ids": [256, 97, 98]},
                       llm.preprocess("abc", params)):  # fmt: skip
            output = llm.generate(prompt, params)
            assert isinstance(output, RequestOutput) and texts(output) == ["ab"]
        outputs = llm.generate(["abc", [120, 121], {"prompt": "de"}], params)
        assert texts(outputs) == ["ab", "xyx", "de"]
        assert isinstance(outputs, list) and [output.prompt for output in outputs] == ["abc", None, "de"]
        assert llm.generate([], params) == []

    def test_defaults(self, llm: LLM) -> None:
        output = llm.generate([97])
        assert isinstance(output, RequestOutput) and output.outputs[0].length == 32
        assert output.prompt_token_ids == [97] and output.finished and not output.aborted()

    def test_arguments_by_position(self, llm: LLM) -> None:
        outputs = llm.generate(
            ["abc", "xyz"],
            [SamplingParams(max_tokens=2), SamplingParams(max_tokens=4)],
            cache_salt=["one", None],
            priority=[0.1, 1],
            use_tqdm=False,
        )
        assert texts(outputs) == ["a", "xyz"]
        with pytest.raises(ValueError, match="sampling_params is a list of 1 and there are 2 prompts"):
            llm.generate(["a", "b"], [SamplingParams()])

    def test_twice_in_a_row(self, llm: LLM) -> None:
        for _ in range(2):
            prompts = [f"{number:04}" for number in range(150)]
            assert texts(llm.generate(prompts, SamplingParams(max_tokens=5), use_tqdm=False)) == prompts

    def test_a_bar_for_lists(self, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
        llm.generate(["a", "b"], SamplingParams(max_tokens=1))
        assert "2/2" in capsys.readouterr().err
        llm.generate("a", SamplingParams(max_tokens=1))
        assert capsys.readouterr().err == ""

    def test_a_bad_prompt_stops_all(self, tmp_path: Path) -> None:
        loop = FakeLoop(fake_info(max_seq_len=100))
        with make_llm(tmp_path, loop=loop, step_s=0.005) as llm:
            with pytest.raises(RequestError, match="context length is 100"):
                llm.generate([[97]] * 70 + [[97] * 200], SamplingParams(max_tokens=90))
            deadline = time.monotonic() + 5
            while len(loop.aborted) < 64 and time.monotonic() < deadline:
                time.sleep(0.005)
            assert not loop.running and len(loop.aborted) == 64

    @pytest.mark.parametrize("prompt", [3, None, {}, {"prompt": 3}, [["a"]], {"prompt_token_ids": ["a"]}, [3, "a"]])
    def test_what_is_no_prompt(self, llm: LLM, prompt: Any) -> None:
        with pytest.raises(ValueError):
            llm.generate(prompt)

    def test_failures_carry_all_outputs(self, tmp_path: Path) -> None:
        loop = FakeLoop(fake_info())
        loop.fault = "broken kernel"
        with make_llm(tmp_path, loop=loop) as llm, pytest.raises(RequestFailed, match="2 of 2 requests") as error:
            llm.generate(["a", "b"], use_tqdm=False)
        assert [output.error for output in error.value.outputs] == ["broken kernel", "broken kernel"]

    def test_an_interrupt_aborts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = FakeLoop(fake_info())
        with make_llm(tmp_path, loop=loop, step_s=0.005) as llm:

            def interrupt(*_: Any) -> None:
                raise KeyboardInterrupt

            monkeypatch.setattr(RequestOutput, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["a" * 3, "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3000)])
            deadline = time.monotonic() + 5
            while loop.running and time.monotonic() < deadline:
                time.sleep(0.005)
            assert not loop.running

    def test_no_text_without_a_tokenizer(self, tmp_path: Path) -> None:
        with make_llm(tmp_path, tokenizer=None, skip_tokenizer_init=True) as llm:
            output = llm.generate([97, 98], SamplingParams(max_tokens=3))
            assert isinstance(output, RequestOutput)
            assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [97, 98, 97])
            assert llm.tokenizer is None
            with pytest.raises(ValueError, match="no tokenizer"):
                llm.generate("text")
            with pytest.raises(ValueError, match="stop strings need a tokenizer"):
                llm.generate([97], SamplingParams(stop="a"))


class TestAsync:
    def test_futures_and_streams_side_by_side(self, tmp_path: Path) -> None:
        async def run(llm: LLM) -> list[str]:
            async def stream(prompt: str) -> str:
                parts = [
                    step.outputs[0].text_diff
                    async for step in llm.generate_async(prompt, SamplingParams(max_tokens=9), streaming=True)
                ]
                return "".join(parts)

            whole = llm.generate_async("whole", SamplingParams(max_tokens=9)).aresult()
            *streamed, output = await asyncio.gather(stream("abc"), stream("xyz"), whole)
            return [*streamed, *texts(output)]

        with make_llm(tmp_path, step_s=0.001) as llm:
            assert asyncio.run(run(llm)) == ["abcabc", "xyzxyz", "wholewh"]

    def test_result_and_abort(self, tmp_path: Path) -> None:
        with make_llm(tmp_path, step_s=0.005) as llm:
            output = llm.generate_async("abc", SamplingParams(max_tokens=3000), streaming=True)
            with pytest.raises(TimeoutError):
                output.result(timeout=0.02)
            output.abort()
            assert output.result(1).outputs[0].finish_reason == "cancelled"

    def test_from_several_threads(self, llm: LLM) -> None:
        results: dict[int, str] = {}

        def run(number: int) -> None:
            output = llm.generate_async(f"{number:03}", SamplingParams(max_tokens=4)).result(10)
            results[number] = output.outputs[0].text

        threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {number: f"{number:03}" for number in range(16)}

    def test_one_prompt_only(self, llm: LLM) -> None:
        with pytest.raises(ValueError, match="takes one prompt"):
            llm.generate_async(["a", "b"])  # pyright: ignore[reportArgumentType]

    def test_preprocessed_inputs_bring_their_parameters(self, llm: LLM) -> None:
        inputs = llm.preprocess("abc", SamplingParams(max_tokens=2))
        assert inputs == PreprocessedInputs([256, 97, 98, 99], "abc", SamplingParams(max_tokens=2))
        assert llm.generate_async(inputs).result(5).outputs[0].length == 2

    def test_statistics(self, llm: LLM) -> None:
        async def collect() -> list[dict[str, Any]]:
            return [iteration async for iteration in llm.get_stats_async()]

        assert llm.get_stats()[0]["iter"] >= 0 and asyncio.run(collect())


class TestSettings:
    def test_unknown_keywords_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="max_batchsize"):
            LLM(tmp_path, max_batchsize=3)

    def test_a_wrong_path(self) -> None:
        with pytest.raises(ValueError, match="no model"):
            LLM("/nowhere/at/all")

    def test_a_failed_start_leaves_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="model.safetensors is cut off"):
            make_llm(tmp_path, failed=wire.Failed("model.safetensors is cut off", bad_input=True))
        with pytest.raises(RuntimeError, match="CUDA"):
            make_llm(tmp_path, failed=wire.Failed("CUDA is broken"))
        assert not any(thread.name.startswith(("headrace-front", "fake")) for thread in threading.enumerate())

    def test_properties(self, llm: LLM, tmp_path: Path) -> None:
        assert llm.args.model == str(tmp_path) and llm.args.is_frozen
        assert len(llm.llm_id.split("-")) >= 3 and llm.disaggregated_params == {}
        assert llm.get_kv_cache_capacity() == {"maxNumBlocks": 4096, "tokensPerBlock": 32, "maxNumTokens": 131072}

    def test_another_tokenizer(self, llm: LLM) -> None:
        class Shouting(ByteTokenizer):
            def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
                return super().encode(text.upper(), add_special_tokens=False)

        llm.tokenizer = Shouting()
        assert isinstance(llm.tokenizer, Shouting)
        assert texts(llm.generate("abc", SamplingParams(max_tokens=3))) == ["ABC"]

    @pytest.mark.parametrize(
        "arguments",
        [
            {"lora_request": LoRARequest("a", 1, "/x")},
            {"scheduling_params": object()},
            {"disaggregated_params": object()},
        ],
    )
    def test_later_work_is_named(self, llm: LLM, arguments: dict[str, Any]) -> None:
        for call in (llm.generate, llm.generate_async):
            with pytest.raises(NotImplementedError, match=next(iter(arguments))):
                call("a", **arguments)

    @pytest.mark.parametrize("name", ["encode", "get_data_transceiver_state"])
    def test_later_methods_are_named(self, llm: LLM, name: str) -> None:
        with pytest.raises(NotImplementedError, match=name):
            getattr(llm, name)()
        with pytest.raises(NotImplementedError, match="multi_modal_data"):
            llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}})

    def test_cache_salt_is_not_empty(self, llm: LLM) -> None:
        with pytest.raises(RequestError, match="cache_salt"):
            llm.generate("a", cache_salt="")


class TestProfile:
    def test_the_runtime_is_asked(self, llm: LLM) -> None:
        llm.start_profile(num_steps=2, activities=["CPU"])
        assert llm.stop_profile() == ["trace-0.json"]
        with pytest.raises(ValueError, match="activities: must be of CPU and GPU, got 'cpu'"):
            llm.start_profile(activities=["cpu"])

    def test_a_trace_is_written(self, tmp_path: Path) -> None:
        from tests.twin.harness import tiny_llama

        folder = tiny_llama(tmp_path)
        with LLM(folder, skip_tokenizer_init=True, engine_threads=1, profile_dir=str(tmp_path)) as llm:
            (name,) = llm.start_profile()
            llm.generate([5, 17, 40], SamplingParams(max_tokens=4))
            assert llm.stop_profile() == [name]
            assert json.loads((tmp_path / name).read_text())["traceEvents"]
            with pytest.raises(ValueError, match="start one first"):
                llm.stop_profile()
        off = LLM(folder, skip_tokenizer_init=True, engine_threads=1)
        with off, pytest.raises(ValueError, match="profile_dir"):
            off.start_profile()


class TestEnd:
    def test_shutdown_is_quick_and_may_be_repeated(self, tmp_path: Path) -> None:
        llm = make_llm(tmp_path, step_s=0.05)
        output = llm.generate_async("abc", SamplingParams(max_tokens=3000))
        started = time.monotonic()
        llm.shutdown()
        llm.shutdown()
        assert time.monotonic() - started < 5
        with pytest.raises(RequestFailed, match="shut down"):
            output.result(1)
        with pytest.raises(RuntimeError, match="shut down"):
            llm.generate("a")

    def test_it_ends_with_its_last_reference(self, tmp_path: Path) -> None:
        llm = make_llm(tmp_path)
        assert texts(llm.generate("a", SamplingParams(max_tokens=2))) == ["a"]
        del llm
        gc.collect()
        assert not any(thread.name == "headrace-front" for thread in threading.enumerate())

    def test_it_is_not_copied_or_pickled(self, llm: LLM) -> None:
        with pytest.raises(TypeError, match="can't be pickled"):
            copy.copy(llm)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A real engine in this process: random weights, ids in and ids out."""
    from tests.twin.harness import tiny_llama

    folder = tiny_llama(tmp_path_factory.mktemp("tiny"))
    kv = {"tokens_per_block": 4, "max_tokens": 1024}
    with LLM(
        folder, dtype="float32", skip_tokenizer_init=True, max_batch_size=8, engine_threads=1, max_beam_width=3,
        kv_cache_config=kv,
    ) as llm:  # fmt: skip
        yield llm


class TestRealEngine:
    PROMPT = [5, 17, 40, 8, 22, 31]

    def one(self, llm: LLM, **params: Any) -> RequestOutput:
        output = llm.generate(self.PROMPT, SamplingParams(**params))
        assert isinstance(output, RequestOutput)
        return output

    def test_batch_stream_and_repetition_agree(self, tiny: LLM) -> None:
        alone = self.one(tiny, max_tokens=12).outputs[0].token_ids
        together = tiny.generate([self.PROMPT, [3, 4], self.PROMPT], SamplingParams(max_tokens=12), use_tqdm=False)
        assert isinstance(together, list)
        assert together[0].outputs[0].token_ids == together[2].outputs[0].token_ids == alone
        streamed: list[int] = []
        for step in tiny.generate_async(self.PROMPT, SamplingParams(max_tokens=12), streaming=True):
            streamed += step.outputs[0].token_ids_diff
        assert streamed == alone

    def test_seeded_choices_differ_and_repeat(self, tiny: LLM) -> None:
        outputs = [self.one(tiny, max_tokens=8, n=4, seed=7, temperature=1.0) for _ in range(2)]
        ids = [[choice.token_ids for choice in output.outputs] for output in outputs]
        assert ids[0] == ids[1] and len({tuple(choice) for choice in ids[0]}) > 1
        greedy = self.one(tiny, max_tokens=8, n=2)
        assert greedy.outputs[0].token_ids == greedy.outputs[1].token_ids

    def test_unseeded_choices_differ(self, tiny: LLM) -> None:
        outputs = [self.one(tiny, max_tokens=16, temperature=1.5).outputs[0].token_ids for _ in range(3)]
        assert len({tuple(ids) for ids in outputs}) > 1

    def test_logprobs_and_logits(self, tiny: LLM) -> None:
        output = self.one(tiny, max_tokens=3, logprobs=2, prompt_logprobs=0, return_generation_logits=True)
        choice = output.outputs[0]
        assert choice.generation_logits.shape == (3, 96)
        assert len(choice.logprobs) == 3 and len(choice.prompt_logprobs) == len(self.PROMPT)
        logprobs = choice.generation_logits.log_softmax(-1)
        for at, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs)):
            assert isinstance(entry, dict) and entry[token].rank == 1
            assert abs(entry[token].logprob - float(logprobs[at, token])) < 1e-4

    def test_beams_are_at_least_as_likely_as_greedy(self, tiny: LLM) -> None:
        greedy = self.one(tiny, max_tokens=6, logprobs=0).outputs[0].cumulative_logprob
        beams = self.one(tiny, max_tokens=6, n=2, best_of=3, use_beam_search=True).outputs
        assert greedy is not None and len(beams) == 2
        assert (beams[0].cumulative_logprob or -99) >= greedy - 1e-4
        assert (beams[0].cumulative_logprob or -99) >= (beams[1].cumulative_logprob or -99)

    def test_logits_processors(self, tiny: LLM) -> None:
        def only_seven(req_id: int, logits: Any, ids: Any, stream: Any, client: Any) -> None:
            logits[..., 7] = 1e4

        assert self.one(tiny, max_tokens=3, logits_processor=only_seven).outputs[0].token_ids == [7, 7, 7]

        def fails(*_: Any) -> None:
            raise ZeroDivisionError("mine")

        with pytest.raises(RequestFailed, match="logits_processor: ZeroDivisionError: mine"):
            self.one(tiny, max_tokens=3, logits_processor=fails)
        assert self.one(tiny, max_tokens=1).outputs[0].length == 1

    def test_bias_and_stop_ids(self, tiny: LLM) -> None:
        first = self.one(tiny, max_tokens=1).outputs[0].token_ids[0]
        assert self.one(tiny, max_tokens=1, logit_bias={first: -100}).outputs[0].token_ids != [first]
        stopped = self.one(tiny, max_tokens=9, stop_token_ids=[first]).outputs[0]
        assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == ([], "stop", first)
        shown = self.one(tiny, max_tokens=9, stop_token_ids=[first], include_stop_str_in_output=True).outputs[0]
        assert shown.token_ids == [first]
        held = self.one(tiny, max_tokens=9, stop_token_ids=[first], min_tokens=2).outputs[0]
        assert len(held.token_ids) >= 2

    def test_the_prefix_cache_shows(self, tiny: LLM) -> None:
        prompt = list(range(40, 60))
        for cached in (0, 19):  # all but the last token, which is always computed
            output = tiny.generate(prompt, SamplingParams(max_tokens=2), cache_salt="mine")
            assert isinstance(output, RequestOutput) and output.cached_tokens == cached
