"""eval/run_archive.py: a packed run says in a comparison what the run itself says."""

import json
from pathlib import Path

import pytest

from eval.compare import compare
from eval.report_tables import make_tables
from eval.run_archive import pack_run, unpack_run
from tests.run_folders import FakeRun


def test_an_unpacked_run_gives_the_same_tables(tmp_path: Path) -> None:
    run = FakeRun(method="fisher").write(tmp_path / "runs")
    for stage in ("mask", "train"):
        (run / stage / "manifest.json").write_text(json.dumps({"wall_seconds": [2.0, 3.5]}))
    pack_run(run, tmp_path / "one.json.gz")
    unpack_run(tmp_path / "one.json.gz", tmp_path / "again" / run.name)
    again = compare([tmp_path / "again" / run.name])
    assert make_tables(again) == make_tables(compare([run]))
    assert not again.runs[0].problems
    assert again.runs[0].stage_seconds == {"mask": 5.5, "train": 5.5}


def test_packing_is_repeatable(tmp_path: Path) -> None:
    run = FakeRun().write(tmp_path / "runs")
    for name in ("one", "two"):
        pack_run(run, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_torn_archive_is_named(tmp_path: Path) -> None:
    run = FakeRun().write(tmp_path / "runs")
    pack_run(run, tmp_path / "torn")
    (tmp_path / "torn").write_bytes((tmp_path / "torn").read_bytes()[:50])
    with pytest.raises(ValueError, match="torn is no packed run"):
        unpack_run(tmp_path / "torn", tmp_path / "again")
