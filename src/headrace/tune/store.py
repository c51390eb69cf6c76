"""The record of a search: every trial, and the reports of those that were measured, so that it can go on later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.bench.report import Report, read_report, write_report
from headrace.tune.judge import Figures

SCHEMA_VERSION = 1
AGAIN = "again"
"""In the place of a knob: a trial that only measures a second time, as the settings will be used."""

Through = Literal["engine", "server"]
Outcome = Literal["measured", "pruned", "impossible", "failed", "no time"]


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One set of settings that was considered."""

    number: int
    knob: str
    """The setting that was turned; "" is the beginning, AGAIN a second measurement."""
    settings: dict[str, Any]
    """What differs from what the user gave."""
    outcome: Outcome
    reason: str = ""
    predicted: Figures | None = None
    measured: Figures | None = None
    through: Through = "engine"
    """What was measured: the engine in the process of the search, or a server over HTTP."""
    report: str = ""
    """File with the whole measurement, in the folder of the record."""
    seconds: float = 0.0
    """That measuring took, the engine's start included."""

    @property
    def name(self) -> str:
        return (
            ", ".join(f"{path.split('.')[-1]}={json.dumps(value)}" for path, value in self.settings.items())
            or "as given"
        )


class Journal(msgspec.Struct, kw_only=True):
    """The file `trials.json`."""

    schema_version: int = SCHEMA_VERSION
    asked: dict[str, Any]
    """Model, settings, workload, loads and goal: a search for something else may not go on from here."""
    trials: list[Trial] = []
    best: int | None = None
    """Number of the trial whose settings were written."""


class Store:
    """Owns a folder."""

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        """Goes on from what is there.

        Raises:
            ValueError: the folder is another search's.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "trials.json"
        self.journal = Journal(asked=asked)
        self._known: dict[tuple[bool, str], Trial] = {}
        if self._file.exists():
            past = self._read()
            if past.asked != json.loads(json.dumps(asked)):
                raise ValueError(
                    f"--output_dir: {folder} has the trials of another model, workload or goal: choose another folder"
                )
            measured = [trial for trial in past.trials if trial.outcome == "measured"]
            self._known = {_key(trial.settings, trial.knob == AGAIN): trial for trial in measured}

    def _read(self) -> Journal:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=Journal)
        except msgspec.DecodeError as error:
            raise ValueError(f"{self._file} is no record of a search ({error}): choose another --output_dir") from None

    def known(self, settings: dict[str, Any], *, is_again: bool = False) -> Trial | None:
        """The same settings, measured by an earlier process: the first time, or the second."""
        return self._known.get(_key(settings, is_again))

    def report(self, trial: Trial) -> Report:
        return read_report(self.folder / trial.report)

    def keep(self, report: Report, number: int) -> str:
        """-> the name of its file"""
        name = f"trial-{number:03d}.json"
        while any(trial.report == name for trial in self._known.values()):
            name = f"{name.removesuffix('.json')}b.json"
        write_report(report, self.folder / name)
        return name

    def add(self, trial: Trial) -> None:
        self.journal.trials.append(trial)
        self.save()

    def save(self) -> None:
        data = msgspec.json.format(msgspec.json.encode(self.journal), indent=2)
        part = self._file.with_suffix(".part")
        part.write_bytes(data + b"\n")
        part.replace(self._file)


def _key(settings: dict[str, Any], is_again: bool) -> tuple[bool, str]:
    return is_again, json.dumps(settings, sort_keys=True)
