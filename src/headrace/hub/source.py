"""A MODEL argument to a place on disk."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from headrace.hub.aliases import ALIASES
from headrace.hub.errors import ModelError
from headrace.hub.gguf_header import GGUF_MAGIC
from headrace.hub.pull import pull
from headrace.log import get

__all__ = ["ModelError", "ModelSource", "is_hub_id", "resolve_model"]

log = get("hub")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TIMEOUT_S = 5.0
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
"""What a model needs; never pickled weights (.bin, .pt) and never code (.py)."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk."""

    kind: Literal["hf", "gguf"]
    path: Path
    """The Hugging Face folder, or the .gguf file. Absolute."""
    name: str
    """What the user wrote."""
    alias: str | None = None
    revision: str | None = None
    """Commit of a hub model; None for files of the user."""


def resolve_model(name: str, *, revision: str | None = None) -> ModelSource:
    """Finds a model by alias, folder, .gguf file or hub id (`org/name`), in this order.

    An alias is fetched if the cache lacks it; write `./smollm2` for a folder of that name. A hub id is looked up in the
    local Hugging Face cache, and fetched only if it isn't there and `HF_HUB_OFFLINE` isn't set.

    Raises:
        ModelError: nothing usable under that name. One line with the remedy.
    """
    if not name:  # an unset variable of a shell; pathlib would take it for the current folder
        raise ModelError("the model's name is empty: give a folder, a .gguf file, a hub id (org/name) or an alias")
    if name in ALIASES:
        _warn_of_revision(name, revision)
        return ModelSource(kind="gguf", path=pull(name), name=name, alias=name)
    path = Path(name).expanduser()
    try:
        if path.exists():
            _warn_of_revision(name, revision)
            return _on_disk(path.resolve(), name)
    except (OSError, ValueError) as error:  # an unreadable parent, a name too long, a null character
        if isinstance(error, ModelError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{name!r} can't be looked up ({reason}): check the path and its permissions") from None
    if is_hub_id(name):
        return _from_hub(name, revision)
    raise _not_found(name, path)


def is_hub_id(name: str) -> bool:
    """Whether a name that is nothing on disk may be that of a hub model (`org/name`)."""
    if not _HUB_ID.fullmatch(name) or name.endswith(".gguf"):
        return False
    return not os.path.isdir(os.path.dirname(name))


def _warn_of_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        log.warning("revision %s has no effect: %s is not a model of the hub", revision, name)


def _on_disk(path: Path, name: str, *, revision: str | None = None) -> ModelSource:
    if path.is_dir():
        if (path / "config.json").is_file():
            return ModelSource(kind="hf", path=path, name=name, revision=revision)
        return ModelSource(kind="gguf", path=_only_gguf(path), name=name, revision=revision)
    if not path.is_file():  # a pipe would keep us waiting
        raise ModelError(f"{path} is no regular file: give a .gguf file, or the folder that holds config.json")
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise ModelError(f"{path} can't be read ({error.strerror}): check its permissions") from None
    if magic == GGUF_MAGIC:
        return ModelSource(kind="gguf", path=path, name=name, revision=revision)
    if path.suffix == ".gguf":
        raise ModelError(f"{path} is not a GGUF file (its first bytes are not 'GGUF'): fetch it again")
    raise ModelError(
        f"{path} is a file but not a GGUF file: give a .gguf file, or the folder that holds config.json and the weights"
    )


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ModelError(f"{folder} holds {len(files)} .gguf files: give one of them, such as {files[0]}")
    below = sorted(config.parent for config in folder.glob("*/config.json"))
    hint = f"; did you mean {below[0]}?" if below else ": give the folder that holds config.json and the weights"
    raise ModelError(f"{folder} has neither config.json nor a .gguf file{hint}")


def _not_found(name: str, path: Path) -> ModelError:
    parent = path.parent
    if parent.is_dir():
        siblings = [entry.name for entry in parent.iterdir() if entry.is_dir() or entry.suffix == ".gguf"]
        close = difflib.get_close_matches(path.name, siblings, n=1, cutoff=0.4 if path.suffix == ".gguf" else 0.6)
        if close:
            return ModelError(f"no model at {name!r}: did you mean {str(parent / close[0])!r}?")
    if close := difflib.get_close_matches(name.lower(), ALIASES, n=1, cutoff=0.5):
        return ModelError(f"no model {name!r}: did you mean the alias {close[0]!r}?")
    missing = next((str(folder) for folder in reversed(path.parents) if not folder.exists()), None)
    where = f" ({missing} doesn't exist)" if missing else ""
    return ModelError(
        f"no model {name!r}{where}: give a folder with config.json, a .gguf file, a hub id (org/name),"
        f" or an alias ({', '.join(sorted(ALIASES))})"
    )


def _from_hub(name: str, revision: str | None) -> ModelSource:
    try:
        import huggingface_hub
    except ImportError:
        raise ModelError(
            f"{name!r} is not a local path, and hub ids need huggingface_hub: pip install huggingface_hub,"
            " or give a folder or a .gguf file"
        ) from None
    folder = _cached_snapshot(name, revision)
    if folder is None:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise _no_hub(name, "HF_HUB_OFFLINE is set")
        folder = _fetch_snapshot(name, revision)
    return _on_disk(folder, name, revision=folder.name)


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The folder in the local Hugging Face cache, if it holds a config and complete-looking weights."""
    import huggingface_hub

    download = cast("Any", huggingface_hub).snapshot_download
    try:
        folder = Path(download(name, revision=revision, local_files_only=True))
    except Exception:  # the library has many errors for "not there", and different ones by version
        return None
    usable = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return folder if usable or any(folder.glob("*.gguf")) else None


def _fetch_snapshot(name: str, revision: str | None) -> Path:
    import huggingface_hub

    download = cast("Any", huggingface_hub).snapshot_download
    try:
        # Asked first with a time limit, since the download itself retries for minutes without a network.
        huggingface_hub.HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT_S)
        folder = download(name, revision=revision, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S)
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise _no_hub(name, reason[0] if reason else type(error).__name__) from error
    return Path(folder)


def _no_hub(name: str, reason: str) -> ModelError:
    cache = os.environ.get("HF_HOME") or "the Hugging Face cache"
    return ModelError(
        f"{name!r} is not in {cache} and can't be fetched ({reason}): run 'hf download {name}' where there is access"
        " and copy the folder here, or give a folder, a .gguf file or an alias"
        f" ({', '.join(sorted(ALIASES))})"
    )
