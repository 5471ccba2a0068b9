"""docs/paper.md names files, options and settings that exist."""

import dataclasses
import re
from pathlib import Path

from bosch.config import Config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "paper.md").read_text("utf-8")
FOLDERS = "bosch|data|training|eval|recipes|launch|tests|docs|benchmarks"
CODE = re.findall(r"`([^`]+)`", PAGE)


def test_every_file_it_names_exists() -> None:
    named = {path for code in CODE for path in re.findall(rf"\b(?:{FOLDERS})/[\w./-]+", code)}
    assert len(named) > 40
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


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
