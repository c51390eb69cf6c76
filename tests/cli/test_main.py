from __future__ import annotations

import subprocess
import sys

import click
import pytest

from headrace import __version__
from headrace.cli.main import COMMANDS, LazyGroup, cli, is_interrupt, report, run, wants_traceback


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys; from headrace.cli.main import run; codes = [run(['--help']), run(['--version']), run(['-h'])];"
        "heavy = ('torch', 'fastapi', 'numpy', 'pydantic', 'zmq', 'transformers');"
        "print([m for m in heavy if m in sys.modules], codes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().splitlines()[-1] == "[] [0, 0, 0]"
    assert f"headrace, version {__version__}" in done.stdout
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_defaults(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    assert "Usage: headrace " + name in capsys.readouterr().out


def test_the_group_knows_only_its_commands() -> None:
    assert isinstance(cli, LazyGroup)
    context = click.Context(cli)
    assert cli.list_commands(context) == list(COMMANDS)
    assert cli.get_command(context, "main") is None


def test_wrong_commands_and_flags_are_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["nothing"]) == 2
    assert "No such command 'nothing'" in capsys.readouterr().err
    assert run(["pull", "--nothing"]) == 2
    assert run(["pull"]) == 2


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "pull"])
def test_a_wrong_model_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = {"generate": ["hello"], "chat": ["--prompt", "hello"]}.get(command, [])
    assert run([command, "/no/such/model", *more]) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1 and "no model '/no/such/model'" in lines[0] and lines[0].startswith("headrace: ")


def test_a_bad_setting_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "smollm2", "--set", "max_batchsize=3"]) == 2
    assert "max_batch_size" in capsys.readouterr().err


def test_errors_become_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ValueError("bad\nthing"), debug=False) == 2
    assert report(NotImplementedError("later"), debug=False) == 2
    assert report(OSError("disk"), debug=False) == 1
    assert report(KeyError("x"), debug=False) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["headrace: bad", "headrace: thing", "headrace: later", "headrace: disk", "headrace: KeyError: 'x'"]
    try:
        raise ValueError("seen")
    except ValueError as error:
        report(error, debug=True)
    assert "Traceback" in capsys.readouterr().err


def test_the_traceback_is_for_debugging() -> None:
    assert wants_traceback(["serve", "--log_level", "debug"]) and wants_traceback(["serve", "--log-level=trace"])
    assert not wants_traceback(["serve", "--log_level", "info"]) and not wants_traceback(["serve", "debug"])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == 0
    assert "_HEADRACE_COMPLETE" in capsys.readouterr().out


def test_completion_offers_models() -> None:
    environment = {"_HEADRACE_COMPLETE": "bash_complete", "COMP_WORDS": "headrace pull smo", "COMP_CWORD": "2"}
    code = "import os; os.environ.update(%r); from headrace.cli.main import main; main([])" % environment  # noqa: UP031
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "plain,smollm2" in done.stdout


def test_pull_lists_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", "--list"]) == 0
    assert "smollm2" in capsys.readouterr().out


def test_ctrl_c_that_a_library_made_an_error_of() -> None:
    try:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("cannot load") from error
    except RuntimeError as error:
        assert is_interrupt(error)
    assert is_interrupt(ValueError('Error building "enum" validator:\n  KeyboardInterrupt: '))
    assert not is_interrupt(ValueError("port in use"))


def test_a_second_ctrl_c_while_the_first_is_answered() -> None:
    code = (
        "from headrace.cli import main as place\n"
        "def cut(*_): raise KeyboardInterrupt\n"
        "place._say = cut\n"
        "place.cli.main = cut\n"
        "place.main([])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")
