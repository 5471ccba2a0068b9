"""Each file of each plug-in folder can be imported, says what it is, and has its interface.

What methods, backends and families must compute is asked by the other contract tests.
"""

import dataclasses
import inspect
from typing import Any

import pytest

from bosch.eval.averages import summarize
from bosch.eval.suites._interface import Task
from bosch.plugins import describe_plugin, list_plugins, load_plugin

CALL = ("call",)
# What each file of a folder defines: a function's parameters, or the kind of another value.
INTERFACES: dict[str, dict[str, tuple[str, ...] | type]] = {
    "bosch.attention.backends": {
        "unavailable": (),
        "supports": CALL,
        "priority": CALL,
        "attend": CALL,
    },
    "bosch.families": {
        "plain_config_class": type,
        "plain_model_class": type,
        "config_class": type,
        "model_class": type,
    },
    # And one of score_groups(inputs), select(inputs): tests/contracts/test_methods.py asks which.
    "bosch.methods": {"Settings": type},
    "bosch.eval.suites": {
        "Settings": type,
        "list_tasks": ("settings",),
        "sources": ("settings", "task"),
        "build_examples": ("settings", "task", "tokenizer", "limit"),
        "score": ("settings", "task", "example", "prediction"),
    },
}


PLUGINS = [(folder, name) for folder in INTERFACES for name in list_plugins(folder)]


@pytest.mark.parametrize(("folder", "name"), PLUGINS)
def test_a_plugin_has_a_sentence_and_its_folders_interface(folder: str, name: str) -> None:
    sentence = describe_plugin(folder, name)
    assert sentence.endswith("."), f"{folder}.{name} begins with {sentence!r}"
    assert len(sentence.split()) > 2
    module = load_plugin(folder, name)
    for what, expected in INTERFACES[folder].items():
        value: Any = getattr(module, what)
        if isinstance(expected, type):
            assert isinstance(value, expected), what
        else:
            assert tuple(inspect.signature(value).parameters) == expected, what


@pytest.mark.parametrize("name", list_plugins("bosch.eval.suites"))
def test_a_suites_settings_are_frozen_and_its_tasks_named_once_each(name: str) -> None:
    suite = load_plugin("bosch.eval.suites", name)
    settings = suite.Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.tasks = ()
    assert hash(settings) == hash(suite.Settings())
    tasks = suite.list_tasks(settings)
    assert {type(task) for task in tasks} == {Task}
    assert len(set(tasks)) == len(tasks)
    assert summarize(suite, settings, []) == []
