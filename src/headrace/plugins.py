"""The plug-in rooms: which names each has, and the one symbol behind a name, loaded on first use.

In a plug-in room the file name is the key and the file's `__all__` holds exactly one name. Files that begin with an
underscore, `__init__.py` and `port.py` (what a plug-in of the room must offer) are not plug-ins.

A package outside this tree joins a room through the entry-point group `headrace.plugins`. The entry's name is
`room:name`; its value is the symbol (`package.module:Symbol`) or a module whose `__all__` holds exactly one name:

    [project.entry-points."headrace.plugins"]
    "models:mymodel" = "mypackage.mymodel"
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

__all__ = ["ENTRY_POINT_GROUP", "ROOMS", "Room", "load", "names"]

Room = Literal["attention", "kernels", "kernels.moe", "models", "quant", "server.parsers", "speculative", "transfer"]

ROOMS: tuple[Room, ...] = get_args(Room)
ENTRY_POINT_GROUP = "headrace.plugins"
NOT_PLUGINS = frozenset({"port"})


def names(room: Room) -> list[str]:
    """The sorted names of a room's plug-ins, this package's and those of installed packages. Imports none of them."""
    return sorted(_own_names(room) | _outside(room).keys())


def load(room: Room, name: str) -> Any:
    """The symbol that the plug-in `name` of `room` exports.

    Raises:
        ValueError: no such name (the closest are given), two plug-ins of that name, or an installed package whose
            plug-in can't be loaded.
    """
    own = name in _own_names(room)
    outside = _outside(room).get(name, [])
    if own + len(outside) > 1:
        owners = [*(["headrace"] if own else []), *(_distribution(entry) for entry in outside)]
        raise ValueError(
            f"{room} plug-in {name!r} is offered by more than one package ({', '.join(owners)}): uninstall one"
        )
    if own:
        return _only_symbol(importlib.import_module(f"{__package__}.{room}.{name}"))
    if outside:
        return _load_outside(outside[0])
    raise ValueError(_unknown(room, name))


def _own_names(room: Room) -> set[str]:
    """File names of the room's folder; the folder is not imported, since a device room would bring torch along."""
    if room not in ROOMS:
        raise ValueError(f"unknown plug-in room {room!r}: it is one of {', '.join(ROOMS)}")
    folder = Path(__file__).parent.joinpath(*room.split("."))
    return {
        module.name
        for module in pkgutil.iter_modules([str(folder)])
        if not module.ispkg and not module.name.startswith("_") and module.name not in NOT_PLUGINS
    }


@cache
def _entries() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _outside(room: Room) -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for entry in _entries():
        entry_room, _, name = entry.name.partition(":")
        if entry_room == room and name and entry not in found.setdefault(name, []):
            found[name].append(entry)
    return found


def _load_outside(entry: EntryPoint) -> Any:
    try:
        target = entry.load()
        return _only_symbol(target) if isinstance(target, ModuleType) else target
    except Exception as error:
        # Foreign code may fail in any way, and the user needs the package's name whatever happened.
        raise ValueError(
            f"plug-in {entry.name} of package {_distribution(entry)} can't be loaded"
            f" ({type(error).__name__}: {error}): update or uninstall that package"
        ) from error


def _only_symbol(module: ModuleType) -> Any:
    exported: list[str] = list(vars(module).get("__all__", ()))
    if len(exported) != 1:
        raise TypeError(f"plug-in {module.__name__} must export exactly one name in __all__, not {exported}")
    return getattr(module, exported[0])


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value


def _unknown(room: Room, name: str) -> str:
    known = names(room)
    if not known:
        return f"unknown {room} plug-in {name!r}: the room has none installed"
    close = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    if close:
        return f"unknown {room} plug-in {name!r}: did you mean {' or '.join(repr(match) for match in close)}?"
    return f"unknown {room} plug-in {name!r}: it is one of {', '.join(known)}"
