"""What every file of eval/suites must define."""

import dataclasses

import pytest

from bosch.eval.suites._interface import Task
from bosch.plugins import list_plugins, load_plugin


@pytest.mark.parametrize("name", list_plugins("bosch.eval.suites"))
def test_its_settings_are_frozen_and_its_tasks_named_once_each(name: str) -> None:
    suite = load_plugin("bosch.eval.suites", name)
    settings = suite.Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.tasks = ()
    assert hash(settings) == hash(suite.Settings())
    tasks = suite.list_tasks(settings)
    assert tasks
    assert all(isinstance(task, Task) for task in tasks)
    assert len(set(tasks)) == len(tasks)
    assert suite.summarize(settings, []) == []
