"""recipes/search_mask.py from the command line to the files, on a random model; and the step from
scores to a mask."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from bosch.assets import asset_folder
from bosch.calibration import write_calibration
from bosch.config import Config, MaskConfig
from bosch.data.calibration import FACTS
from bosch.data.calibration_stage import read_set
from bosch.masks.formats import export_mask
from bosch.masks.mask import MaskFile, read_mask, write_mask
from bosch.method import Inputs, Scores, Selection
from bosch.methods import from_file, random_groups
from bosch.methods._choose import choose_most_local, make_mask
from bosch.methods._examples import FILE
from bosch.model import load_for_search, read_model_info
from bosch.recipes import presets, search_mask
from bosch.recipes.search_mask import main
from bosch.run.errors import UserError
from bosch.run.files import verify_folder, write_sealed_json
from bosch.run.folder import RunFolder
from bosch.run.stage import Artifact, Stage
from bosch.search import mask_stage
from bosch.search.mask_stage import learning_settings
from bosch.sink import CONSTANTS_FILE, Sink
from bosch.training.learner import make_learning
from tests.attention_matrices import toy_calibration
from tests.convex_toy import inputs_without_model
from tests.faults.search_program import wait
from tests.fork_server import launch_environment, start
from tests.model_factory import tiny_model
from tests.sampled import sampled
from tests.search_cases import answered_calibration


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", num_hidden_layers=2).save_pretrained(folder)
    return folder


@pytest.fixture
def calibration_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "calibration"
    folder.mkdir()
    write_calibration(folder, toy_calibration(128, count=4))
    return folder


@pytest.fixture
def command(model_folder: Path, calibration_folder: Path, tmp_path: Path) -> list[str]:
    """Everything that a command needs except the method."""
    words = f"--preset tiny --model {model_folder} --window 16 --ratio 0.75"
    words += f" --calibration {calibration_folder} --run-dir {tmp_path / 'run'}"
    return words.split()


def test_a_ranking_leaves_its_files(command: list[str], model_folder: Path, tmp_path: Path) -> None:
    main([*command, "--method", "proxy", "--mass-share", "0.9"])
    folder = tmp_path / "run" / "mask"
    record = read_mask(folder / "mask.json", read_model_info(model_folder))
    assert (record.method, record.mask.num_windowed, record.mask.window_tokens) == ("proxy", 6, 16)
    assert record.settings["mass_share"] == 0.9
    scores = json.loads((folder / "scores.json").read_text())
    assert (scores["larger_is"], scores["window_tokens"]) == ("global", 16)
    assert [len(row) for row in scores["groups"]] == [4, 4]
    assert [len(row) for row in scores["heads"]] == [8, 8]
    values, z = np.array(scores["groups"]), np.array(record.mask.z)
    assert values[z == 0].max() <= values[z == 1].min()
    assert json.loads((folder / "time.json").read_text())["seconds"] >= 0
    assert (folder / "mask.png").read_bytes().startswith(b"\x89PNG")
    verify_folder(folder)


def in_rank(environment: dict[str, str], arguments: list[str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    main(arguments)


@pytest.mark.parametrize("method", sampled(["bosch", "fisher", "proxy", "global_swap"], slice(1)))
def test_ranks_share_the_examples_and_find_what_one_finds(
    method: str, command: list[str], model_folder: Path, tmp_path: Path
) -> None:
    """Three texts for two ranks; bosch and global_swap start from rankings."""
    calibration = tmp_path / "three"
    calibration.mkdir()
    model = load_for_search(model_folder)
    write_calibration(calibration, answered_calibration(model, (40, 52, 64)))
    search = ["--kappa", "4"] if method in ("bosch", "global_swap") else []
    search += ["--starts", "razor", "kvzip", "fisher"] if method == "bosch" else []
    words = [*command, "--calibration", str(calibration), "--method", method, *search]
    found = {}
    for world in (1, 2):
        folder = tmp_path / f"ranks-{world}" / "run"  # each with a folder `shared` of its own
        own = [*words, "--run-dir", str(folder)]
        ranks = [start(in_rank, each, own) for each in launch_environment(world)]
        assert wait(ranks) == [0] * world
        results = {
            str(part.parent.relative_to(folder)): [
                line and line["result"] for line in map(json.loads, part.read_text().splitlines())
            ]
            for part in sorted((folder / "mask").rglob(FILE))
        }
        assert results
        found[world] = results, read_mask(folder / "mask" / "mask.json").mask
    assert found[2] == found[1]


def build(config: Config, calibration: Artifact | None, settings: object = None) -> Stage:
    return mask_stage.stage(config, read_set, make_learning, calibration, settings=settings)


def test_what_makes_a_stage(model_folder: Path, calibration_folder: Path, tmp_path: Path) -> None:
    config = Config(model=str(model_folder), method="razor", window=16, sink="static")
    calibration = Artifact.load(calibration_folder)
    stage = build(config, calibration)
    assert stage.name == "mask"
    assert stage.fingerprint == build(config, calibration).fingerprint
    changes: list[Any] = [{"ratio": 0.5}, {"window": 17}, {"seed": 1}, {"method": "dcam"}]
    changes.append({"mask": MaskConfig(razor_recent_share=0.125)})
    others = {build(replace(config, **each), calibration).fingerprint for each in changes}
    assert len(others - {stage.fingerprint}) == len(changes)
    same = replace(config, mask=MaskConfig(kappa=7))  # not a setting of this method
    assert build(same, calibration).fingerprint == stage.fingerprint
    # As stages of earlier runs have it, which are continued.
    assert stage.facts["settings"]["sink"] == "static"
    assert "sink" not in build(replace(config, sink="none"), calibration).facts["settings"]
    with RunFolder(tmp_path / "run") as run:
        artifact = run.complete(stage)
    assert read_mask(artifact.folder / "mask.json").settings["razor_recent_share"] == 0.25

    # Static sinks beside a mask's file decide too.
    given = from_file.Settings(path=artifact.folder / "mask.json")
    config = replace(config, method="from_file")
    first = build(config, calibration, settings=given).fingerprint
    (artifact.folder / CONSTANTS_FILE).write_bytes(b"other")
    assert build(config, calibration, settings=given).fingerprint != first


def test_a_mask_of_a_file_gets_static_sinks_where_they_are_asked_for(
    model_folder: Path, calibration_folder: Path, tmp_path: Path
) -> None:
    """Measured on the calibration set, as those of every other method; also for a mask that had
    some and was copied without them, as one of an archive of runs is."""
    calibration = Artifact.load(calibration_folder)
    config = Config(model=str(model_folder), method="razor", window=16, sink="none")
    with RunFolder(tmp_path / "without") as run:
        without = run.complete(build(config, calibration)).folder / "mask.json"
    with RunFolder(tmp_path / "with") as run:
        measured = run.complete(build(replace(config, sink="static"), calibration)).folder
    alone = shutil.copy(measured / "mask.json", tmp_path / "alone.json")
    for number, path in enumerate((without, alone)):
        given = from_file.Settings(path=path)
        config = replace(config, method="from_file", sink="static")
        with pytest.raises(UserError, match="needs calibration examples"):
            build(config, None, settings=given)
        with RunFolder(tmp_path / f"of-file-{number}") as run:
            found = run.complete(build(config, calibration, settings=given)).folder
        assert read_mask(found / "mask.json").mask.sink == Sink("static")
        assert (found / CONSTANTS_FILE).read_bytes() == (measured / CONSTANTS_FILE).read_bytes()


def test_gates_learn_at_a_rate_for_all_weights() -> None:
    """`small` trains narrow matrices beside frozen weights; a learned mask trains all."""
    small = presets.small("tiny-qwen3")
    assert (small.train.trained, small.train.peak_learning_rate) == ("lora", 8e-4)
    assert learning_settings(small).peak_learning_rate == 1e-5  # of continual pretraining
    tiny = presets.tiny()  # trains all weights anyway
    assert learning_settings(tiny) == tiny.train


def test_a_calibration_set_of_another_tokenizer_is_refused(
    model_folder: Path, calibration_folder: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    AutoTokenizer.from_pretrained(asset_folder("tiny-qwen3")).save_pretrained(model)
    write_sealed_json(calibration_folder / FACTS, {"tokenizer_hash": "another's"})
    config = Config(model=str(model), method="razor", window=16, sink="static")
    with (
        pytest.raises(UserError, match="of another tokenizer"),
        RunFolder(tmp_path / "run") as run,
    ):
        run.complete(build(config, Artifact.load(calibration_folder)))


def test_the_set_of_a_run_is_found_where_runs_share_it(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        write_calibration(folder, toy_calibration(64, count=1))

    shared = Stage("calibration", run=make, shared=True)
    with RunFolder(tmp_path / "run") as run:
        made = run.complete(shared)
    assert search_mask.find_calibration(None, tmp_path / "run") == made
    assert search_mask.find_calibration(made.folder, tmp_path / "other") == made
    assert search_mask.find_calibration(None, tmp_path / "other") is None


def ranked(ratio: float, seed: int = 0) -> Inputs:
    return inputs_without_model(random_groups, (2, 4), ratio, seed=seed)


def test_the_most_local_groups_go_on_the_window() -> None:
    inputs = ranked(ratio=0.25)
    table = ((0.1, 0.9, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8))
    local = choose_most_local(Scores(table, "local"), inputs)
    assert local.mask.row_texts() == ["1011", "1110"]
    assert choose_most_local(Scores(table, "global"), inputs).mask.row_texts() == ["0101", "1111"]
    assert not local.drawn
    assert local.details == {"tie": None}


def test_ties_are_drawn_by_the_seed_and_recorded() -> None:
    table = ((0.9, 0.5, 0.5, 0.5), (0.5, 0.1, 0.1, 0.1))
    chosen = set()
    for seed in range(12):
        selection = choose_most_local(Scores(table, "local"), ranked(0.5, seed))
        assert selection.mask.num_windowed == 4
        assert selection.mask.z[0][0] == 0
        assert selection.details["tie"] == {"value": 0.5, "num_tied": 4, "num_windowed": 3}
        assert selection.drawn
        chosen.add(selection.mask)
    assert len(chosen) > 1
    one, two = (choose_most_local(Scores(table, "local"), ranked(0.5, 3)) for _ in range(2))
    assert one == two


def test_a_score_that_is_not_finite_is_refused() -> None:
    with pytest.raises(UserError, match="layer 1, group 1 is nan"):
        Scores(((0.9, 0.5, 0.5, 0.5), (0.5, math.nan, 0.1, 0.1)), "local")


def take(path: Path, **changes: Any) -> Selection:
    inputs = inputs_without_model(from_file, (2, 4), 0.5, path=path)
    return make_mask("from_file", replace(inputs, **changes))


def test_a_mask_comes_back_from_its_file_and_from_a_table(tmp_path: Path) -> None:
    inputs = ranked(0.5)
    record = MaskFile(random_groups.select(inputs).mask, inputs.model_info, "random_groups", 0.5)
    path, table = tmp_path / "mask.json", tmp_path / "heads.tsv"
    write_mask(path, record)
    export_mask(record, table)
    for file in (path, table):
        assert take(file).mask == record.mask
        wider = take(file, window_tokens=48)
        assert wider.mask.window_tokens == 48
        assert any("48" in note for note in wider.notes)
        sunk = take(file, sink=Sink("tokens", 4))
        assert sunk.mask == replace(record.mask, sink=Sink("tokens", 4))
        assert any("sink none" in note and "tokens=4" in note for note in sunk.notes)
    # Zeros and ones as real numbers can be cut at any ratio.
    assert take(table, ratio=0.25).mask.num_windowed == 2
    with pytest.raises(UserError, match=rf"{path}.* 4 of 8 .*--ratio 0\.5\."):
        take(path, ratio=0.25)
    other = replace(record, model=replace(record.model, weight_hash="e" * 32))
    write_mask(tmp_path / "other.json", other)
    with pytest.raises(UserError, match="any/model"):
        take(tmp_path / "other.json")
