"""What every configuration class shares: strict keys, one error class, freezing, and how a field is declared."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo
from typing_extensions import Self, TypedDict, Unpack

from headrace.config.errors import ConfigError, Problem, describe, problems_from

LARGEST_NUMBER = 2**63 - 1
"""Of a whole number; arrays and messages hold no larger one."""

Status = Literal["stable", "beta", "prototype", "deprecated"]


class Choice(str, enum.Enum):
    """An enumeration whose members are written by name in any case."""

    @classmethod
    def _missing_(cls, value: object) -> Choice | None:
        if not isinstance(value, str):
            return None
        return next((member for member in cls if member.value.lower() == value.lower()), None)

    def __str__(self) -> str:
        return str(self.value)


class Limits(TypedDict, total=False):
    """What a field declaration may add to its default and meaning."""

    ge: float
    gt: float
    le: float
    lt: float
    min_length: int
    python_only: bool


def stable(default: Any, meaning: str, **limits: Unpack[Limits]) -> Any:
    """A field whose name and behaviour will stay. A class as default is called for each instance."""
    return _field("stable", default, meaning, limits)


def beta(default: Any, meaning: str, **limits: Unpack[Limits]) -> Any:
    """A field that is useful today and may still change."""
    return _field("beta", default, meaning, limits)


def prototype(default: Any, meaning: str, **limits: Unpack[Limits]) -> Any:
    """A field that may change or go at any time."""
    return _field("prototype", default, meaning, limits)


def deprecated(default: Any, meaning: str, **limits: Unpack[Limits]) -> Any:
    """A field kept so that old files still load; the meaning says what to use instead."""
    return _field("deprecated", default, meaning, limits)


def _field(status: Status, default: Any, meaning: str, limits: Limits) -> Any:
    rest: dict[str, Any] = dict(limits)
    extra: dict[str, Any] = {"status": status}
    if rest.pop("python_only", False):
        extra["python_only"] = True
    if isinstance(default, type):
        return Field(default_factory=default, description=meaning, json_schema_extra=extra, **rest)
    return Field(default, description=meaning, json_schema_extra=extra, **rest)


class ConfigModel(BaseModel):
    """Base of all configuration classes.

    Unknown keys are errors, assignment is checked, and `freeze()` makes the object and all that
    hangs from it read-only. Construction and assignment raise `ConfigError`, never pydantic's own.
    """

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
        allow_inf_nan=False,  # a file may write .inf, but JSON to the engine's process can't
        defer_build=True,
    )

    ALIASES: ClassVar[dict[str, str]] = {}
    """Other spellings of a field that files may use."""

    _frozen: bool = PrivateAttr(default=False)

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise ConfigError(problems_from(error, type(self))) from None

    # Marks __init__ as pydantic's own: nested values keep the fast path, errors are converted once, at the top.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_frozen" and self.is_frozen:
            raise ConfigError(Problem(name, "the configuration is resolved and can't change any more"))
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(problems_from(error, type(self))) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigModel) and type(self) is type(other) and vars(self) == vars(other)

    @property
    def is_frozen(self) -> bool:
        """Whether `freeze()` has been called."""
        return self._frozen

    def freeze(self) -> Self:
        """Make this object and every configuration object below it read-only."""
        for child in self.children():
            child.freeze()
        self._frozen = True
        return self

    def thaw_copy(self) -> Self:
        """A writable copy; configuration objects below are copied too, all other values are shared."""
        copy = self.model_copy(update={name: _thawed(value) for name, value in self.__dict__.items()})
        copy._frozen = False
        # model_copy(update=...) counts every name as set; only what the caller set may win over a file.
        copy.__pydantic_fields_set__ = set(self.model_fields_set)
        return copy

    def children(self) -> list[ConfigModel]:
        """Configuration objects held directly, also inside lists and dicts."""
        found: list[ConfigModel] = []
        for value in self.__dict__.values():
            held = cast("dict[Any, Any]", value).values() if isinstance(value, dict) else value
            if isinstance(held, ConfigModel):
                found.append(held)
            elif not isinstance(held, str) and hasattr(held, "__iter__"):
                found += [item for item in cast("list[Any]", held) if isinstance(item, ConfigModel)]
        return found

    def derive(self, **values: Any) -> None:
        """Store values that follow from others, without checks; they then travel like values that were set."""
        assert values.keys() <= type(self).model_fields.keys()
        vars(self).update(values)
        self.model_fields_set.update(values)

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        values = cast("dict[str, Any]", data)
        if cls.ALIASES.keys() & values.keys():
            values = cls._renamed(values)
        found = [
            Problem(name, f"expected {describe(cls.model_fields[name].annotation)}, got {str(value).lower()}")
            for name, value in values.items()
            if _holds_bool(value) and name in cls.model_fields and not _takes_bool(cls, name)
        ]
        if found:
            raise ConfigError(found)
        return values

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        """Of numbers as they were read: a flag's text is one, too."""
        found = [
            Problem(name, f"must be less than or equal to {LARGEST_NUMBER}, got {value}")
            for name, value in vars(self).items()
            if isinstance(value, int) and value > LARGEST_NUMBER
        ]
        if found:
            raise ConfigError(found)
        return self

    @classmethod
    def _renamed(cls, values: dict[str, Any]) -> dict[str, Any]:
        renamed = dict(values)
        for other, name in cls.ALIASES.items():
            if other not in renamed:
                continue
            if name in renamed:
                raise ConfigError(Problem(other, f"another spelling of {name}, which is set too: keep one"))
            renamed[name] = renamed.pop(other)
        return renamed


def _holds_bool(value: Any) -> bool:
    """Whether pydantic would read true or false as a number here."""
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, bool) for item in cast("list[Any]", value))
    return isinstance(value, bool)


@functools.cache
def _takes_bool(cls: type[ConfigModel], name: str) -> bool:
    return _mentions_bool(cls.model_fields[name].annotation)


def _mentions_bool(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return any(isinstance(value, bool) for value in get_args(annotation))
    return annotation in (bool, Any, object) or any(_mentions_bool(arg) for arg in get_args(annotation))


def _thawed(value: Any) -> Any:
    if isinstance(value, ConfigModel):
        return value.thaw_copy()
    if isinstance(value, list):
        return [_thawed(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _thawed(item) for key, item in cast("dict[Any, Any]", value).items()}
    return value


def default_of(cls: type[ConfigModel], name: str) -> Any:
    """The default of a field, made afresh."""
    field = cls.model_fields[name]
    return field.get_default() if field.default_factory is None else cast("Callable[[], Any]", field.default_factory)()


def label_of(field: FieldInfo, name: str) -> Any:
    """A label of a field's declaration (`status`, `python_only`), None when it has none."""
    extra = cast("dict[str, Any]", field.json_schema_extra or {})
    return extra.get(name)
