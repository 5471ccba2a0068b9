"""Each file of each plug-in folder can be imported, says what it is, and has its interface.

What a folder's plug-ins must compute is asked by that folder's own contract tests.
"""

import inspect
from pathlib import Path
from types import ModuleType

import pytest

from bosch.plugins import describe_plugin, list_plugins, load_plugin

ROOT = Path(__file__).parents[2]

# What each file of a folder defines: a function's parameters, or the kind of another value.
INTERFACES: dict[str, dict[str, tuple[str, ...] | type]] = {
    "bosch.backends": {"unavailable": (), "supports": ("call",), "attend": ("call",)},
    "bosch.families": {
        "plain_config_class": type,
        "plain_model_class": type,
        "config_class": type,
        "model_class": type,
    },
    # And one of rank(context), select(context): tests/contracts/test_methods.py asks which.
    "bosch.methods": {"Settings": type},
    "eval.suites": {
        "Settings": type,
        "list_tasks": ("settings",),
        "sources": ("settings", "task"),
        "build_examples": ("settings", "task", "tokenizer", "limit"),
        "score": ("settings", "task", "example", "prediction"),
        "summarize": ("settings", "scored"),
    },
}
FOLDERS = [
    folder
    for folder in ("bosch.methods", "bosch.backends", "bosch.families", "eval.suites")
    if any(ROOT.joinpath(*folder.split(".")).glob("[!_]*.py"))
]
PLUGINS = [(folder, name) for folder in FOLDERS for name in list_plugins(folder)]


def test_every_folder_states_its_interface() -> None:
    assert FOLDERS
    assert set(FOLDERS) <= INTERFACES.keys()  # there: what each file of a new folder must define


@pytest.mark.parametrize(("folder", "name"), PLUGINS)
def test_a_plugin_says_in_a_sentence_what_it_is(folder: str, name: str) -> None:
    sentence = describe_plugin(folder, name)
    assert sentence.endswith("."), f"{folder}.{name} begins with {sentence!r}"
    assert len(sentence.split()) > 2


@pytest.mark.parametrize(("folder", "name"), PLUGINS)
def test_a_plugin_has_the_interface_of_its_folder(folder: str, name: str) -> None:
    module = load_plugin(folder, name)
    missing = [what for what in INTERFACES[folder] if not hasattr(module, what)]
    assert missing == []
    for what, expected in INTERFACES[folder].items():
        assert _fits(module, what, expected), f"{folder}.{name}.{what} is not {expected}"


def _fits(module: ModuleType, what: str, expected: tuple[str, ...] | type) -> bool:
    value = getattr(module, what)
    if isinstance(expected, type):
        return isinstance(value, expected)
    return callable(value) and tuple(inspect.signature(value).parameters) == expected


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_wrong_name_is_answered_with_the_nearest(folder: str) -> None:
    name = list_plugins(folder)[0]
    with pytest.raises(ValueError, match=f"did you mean '{name}'"):
        load_plugin(folder, f"{name}x")
