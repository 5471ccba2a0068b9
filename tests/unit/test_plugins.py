"""A folder as a registry, on a package made for the test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bosch.plugins import (
    BrokenPluginError,
    describe_plugin,
    first_sentence,
    list_plugins,
    load_plugin,
    suggest,
)
from bosch.run.errors import UserError
from tests.package_copy import PackageCopy


@pytest.fixture
def fruits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    folder = tmp_path / "basket" / "fruits"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder / "__init__.py"):
        path.touch()
    (folder / "apple.py").write_text('"""A fruit that\nkeeps. It is round."""\nCOLOR = "red"\n')
    (folder / "pear.py").write_text("raise RuntimeError('imported')\n")
    (folder / "_peel.py").touch()
    (folder / "notes.txt").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield "basket.fruits"
    for name in [name for name in sys.modules if name.split(".")[0] == "basket"]:
        del sys.modules[name]


def test_the_files_of_the_folder_are_the_plugins(fruits: str) -> None:
    assert list_plugins(fruits) == ("apple", "pear")


def test_a_new_file_is_a_new_plugin(fruits: str, tmp_path: Path) -> None:
    (tmp_path / "basket" / "fruits" / "fig.py").write_text('"""Sweet."""\n')
    assert list_plugins(fruits) == ("apple", "fig", "pear")
    assert load_plugin(fruits, "fig").__doc__ == "Sweet."
    assert load_plugin(fruits, "apple").COLOR == "red"


def test_describe_imports_nothing(fruits: str) -> None:
    assert describe_plugin(fruits, "apple") == "A fruit that keeps."
    assert describe_plugin(fruits, "pear") == ""


@pytest.mark.parametrize("function", [load_plugin, describe_plugin])
def test_an_unknown_name_offers_the_nearest(fruits: str, function) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"'aple'.* did you mean 'apple'.* pear"):
        function(fruits, "aple")
    with pytest.raises(UserError, match=r"'xyz'.* apple, pear") as error:
        function(fruits, "xyz")
    assert "did you mean" not in str(error.value)
    with pytest.raises(UserError, match=r"'_peel'.* fruits"):
        function(fruits, "_peel")
    assert suggest("a", []) == "there are none."


@pytest.mark.parametrize(
    ("text", "parts", "described"),
    [
        ('"""Round."""\nCOLOR = = 1\n', ["plum.py, line 2", "invalid syntax"], "line 2"),
        ("COLOR = '\0'\n", ["plum.py", "null bytes"], "null bytes"),
        ("import no_such_package.part\n", ["plum.py, line 1", "'no_such_package'"], ""),
        ("from basket import peach\n", ["plum.py, line 1", "cannot import name 'peach'"], ""),
        ("\nraise KeyError('sugar')\n", ["plum.py, line 2", "KeyError: 'sugar'"], ""),
        ("from .pear import stone\n", ["plum.py, line 1", "RuntimeError: imported"], ""),
        ('"""Sour."""\n', ["plum.py", "COLOR"], "Sour."),
    ],
)
def test_a_broken_file_is_one_sentence_that_names_it_and_breaks_no_other(
    fruits: str, tmp_path: Path, text: str, parts: list[str], described: str
) -> None:
    folder = tmp_path / "basket" / "fruits"
    (folder / "__init__.py").write_text('NEEDS = ("COLOR",)\n')
    (folder / "plum.py").write_text(text)
    with pytest.raises(BrokenPluginError) as error:
        load_plugin(fruits, "plum")
    assert len(str(error.value).splitlines()) == 1
    for part in [str(folder), *parts]:
        assert part in str(error.value)
    assert described in describe_plugin(fruits, "plum")
    assert list_plugins(fruits) == ("apple", "pear", "plum")
    assert load_plugin(fruits, "apple").COLOR == "red"


def test_the_cause_of_a_broken_file_is_kept_for_debug(fruits: str) -> None:
    with pytest.raises(BrokenPluginError) as error:
        load_plugin(fruits, "pear")
    assert isinstance(error.value.__cause__, RuntimeError)


def test_what_an_editor_leaves_is_no_plugin(fruits: str, tmp_path: Path) -> None:
    (tmp_path / "basket" / "fruits" / ".#apple.py").symlink_to("nowhere")
    assert list_plugins(fruits) == ("apple", "pear")


REGISTERED = """
import bosch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
print([name for name in ("bosch_qwen3", "bosch_mistral") if name in CONFIG_MAPPING])
"""


@pytest.mark.slow
def test_broken_files_in_every_folder_leave_the_commands_working(tmp_path: Path) -> None:
    copy = PackageCopy(tmp_path / "copy")
    syntax_error = "def f(:\n"
    copy.write("bosch/eval/suites/mine.py", syntax_error)
    copy.write("bosch/methods/mine.py", syntax_error)
    copy.write("bosch/methods/unnamed.py", '"""A method that does nothing."""\n')

    code, out, errors = copy.run("bosch.recipes.search_mask", "--list")
    assert code == 0, errors
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "line 1" in lines["mine"]
    assert "A method that does nothing." in lines["unnamed"]

    search = ("bosch.recipes.search_mask", "--model", "tiny-qwen3-2layer", "--run-dir", "run")
    for method, parts in (("mine", ["mine.py, line 1"]), ("unnamed", ["unnamed.py", "Settings"])):
        code, out, errors = copy.run(*search, "--method", method)
        assert code == 2
        [line] = errors.splitlines()
        assert line.startswith("error: ")
        for part in parts:
            assert part in line
        assert not (copy.root / "run").exists()

    evaluate = ("bosch.recipes.evaluate_model", "--model", "tiny-qwen3-2layer", "--suite")
    code, out, errors = copy.run(*evaluate, "mine")
    assert code == 2
    assert errors.startswith("error: ")
    assert "suites/mine.py, line 1" in errors

    code, out, errors = copy.run(*search, "--method", "interleave")
    assert code == 0, errors
    assert (copy.root / "run" / "mask" / "mask.json").is_file()


def test_a_broken_family_is_named_and_the_others_are_registered(tmp_path: Path) -> None:
    copy = PackageCopy(tmp_path / "copy")
    copy.write("bosch/families/a_broken_one.py", "raise RuntimeError('at import')\n")
    copy.write("program.py", REGISTERED)
    code, out, errors = copy.run("program")
    assert code == 0, errors
    assert out == "['bosch_qwen3', 'bosch_mistral']\n"
    assert "a_broken_one.py, line 1" in errors
    assert "RuntimeError: at import" in errors


def test_first_sentence() -> None:
    for docstring, sentence in (
        ("One.", "One."),
        ("Needs 2.11 of\n  torch. More.", "Needs 2.11 of torch."),
        ("A title\n\nA paragraph.", "A title"),
        ("", ""),
    ):
        assert first_sentence(docstring) == sentence
