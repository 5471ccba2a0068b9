"""A folder as a registry, on a package made for the test."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bosch.plugins import describe_plugin, first_sentence, list_plugins, load_plugin, suggest


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
    with pytest.raises(ValueError, match="did you mean 'apple'") as error:
        function(fruits, "aple")
    assert "pear" in str(error.value)
    with pytest.raises(ValueError, match="there are apple, pear") as error:
        function(fruits, "xyz")
    assert "did you mean" not in str(error.value)
    with pytest.raises(ValueError, match="'_peel' is not one of the fruits"):
        function(fruits, "_peel")
    assert suggest("a", []) == "there are none."


def test_first_sentence() -> None:
    for docstring, sentence in (
        ("One.", "One."),
        ("Needs 2.11 of\n  torch. More.", "Needs 2.11 of torch."),
        ("A title\n\nA paragraph.", "A title"),
        ("", ""),
    ):
        assert first_sentence(docstring) == sentence
