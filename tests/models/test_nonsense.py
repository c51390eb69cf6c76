"""Every file of the models room, nonsense in keys of its tiny config: refused in one line that names config.json, or of
no matter to it; never another error, and never a loop without end."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from headrace import plugins
from headrace.engine.build import build_model
from headrace.hub.source import resolve_model
from headrace.layers.factory import LayerFactory
from headrace.quant.none import Dense
from tests.kits.model import Row, assert_close, load_case, prompt, save_tiny, tiny_config
from tests.kits.tiny import ROWS, WRAPPERS, tiny_model
from tests.kits.tiny_kimi_k3 import KIMI_K3

KeyPath = tuple[str, ...]

NONSENSE: Sequence[Any] = (
    None, 0, -1, 1, 2.5, 10**9, 10**400, 1e300, float("nan"), float("inf"), True, False, "x", "", [], [1], ["x"],
    [None], [[]], {}, {"x": 1},
)  # fmt: skip
UNREAD = {"model_type", "architectures", "transformers_version", "dtype", "_name_or_path", "id2label", "label2id"}
LEFT_OUT = object()

TYPES = {
    model_type
    for name in plugins.names("models")
    for model_type in plugins.load("models", name).model_types
    if model_type in CONFIG_MAPPING and "text_config" not in CONFIG_MAPPING[model_type]().to_dict()
}
TYPES |= {name for name, row in ROWS.items() if row.of or row.oracle}


def paths(config: Mapping[str, Any], above: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in config.items():
        if above or key not in UNREAD:
            yield (*above, key)
        if isinstance(value, dict):
            yield from paths(value, (*above, key))


def changed(config: Mapping[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    result = inner = dict(config)
    for key in path[:-1]:
        inner[key] = inner = dict(inner[key])
    if value is LEFT_OUT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return result


def wrongs(value: Any) -> list[Any]:
    """What may stand in a key's place; in a list's also the list with a part that is wrong."""
    parts = [[wrong, *value[1:]] for wrong in NONSENSE] if isinstance(value, list) and value else []
    shorter = [value[:-1], [*value, value[-1]]] if isinstance(value, list) and value else []
    return [LEFT_OUT, *NONSENSE, *parts, *shorter]


def fault(config: Mapping[str, Any]) -> str | None:
    """What building a model of this config does that it must not."""
    factory = LayerFactory(dtype=torch.float32, recipe=lambda _: Dense(), device="meta")
    try:
        build_model(config, factory)
    except ValueError as error:
        said = str(error)
        return None if "config.json" in said and "\n" not in said else f"says {said!r}"
    except Exception as error:
        return f"raises {error!r}"
    return None


def stated(row: str) -> dict[str, Any]:
    """A config as a file has it."""
    if row == "kimi_k3":
        return {"model_type": row, "text_config": KIMI_K3, "vision_config": {}}
    if row in WRAPPERS:
        return {"model_type": row, "text_config": stated(WRAPPERS[row]), "tie_word_embeddings": False}
    config = json.loads(json.dumps(tiny_config(row).to_dict()))
    return config | {"model_type": tiny_model(row).of or row}


def faults(row: str, *, whole: bool) -> list[str]:
    """
    Args:
        whole: all that is wrong, in each key; else one thing, which is another in each, in every sixth.
    """
    config = stated(row)
    assert fault(config) is None
    found: list[str] = []
    for path in paths(config):
        value = config
        for key in path:
            value = value[key]
        tried, draw = wrongs(value), zlib.crc32(f"{row}:{path}".encode())
        if not whole:
            tried = [] if draw % 6 else [tried[draw // 6 % len(tried)]]
        for wrong in tried:
            if what := fault(changed(config, path, wrong)):
                found.append(f"{'.'.join(path)} = {'left out' if wrong is LEFT_OUT else repr(wrong)[:60]}: {what}")
    return found


def test_every_model_type_is_here() -> None:
    served = {each for name in plugins.names("models") for each in plugins.load("models", name).model_types}
    assert served - TYPES <= WRAPPERS.keys() | {"kimi_k3"}


@pytest.mark.parametrize("row", [*sorted(TYPES), *WRAPPERS, "kimi_k3"])
def test_a_wrong_value_in_some_keys(row: str) -> None:
    assert faults(row, whole=False) == []


@pytest.mark.slow
@pytest.mark.parametrize("row", [*sorted(TYPES), *WRAPPERS, "kimi_k3"])
def test_any_wrong_value_in_each_key(row: str) -> None:
    assert faults(row, whole=True) == []


@pytest.mark.parametrize("row", ["gpt_oss", "gemma4_text"])
def test_a_rope_that_is_null_is_the_types_own(tmp_path: Path, row: str) -> None:
    """As in transformers, where a null counts as absent."""
    oracle = save_tiny(tmp_path, row, rope_parameters=None)
    stated = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(stated | {"rope_parameters": None}))
    case = load_case(resolve_model(str(tmp_path)), oracle)
    (logits,) = case.sequences().step([(Row(), prompt(21))])
    assert_close(logits, case.logits(prompt(21)), "with its own rope")
