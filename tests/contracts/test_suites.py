"""What every file of eval/suites must offer, whoever wrote it."""

import dataclasses
from types import ModuleType

import pytest

from bosch.plugins import list_plugins, load_plugin
from eval.suites._interface import Task

SUITES = list_plugins("eval.suites")


@pytest.fixture(params=SUITES)
def suite(request: pytest.FixtureRequest) -> ModuleType:
    return load_plugin("eval.suites", request.param)


def test_its_settings_are_frozen_and_have_defaults(suite: ModuleType) -> None:
    settings = suite.Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.tasks = ()
    assert hash(settings) == hash(suite.Settings())


def test_its_tasks_are_named_once_each(suite: ModuleType) -> None:
    tasks = suite.list_tasks(suite.Settings())
    assert tasks
    assert all(isinstance(task, Task) for task in tasks)
    assert len(set(tasks)) == len(tasks)


def test_nothing_scored_gives_no_results(suite: ModuleType) -> None:
    assert suite.summarize(suite.Settings(), []) == []
