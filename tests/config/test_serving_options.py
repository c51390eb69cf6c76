"""Options of the server that are about keys, certificates, pages and processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from headrace.cli.fronts import num_fronts, revealed
from headrace.cli.options import resolved_from_click, serve_options
from headrace.config.errors import ConfigError
from headrace.config.resolution import Resolved, Typed, resolve
from headrace.config.serving import ServerOptions

SEEN: list[Resolved] = []


@click.command()
@click.argument("model")
@serve_options
@click.pass_context
def serve(ctx: click.Context, model: str) -> None:
    SEEN.append(resolved_from_click(ctx, model))


def resolved(*words: str) -> Resolved:
    serve.main(list(words), standalone_mode=False)
    return SEEN.pop()


def test_keys_of_a_file_come_beside_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "from-env")
    file = tmp_path / "keys"
    file.write_text("# tenants\none\n\n  two  \n")
    found = resolved("m", "--api_key", "typed", "--api_key_file", str(file)).server.api_keys
    assert [key.get_secret_value() for key in found] == ["typed", "one", "two", "from-env"]


@pytest.mark.parametrize(("text", "message"), [(None, "No such file"), ("# nobody\n\n", "has no keys")])
def test_a_key_file_that_would_leave_the_server_open(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        resolved("m", "--api_key_file", str(file))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ssl_keyfile": "k.pem"}, "--ssl_certfile"),
        ({"cors_origins": ["example.com"]}, "scheme://host"),
        ({"cors_origins": ["https://example.com/path"]}, "without a path"),
    ],
)
def test_options_that_mean_nothing(values: dict[str, Any], message: str) -> None:
    flags = {name: Typed(f"--{name}", value) for name, value in values.items()}
    with pytest.raises(ConfigError, match=message):
        resolve(server_flags=flags, needs_model=False)


def test_certificates_are_looked_at_before_anything_slow(tmp_path: Path) -> None:
    from headrace.cli.serving import tls_of

    file = tmp_path / "cert.pem"
    with pytest.raises(ValueError, match=r"ssl_certfile: .*cert\.pem: No such file"):
        tls_of(ServerOptions(ssl_certfile=str(file)))
    file.write_text("no certificate")
    with pytest.raises(ValueError, match=r"ssl_certfile: .*give a PEM certificate and its key"):
        tls_of(ServerOptions(ssl_certfile=str(file)))
    assert tls_of(ServerOptions()) is None


@pytest.mark.parametrize("path", ["nowhere", "no.such.module:Class", "headrace.server.auth:Nobody", "json:__doc__"])
def test_middleware_that_is_none(path: str) -> None:
    from headrace.cli.serving import service_options

    with pytest.raises(ValueError, match="middleware: "):
        service_options(resolved("m").args, ServerOptions(middleware=[path]), front=1)


def test_what_the_server_shows_has_no_secret(tmp_path: Path) -> None:
    from headrace.cli.serving import service_options

    found = resolved("m", "--api_key", "secret-key", "--ssl_certfile", "c.pem", "--ssl_keyfile_password", "secret-word")
    options = service_options(found.args, found.server, front=1)
    assert "secret" not in str(options.operations.shown) and options.operations.shown["has_api_keys"] is True
    assert options.api_keys == ("secret-key",)


def test_further_processes_get_the_same_options() -> None:
    found = resolved("m", "--api_key", "k", "--port", "0", "--strict_fields", "--num_serve_frontends", "2")
    assert ServerOptions.model_validate(revealed(found.server)) == found.server
    assert num_fronts(found.args) == 2
    assert num_fronts(resolved("m", "--num_postprocess_workers", "3").args) == 3


def test_a_folder_for_traces_exists(tmp_path: Path) -> None:
    from headrace.cli.serving import service_options

    found = resolved("m", "--profile_dir", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="profile_dir: .* create it first"):
        service_options(found.args, found.server, front=1)
    found = resolved("m", "--profile_dir", str(tmp_path))
    assert service_options(found.args, found.server, front=1).operations.can_profile
