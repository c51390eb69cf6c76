"""Walks every configuration class: names, labels, and how a misspelt key is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from pydantic import BaseModel

import headrace.config
from headrace.config.base import ConfigModel, default_of
from headrace.config.disagg import load_disagg
from headrace.config.errors import ConfigError, model_classes, transparent
from headrace.config.llm_args import LlmArgs
from headrace.config.resolution import resolve

Place = tuple[str, type[BaseModel], bool]


def places(root: type[BaseModel], prefix: str = "") -> Iterator[Place]:
    """(path, class, whether it is held in a mapping of names) of every class a file can reach."""
    for name, field in root.model_fields.items():
        if name in transparent(root):
            continue
        for cls in model_classes(field.annotation):
            path = f"{prefix}{name}"
            named = "dict[" in str(field.annotation)
            yield path, cls, named
            yield from places(cls, f"{path}.")


PLACES = [place for place in places(LlmArgs) if ".encoder_cuda_graph." not in place[0]]


def minimal(cls: type[BaseModel]) -> dict[str, Any]:
    """The keys without which a mapping of this class is refused for other reasons."""
    found: dict[str, Any] = {}
    for name, field in cls.model_fields.items():
        if get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1:
            found[name] = get_args(field.annotation)[0]
    return found


def file_with(place: Place, key: str) -> dict[str, Any]:
    """Nested mappings that reach `place`, with `key` in the last."""
    path, cls, named = place
    value: dict[str, Any] = {**minimal(cls), key: 1}
    if named:
        value = {"image": value}
    holders = holders_of(path)
    for name in reversed(path.split(".")):
        value = {**minimal(holders.pop()), name: value} if holders else {name: value}
    return value


def holders_of(path: str) -> list[type[BaseModel]]:
    """A class for each mapping above `path`, outermost first, the top left out."""
    found: list[type[BaseModel]] = []
    cls: type[BaseModel] = LlmArgs
    for name in path.split(".")[:-1]:
        candidates = model_classes(cls.model_fields[name].annotation)
        rest = path.split(".", len(found) + 1)[-1].split(".")[0]
        cls = next(candidate for candidate in candidates if rest in candidate.model_fields)
        found.append(cls)
    return found


def misspelt(cls: type[BaseModel]) -> tuple[str, str]:
    """A key that is one letter away from a real one, and the real one."""
    name = max((name for name in cls.model_fields if name not in minimal(cls)), key=len, default="")
    return name[:-2] + name[-1], name


@pytest.mark.parametrize("place", PLACES, ids=[f"{path}:{cls.__name__}" for path, cls, _ in PLACES])
def test_a_misspelt_key_is_refused_with_path_line_and_suggestion(place: Place, tmp_path: Path) -> None:
    path, cls, named = place
    wrong, right = misspelt(cls)
    if not right:
        pytest.skip("has no key of its own")
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump(file_with(place, wrong), sort_keys=False))
    line = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if wrong in text)
    with pytest.raises(ConfigError) as caught:
        resolve(config=file, needs_model=False, refuse_missing_features=False)
    where = f"{path}{'.image' if named else ''}.{wrong}"
    found = {problem.path: problem for problem in caught.value.problems}
    assert found[where].message == f"unknown key, did you mean '{right}'?"
    assert found[where].source == f"{file}:{line}"


def test_a_misspelt_top_level_key(tmp_path: Path) -> None:
    for name in LlmArgs.model_fields:
        wrong = name[: len(name) // 2] + "q" + name[len(name) // 2 :]
        file = tmp_path / "config.yml"
        file.write_text(f"\n{wrong}: null\n")
        with pytest.raises(ConfigError) as caught:
            resolve(config=file, needs_model=False)
        assert str(caught.value) == f"{file}:2: {wrong}: unknown key, did you mean '{name}'?"


@pytest.mark.parametrize("group", ["context_servers", "generation_servers"])
@pytest.mark.parametrize(("wrong", "right"), [("num_instance", "num_instances"), ("max_batch_sizes", "max_batch_size")])
def test_a_misspelt_key_of_a_disaggregated_service(group: str, wrong: str, right: str, tmp_path: Path) -> None:
    file = tmp_path / "disagg.yml"
    text = "context_servers: {}\ngeneration_servers: {}\n"
    file.write_text(text.replace(f"{group}: {{}}", f"{group}: {{{wrong}: 1}}"))
    with pytest.raises(ConfigError) as caught:
        load_disagg(file)
    assert f"{group}.{wrong}: unknown key, did you mean '{right}'?" in str(caught.value)


def all_classes() -> list[type[ConfigModel]]:
    public = [getattr(headrace.config, name) for name in headrace.config.__all__]
    return [cls for cls in public if isinstance(cls, type) and issubclass(cls, ConfigModel)]


@pytest.mark.parametrize("cls", all_classes(), ids=lambda cls: cls.__name__)
def test_every_field_has_a_meaning_and_a_status(cls: type[ConfigModel]) -> None:
    for name, field in cls.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict), name
        assert extra["status"] in ("stable", "beta", "prototype", "deprecated"), name
        assert field.description and field.description.endswith("."), name


@pytest.mark.parametrize("cls", all_classes(), ids=lambda cls: cls.__name__)
def test_defaults_are_valid_values(cls: type[ConfigModel]) -> None:
    """A default that validation would refuse or change could not be written into a file."""
    required = [name for name, field in cls.model_fields.items() if field.is_required()]
    if required:
        return
    try:
        made = cls()
    except ConfigError as error:
        # Drafters and connectors that need a model, a length or a name: only such problems.
        assert all("required" in p.message or "must be greater than 0" in p.message for p in error.problems)
        return
    defaults = {name: default_of(cls, name) for name in cls.model_fields}
    assert cls(**defaults) == made


def test_public_names_are_the_references() -> None:
    from headrace import llmapi
    from headrace.config import CapacitySchedulerPolicy, CudaGraphConfig, DecodeCudaGraphConfig, TorchLlmArgs

    assert TorchLlmArgs is LlmArgs
    assert CudaGraphConfig is DecodeCudaGraphConfig
    assert llmapi.KvCacheConfig is headrace.config.KvCacheConfig
    assert CapacitySchedulerPolicy("max_utilization") is CapacitySchedulerPolicy.MAX_UTILIZATION
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = headrace.config.Nonsense
