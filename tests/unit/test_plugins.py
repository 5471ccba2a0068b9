"""A folder as a registry, on a package made for the test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bosch.plugins import BrokenPluginError, describe_plugin, list_plugins, load_plugin
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


def test_a_new_file_is_a_new_plugin_and_near_names_are_offered(fruits: str, tmp_path: Path) -> None:
    (tmp_path / "basket" / "fruits" / "fig.py").write_text('"""Sweet."""\n')
    assert list_plugins(fruits) == ("apple", "fig", "pear")
    assert load_plugin(fruits, "fig").__doc__ == "Sweet."
    with pytest.raises(UserError, match=r"'aple'.* did you mean 'apple'.* pear"):
        load_plugin(fruits, "aple")
    with pytest.raises(UserError, match=r"'xyz'.* apple, fig, pear"):
        load_plugin(fruits, "xyz")


@pytest.mark.parametrize(
    ("text", "parts", "described"),
    [
        ('"""Round."""\nCOLOR = = 1\n', ["plum.py, line 2", "invalid syntax"], "line 2"),
        ("import no_such_package.part\n", ["plum.py, line 1", "'no_such_package'"], ""),
        ("\nraise KeyError('sugar')\n", ["plum.py, line 2", "KeyError: 'sugar'"], ""),
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


def test_a_broken_family_is_named_and_the_others_are_registered(tmp_path: Path) -> None:
    copy = PackageCopy(tmp_path / "copy")
    copy.write("bosch/families/a_broken_one.py", "raise RuntimeError('at import')\n")
    program = "import bosch\nfrom transformers import CONFIG_MAPPING\n"
    program += "assert {'bosch_qwen3', 'bosch_mistral'} <= set(CONFIG_MAPPING.keys())\n"
    copy.write("program.py", program)
    code, _, errors = copy.run("program")
    assert code == 0, errors
    assert "a_broken_one.py, line 1" in errors
    assert "RuntimeError: at import" in errors
