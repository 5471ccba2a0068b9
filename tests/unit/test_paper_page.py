"""docs/paper.md names files, options and settings that exist."""

import dataclasses
import re
from pathlib import Path

import pytest

import recipes
from bosch.config import Config
from bosch.plugins import list_plugins

ROOT = Path(recipes.__path__[0]).parent
PAGE = (ROOT / "docs" / "paper.md").read_text("utf-8")
FOLDERS = "bosch|data|training|eval|recipes|launch|tests|docs|benchmarks"
CODE = re.findall(r"`([^`]+)`", PAGE)


def test_every_file_it_names_exists() -> None:
    named = {path for code in CODE for path in re.findall(rf"\b(?:{FOLDERS})/[\w./-]+", code)}
    assert len(named) > 40
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_function_and_setting_it_names_stands_in_its_file() -> None:
    pairs = re.findall(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, )?)+)", PAGE)
    names = [(file, name) for file, told in pairs for name in re.findall(r"`([\w.]+)`", told)]
    assert len(names) >= 6
    for file, name in names:
        for part in name.split("."):
            assert re.search(rf"\b{part}\b", (ROOT / file).read_text()), f"{file} has no {name}"


@pytest.mark.parametrize("number", range(1, 26))
def test_every_equation_has_a_place(number: int) -> None:
    rows = [row for row in PAGE.splitlines() if row.startswith("| eq.")]
    covered = set()
    for row in rows:
        told = row.split("|")[1].split(":")[0]
        spans = re.findall(r"(\d+)(?: to (\d+))?", told.split(", algorithm")[0])
        for first, last in spans:
            covered.update(range(int(first), int(last or first) + 1))
    assert number in covered


def test_every_table_and_figure_has_a_place() -> None:
    told = " ".join(row.split("|")[1] for row in PAGE.splitlines() if row.startswith("| "))
    for word, last in (("table", 20), ("figure", 8)):
        covered = set()
        for part in re.findall(rf"{word}s? ([\d, to]+)", told):
            for first, end in re.findall(r"(\d+)(?: to (\d+))?", part):
                covered.update(range(int(first), int(end or first) + 1))
        assert covered >= set(range(1, last + 1)), f"{word}: {set(range(1, last + 1)) - covered}"


def test_every_method_of_the_paper_is_there() -> None:
    methods = set(list_plugins("bosch.methods"))
    assert {
        Path(path).stem for path in re.findall(r"bosch/methods/([a-z]\w+\.py)", PAGE)
    } <= methods


def test_options_of_the_chain_it_names_exist() -> None:
    fields = {
        f"--{section.name}.{inner.name.replace('_', '-')}"
        for section in dataclasses.fields(Config)
        if dataclasses.is_dataclass(section.default_factory)
        for inner in dataclasses.fields(section.default_factory)
    }
    named = set(re.findall(r"--(?:calibration|mask|data|train|eval)\.[\w-]+", PAGE))
    assert named
    assert named <= fields
