"""Requests that wait for their grammars: asked for once, released together, ended with the reason, swept in time."""

from __future__ import annotations

import time
from typing import Any

from headrace.scheduler.commands import Commands
from headrace.scheduler.grammars import LIMIT_S
from headrace.scheduler.scheduler import Scheduler
from headrace.seam import SectionResult, StepPlan, StepResult, ints
from headrace.types import Delta, Grammar
from tests.scheduler.driver import Driver

DIGITS = Grammar(kind="regex", spec="[0-9]+", param="guided_regex")


def plan_of(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.plan(time.monotonic())
    assert plan is not None
    return plan


def answer(scheduler: Scheduler, plan: StepPlan, **finished: Any) -> list[Delta]:
    """Commits a step in which nothing was computed; `finished` by command, without its c."""
    assert plan.num_rows == 0
    results = {int(name[1:]): result for name, result in finished.items()}
    nothing = SectionResult(ints(), ints())
    return scheduler.commit(StepResult(plan.step, (nothing,), finished_commands=results)).deltas


def test_asked_for_once_and_released_together() -> None:
    driver = Driver()
    scheduler = driver.scheduler
    for request_id in (1, 2):
        driver.add(request_id, 4, grammar=DIGITS)
    driver.add(3, 4, grammar=Grammar(kind="json_object"))
    first = plan_of(scheduler)
    assert [command.args for command in first.commands] == [
        {"kind": "regex", "spec": "[0-9]+"},
        {"kind": "json_object", "spec": ""},
    ]
    assert answer(scheduler, first) == []
    second = plan_of(scheduler)  # empty plans until the engine is done
    assert second.commands == () and answer(scheduler, second, c1={"error": ""}) == []
    third = plan_of(scheduler)
    inits = {init.request_id: init for init in third.sections[0].inits}
    assert inits.keys() == {1, 2} and inits[1].grammar == DIGITS and inits[1].history is not None
    driver.add(4, 4, grammar=DIGITS)  # known by now
    assert [init.request_id for init in plan_of(scheduler).sections[0].inits] == [4]


def test_others_go_past() -> None:
    driver = Driver()
    driver.add(1, 4, grammar=DIGITS)
    driver.add(2, 4)
    plan = plan_of(driver.scheduler)
    assert [init.request_id for init in plan.sections[0].inits] == [2] and len(plan.commands) == 1


def test_a_broken_one_ends_its_requests_only() -> None:
    driver = Driver()
    for request_id, param in ((1, "guided_regex"), (2, "response_format")):
        driver.add(request_id, 4, grammar=Grammar(kind="regex", spec="(", param=param))
    driver.add(3, 4, grammar=DIGITS)
    driver.scheduler.abort(2)
    deltas = answer(driver.scheduler, plan_of(driver.scheduler), c1={"error": "unclosed group"})
    ended = {delta.id: delta for delta in deltas if delta.finish == "error"}
    assert ended.keys() == {1}
    assert (ended[1].error, ended[1].param) == ("unclosed group", "guided_regex")
    assert driver.scheduler.has_work


def test_one_that_takes_too_long_ends_and_may_still_come() -> None:
    driver = Driver()
    driver.add(1, 4, grammar=DIGITS)
    plan = plan_of(driver.scheduler)
    driver.scheduler.sweep(time.monotonic() + LIMIT_S + 1)
    (late,) = [delta for delta in driver.scheduler.take_deltas() if delta.id == 1]
    assert late.finish == "error" and late.param == "guided_regex" and "simplify" in late.error
    assert not answer(driver.scheduler, plan, c1={"error": ""})
    driver.add(2, 4, grammar=DIGITS)
    assert [init.request_id for init in plan_of(driver.scheduler).sections[0].inits] == [2]


def test_commands_tell_whoever_asked() -> None:
    commands, heard = Commands(), []
    commands.begin("start_profile", {"steps": 2}, heard.append)
    (command,) = commands.take()
    assert (command.name, command.args, commands.is_busy, commands.take()) == ("start_profile", {"steps": 2}, True, ())
    commands.finish({command.id: "done"})
    assert heard == ["done"] and not commands.is_busy
