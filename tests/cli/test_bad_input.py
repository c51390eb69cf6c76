"""Bad input on the command line: one line that says what is wrong and what to do, the right exit code, nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from headrace.cli.main import run
from headrace.server.run import bind
from tests.hub.tiny_gguf import write_tiny_model
from tests.text.tiny_tokenizers import byte_level_backend

HEADRACE = (sys.executable, "-m", "headrace.cli.main")
LIMIT_S = 60  # for a machine that is busy with other tests

Line = Callable[..., str]
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("checkpoints") / "good"
    tokenizer = byte_level_backend()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16384,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def line(capsys: pytest.CaptureFixture[str]) -> Line:
    """Run a command line that fails, and return the one line it says."""

    def fail(*words: str | Path, code: int = 2) -> str:
        assert run([str(word) for word in words]) == code
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("headrace: "), lines
        return lines[0]

    return fail


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "neither config.json nor a .gguf file"),
    "half a config": (lambda folder: cut(folder / "config.json"), "config.json is not valid JSON"),
    "half the weights": (lambda folder: cut(folder / "model.safetensors"), "is truncated"),
    "no byte of the weights": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "fetch it again"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "fetch the weights"),
    "an unknown type": (lambda folder: change_config(folder, model_type="lama"), "'lama': did you mean llama?"),
    "a layer too many": (lambda folder: change_config(folder, num_hidden_layers=2), "tensors missing: model.layers.1"),
    "another size": (lambda folder: change_config(folder, hidden_size=32), "of a wrong shape"),
    "no size": (lambda folder: change_config(folder, num_attention_heads=0), "must be at least 1, not 0"),
    "a foreign tokenizer": (lambda folder: change_config(folder, vocab_size=96), "give the model's own tokenizer"),
    "half a tokenizer": (lambda folder: cut(folder / "tokenizer.json"), "tokenizer.json can't be read"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "give one with --tokenizer"),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_folder(checkpoint: Path, tmp_path: Path, line: Line, what: str) -> None:
    damage, message = DAMAGES[what]
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    damage(folder)
    assert message in line("generate", folder, "hi", "--engine_threads", "1")


def test_a_truncated_gguf_file(tmp_path: Path, line: Line) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_model(path, "llama")
    cut(path)
    assert "truncated" in line("generate", path, "hi")


def test_the_traceback_is_shown_on_demand(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    cut(folder / "model.safetensors")
    assert run(["generate", str(folder), "hi", "--log-level", "debug"]) == 2
    errors = capsys.readouterr().err
    assert "Traceback" in errors and "is truncated" in errors.splitlines()[-1]
    monkeypatch.setenv("HEADRACE_LOG_LEVEL", "debug")
    assert run(["generate", "/no/such/model", "hi"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_no_memory_for_one_block(checkpoint: Path, line: Line) -> None:
    flags = ("--engine_threads", "1", "--set", "kv_cache_config.max_gpu_total_bytes=100")
    assert "raise kv_cache_config.max_gpu_total_bytes" in line("generate", checkpoint, "hi", *flags, code=1)


def test_addresses_that_can_not_be_had(checkpoint: Path, line: Line) -> None:
    with bind("127.0.0.1", 0) as listener:
        port = str(listener.getsockname()[1])
        said = line("serve", checkpoint, "--host", "127.0.0.1", "--port", port, code=1)
        assert f"port {port}" in said and "choose another --port" in said
    assert "choose another --host" in line("serve", checkpoint, "--host", "192.0.2.1", "--port", "0", code=1)


class TestSettings:
    def test_unknown_keys(self, tmp_path: Path, line: Line) -> None:
        file = tmp_path / "c.yml"
        file.write_text("max_batchsize: 3\n")
        assert f"{file}:1: max_batchsize: unknown key, did you mean 'max_batch_size'?" in line(
            "serve", "any", "--config", file
        )
        assert "foo: unknown key: remove it, or" in line("serve", "any", "--set", "foo=1")
        assert "foo: unknown key: remove it, or" in line("config", "show", "any", "--set", "foo=1")

    def test_a_flag_against_the_file(self, tmp_path: Path, line: Line) -> None:
        file = tmp_path / "c.yml"
        file.write_text("max_batch_size: 3\n")
        said = line("serve", "any", "--config", file, "--max_batch_size", "4")
        assert "says 4" in said and f"{file}:1 says 3" in said and "remove one of them" in said

    def test_files_that_are_none(self, tmp_path: Path, line: Line) -> None:
        assert "no such file" in line("serve", "any", "--config", tmp_path / "none.yml")
        assert str(tmp_path) in line("serve", "any", "--config", tmp_path)
        assert "name is empty" in line("serve", "any", "--config", "")

    def test_a_disk_tier_without_its_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "c.yml"
        file.write_text(f"kv_cache_config:\n  disk_cache_size: 1000000\n  disk_cache_path: {tmp_path / 'none'}\n")
        assert run(["config", "check", str(file)]) == 2
        assert f"disk_cache_path: '{tmp_path / 'none'}' is no folder: create it first" in capsys.readouterr().err

    @pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
    @pytest.mark.parametrize("flag", ["--shutdown_timeout_s", "--request_timeout_s", "--free_gpu_memory_fraction"])
    def test_numbers_are_finite(self, line: Line, flag: str, value: str) -> None:
        assert f"headrace: {flag}: " in line("serve", "any", f"{flag}={value}")

    @pytest.mark.parametrize("key", ["", " ", " secret", "secret\n"])
    def test_an_empty_key_does_not_open_the_server(self, line: Line, key: str) -> None:
        said = line("serve", "any", "--api_key", key)
        assert "must not be empty" in said and "secret" not in said


def test_an_empty_name_is_not_the_current_folder(checkpoint: Path, line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint)
    assert "the model's name is empty" in line("pull", "")
    assert "give MODEL" in line("generate", "", "hi")


def test_a_revision_of_a_folder_is_not_ignored_silently(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(checkpoint), "hi", "-n", "1", "--engine_threads", "1", "--revision", "main"]) == 0
    assert "revision main has no effect" in capsys.readouterr().err


def test_a_report_that_can_not_be_written_is_known_at_once(checkpoint: Path, tmp_path: Path, line: Line) -> None:
    (tmp_path / "taken").touch()
    report = tmp_path / "taken" / "report.json"
    assert "can't write" in line("bench", "throughput", checkpoint, "--report_json", report)
    name = tmp_path / ("x" * 300)
    assert "File name too long" in line("bench", "throughput", checkpoint, "--report_json", name, code=1)


@contextmanager
def started(*words: str | Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a process group of its own, of which nothing may be left."""

    def hears_ctrl_c() -> None:  # a test run in the background would hand down that it doesn't
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with log.open("wb") as output:
        child = subprocess.Popen(
            [*HEADRACE, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=hears_ctrl_c,
        )
    try:
        yield child
        child.wait(LIMIT_S)
        assert "Traceback" not in log.read_text()
        assert until(lambda: not _group_exists(child.pid)), "a process was left behind"
    finally:
        if _group_exists(child.pid):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def until(is_so: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
    deadline_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return is_so()


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_whose_model_is_bad(checkpoint: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    cut(folder / "model.safetensors")
    log = tmp_path / "log"
    with started("serve", folder, "--port", "0", "--log_level", "warning", log=log) as server:
        assert server.wait(LIMIT_S) == 2
    said = log.read_text().splitlines()
    assert len(said) == 1 and said[0].startswith(f"headrace: {folder}") and "is truncated" in said[0]


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_ctrl_c_while_loading(checkpoint: Path, tmp_path: Path, command: str) -> None:
    """The whole group gets the signal, as from a terminal."""
    log = tmp_path / "log"
    words = ("generate", checkpoint, "hi") if command == "generate" else ("serve", checkpoint, "--port", "0")
    with started(*words, "--engine_threads", "1", log=log) as process:
        if command == "serve":
            assert until(lambda: "loading" in log.read_text())
        else:  # nothing is printed at the default level; before this it may not have come to the command line at all
            assert until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())
        begin_s = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        if command == "generate":  # Python drops one that falls into a callback of its own, as there are in imports
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
        assert process.wait(LIMIT_S) == (0 if command == "serve" else 130)
        assert time.monotonic() - begin_s < 20
    assert log.read_text().split()[-1] == ("stopped" if command == "serve" else "interrupted")


def test_a_killed_server_takes_its_processes_along(checkpoint: Path, tmp_path: Path) -> None:
    """Its runtime notices that it is alone. On the way: a public address without a key is told."""
    log = tmp_path / "log"
    flags = ("--host", "0.0.0.0", "--port", "0", "--engine_threads", "1")
    with started("serve", checkpoint, *flags, log=log) as server:
        assert until(lambda: "loading" in log.read_text())
        assert "0.0.0.0: everybody who reaches this address can use the server" in log.read_text()
        server.kill()
        assert server.wait(LIMIT_S) == -signal.SIGKILL
        assert until(lambda: not _group_exists(server.pid), 10)


def test_sigterm_with_open_streams(checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    flags = ("--host", "127.0.0.1", "--port", str(port), "--engine_threads", "1", "--shutdown_timeout_s", "0.2")
    last_events: list[list[str]] = []
    begun = threading.Semaphore(0)

    def read() -> None:
        body = {"model": "m", "prompt": "hi", "max_tokens": 16000, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S) as response:
            lines = response.iter_lines()
            events = [next(lines)]
            begun.release()
            events += [text for text in lines if text]
            last_events.append(events[-2:])

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    with started("serve", checkpoint, "--served_model_name", "m", *flags, log=log) as server:
        assert until(lambda: is_ready() or server.poll() is not None) and server.poll() is None, log.read_text()
        readers = [threading.Thread(target=read, daemon=True) for _ in range(3)]
        for reader in readers:
            reader.start()
        assert all(begun.acquire(timeout=LIMIT_S) for _ in readers)
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 0
        for reader in readers:
            reader.join(LIMIT_S)
    assert [events[1] for events in last_events] == ["data: [DONE]"] * 3
    assert all("shutting_down" in events[0] for events in last_events)


@pytest.mark.parametrize("closed", ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_change_no_exit_code(closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *HEADRACE, "generate", "/no/such/model", "hi"]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, b"", b"")


def test_an_answer_without_standard_error_and_input(checkpoint: Path) -> None:
    words = ("generate", str(checkpoint), "hi", "-n", "3", "--echo", "--engine_threads", "1")
    command = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *HEADRACE, *words]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0 and done.stdout.startswith(b"hi")


def test_nothing_to_read(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert "give a PROMPT" in line("generate", "any")
    assert "give a --prompt" in line("chat", "any")
    assert "give a --dataset" in line("bench", "throughput", "any", "--dataset", "-")
