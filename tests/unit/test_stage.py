"""Stages in one process: reuse, conflicts, damage, plans. Kills are tested in tests/faults."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from bosch.run.errors import MissingFileError, UserError
from bosch.run.files import (
    DamagedArtifactError,
    seal_folder,
    verify_folder,
    write_atomically,
    write_sealed_json,
)
from bosch.run.fingerprint import speed_only
from bosch.run.folder import RunFolder
from bosch.run.stage import (
    Artifact,
    Stage,
    StageBlockedError,
    refuse_blocked,
    stages_to_redo,
)
from tests.hybrid_folders import files_of


@dataclass(frozen=True)
class Settings:
    ratio: float = 0.75
    kappa: int = 30
    num_workers: int = speed_only(4)


def write_result(folder: Path, **inputs: Artifact) -> None:
    """Two files, one in a folder of its own, from what the inputs hold."""
    write_atomically(folder / "result.txt", "".join(sorted(inputs)) or "nothing before")
    (folder / "inner").mkdir(exist_ok=True)
    write_atomically(folder / "inner" / "numbers.txt", "1 2 3\n")


def chain(settings: Settings = Settings(), shared: bool = True) -> list[Stage]:
    calibration = Stage("calibration", run=write_result, settings={"examples": 64}, shared=shared)
    mask = Stage("mask", run=write_result, settings=settings, inputs={"calibration": calibration})
    model = Stage("model", run=write_result, inputs={"mask": mask})
    tokens = Stage("tokens", run=write_result)
    return [calibration, mask, model, tokens]


def complete(path: Path, stages: Sequence[Stage], fresh: str | None = None) -> list[str]:
    lines: list[str] = []
    with RunFolder(path, say=lines.append) as run:
        run.set_aside(stages_to_redo(stages, fresh, None))
        for stage in stages:
            run.complete(stage)
    return lines


def actions(path: Path, stages: Sequence[Stage], fresh: str | None = None) -> dict[str, str]:
    return {step.stage.name: step.action for step in RunFolder(path).plan(stages, fresh)}


def test_all_that_is_to_be_made_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    def refuse(what: str) -> None:
        raise UserError(f"{what} is missing.")

    def refuse_settings() -> object:
        raise UserError("text.txt is missing.")

    calibration, mask, model, tokens = chain()
    calibration = replace(calibration, check=lambda: refuse("essays"))
    # Its settings hold what it reads, so that they are refused too, once for all that need it.
    tokens = replace(tokens, settings=refuse_settings, shared=True)
    train = Stage("train", run=write_result, inputs={"model": model, "tokens": tokens})
    train = replace(train, check=lambda: refuse("flash"))
    run = RunFolder(tmp_path / "run")
    with pytest.raises(UserError, match=r"3 things .* essays .* text.txt .* flash"):
        run.check([calibration, mask, model, tokens, train])
    assert not list(tmp_path.iterdir())

    told = [replace(stage, check=lambda: ["the toy world"]) for stage in chain()]
    assert run.check(told) == ["the toy world"]  # once
    complete(run.path, told)
    blind = [replace(stage, check=lambda: refuse("essays")) for stage in told]
    assert run.check(blind) == []  # all are complete
    with pytest.raises(UserError, match="essays"):
        run.check(blind, redo=blind[:1])
    with pytest.raises(UserError, match=r"model takes 100,000\.0 GB, and the disk has .* free"):
        run.check([replace(model, num_bytes=10**14)], redo=[replace(model, num_bytes=10**14)])


def test_complete_stages_are_reused_and_record_what_made_them(tmp_path: Path) -> None:
    stages = chain()
    complete(tmp_path / "run", stages)
    before = files_of(tmp_path)
    lines = complete(tmp_path / "run", chain())
    expected = [f"{stage.name}: complete," for stage in stages]
    assert [line.partition(" reused")[0] for line in lines] == expected
    assert files_of(tmp_path) == before
    manifest = verify_folder(tmp_path / "run" / "mask")
    assert manifest["settings"] == {"ratio": 0.75, "kappa": 30}
    assert manifest["inputs"] == {"calibration": stages[0].fingerprint}
    assert set(manifest["files"]) == {"started.json", "result.txt", "inner/numbers.txt"}
    assert manifest["packages"]["torch"]
    assert len(manifest["wall_seconds"]) == 1


def test_other_settings_are_refused_with_the_difference_and_the_options(tmp_path: Path) -> None:
    complete(tmp_path / "run", chain())
    calibration, mask, model, _ = chain()
    newer = replace(mask, version=2)
    steps = RunFolder(tmp_path / "run").plan(
        [calibration, newer, replace(model, inputs={"mask": newer})]
    )
    assert "1 -> 2" in steps[1].reason
    assert "its input mask" in steps[2].reason
    with pytest.raises(StageBlockedError) as refused:
        complete(tmp_path / "run", chain(Settings(ratio=0.5)))
    for part in ("ratio: 0.75 -> 0.5", "--run-dir", "--fresh mask"):
        assert part in str(refused.value)
    assert "kappa" not in str(refused.value)


def test_other_settings_are_refused_after_a_stage_has_started(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        if error is full:
            write_atomically(folder / "part-1", "x")
        raise error

    killed, full = RuntimeError("killed"), UserError("the disk is full")
    wrong = UserError("--ratio 0.75: cannot be met")  # the settings can be corrected
    other = Stage("mask", run=write_result, settings={"ratio": 0.5})
    for error, then in ((killed, "blocked"), (full, "blocked"), (wrong, "run")):
        run = tmp_path / type(error).__name__ / then
        with pytest.raises(type(error), match=str(error)):
            complete(run, [Stage("mask", run=fail, settings={"ratio": 0.75})])
        assert actions(run, [other]) == {"mask": then}


def test_failed_stage_continues_with_its_whole_files_and_all_its_time(tmp_path: Path) -> None:
    attempts = []

    def fail_once(folder: Path) -> None:
        attempts.append(sorted(path.name for path in folder.glob("[!.]*")))
        assert not list(folder.rglob("*.tmp"))
        write_atomically(folder / f"part-{len(attempts)}", "x")
        write_sealed_json(folder / ".wall_seconds.json", {"seconds": [5.0]})  # as saved meanwhile
        if len(attempts) == 1:
            (folder / ".step-000003.tmp" / "rank-0").mkdir(parents=True)
            (folder / ".step-000003.tmp" / ".sizes.json.tmp").touch()
            (folder / ".result.txt.tmp").touch()
            raise RuntimeError("killed")

    stage = Stage("mask", run=fail_once)
    with pytest.raises(RuntimeError, match="killed"):
        complete(tmp_path / "run", [stage])
    lines = complete(tmp_path / "run", [stage])
    assert lines[0] == "mask: continues where it stopped"
    assert attempts == [["started.json"], ["part-1", "started.json"]]
    assert verify_folder(tmp_path / "run" / "mask")["wall_seconds"][0] == 5


def test_flipped_byte_in_any_file_is_named(tmp_path: Path) -> None:
    complete(tmp_path / "run", chain())
    files = [path for path in tmp_path.rglob("[!.]*") if path.is_file()]
    assert len(files) == 4 * 4 + 1  # four files a stage, and the reference to the shared one
    for path in files:
        original = path.read_bytes()
        for position in {0, len(original) // 2, len(original) - 1}:
            flipped = bytearray(original)
            flipped[position] ^= 1
            path.write_bytes(flipped)
            blocked = [
                s for s in RunFolder(tmp_path / "run").plan(chain()) if s.action == "blocked"
            ]
            assert blocked, path
            assert str(path) in blocked[0].reason
        with pytest.raises(StageBlockedError, match=path.name):
            complete(tmp_path / "run", chain())
        path.write_bytes(original)
    assert set(actions(tmp_path / "run", chain()).values()) == {"reuse"}


def test_foreign_files_are_named_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "mask"
    folder.mkdir(parents=True)
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(StageBlockedError, match=str(folder)):
        complete(tmp_path / "run", chain())
    assert (folder / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").touch()  # in the place of a folder
    with pytest.raises(UserError, match=str(tmp_path / "file")):
        complete(tmp_path / "file", chain())


def test_plan_shows_what_each_stage_would_do_and_changes_nothing(tmp_path: Path) -> None:
    assert set(actions(tmp_path / "run", chain()).values()) == {"run"}
    assert list(tmp_path.iterdir()) == []
    complete(tmp_path / "run", chain()[:2])
    planned = actions(tmp_path / "run", chain()).values()
    assert list(planned) == ["reuse", "reuse", "run", "run"]
    steps = RunFolder(tmp_path / "run").plan(chain(Settings(ratio=0.5)))
    assert [step.action for step in steps] == ["reuse", "blocked", "blocked", "run"]
    assert "mask" in steps[2].reason
    with pytest.raises(StageBlockedError, match=r"ratio: 0\.75 -> 0\.5"):
        refuse_blocked(steps)
    for option in ("fresh", "start"):
        with pytest.raises(UserError, match=r"maks: .*'mask'"):
            RunFolder(tmp_path / "run").plan(chain(), **{option: "maks"})


def test_fresh_makes_a_stage_and_what_depends_on_it_again(tmp_path: Path) -> None:
    complete(tmp_path / "run", chain())
    changed = chain(Settings(ratio=0.5))
    planned = actions(tmp_path / "run", changed, fresh="mask").values()
    assert list(planned) == ["reuse", "run", "run", "reuse"]
    lines = complete(tmp_path / "run", changed, fresh="mask")
    assert str(tmp_path / "run" / "replaced" / "model-1") in lines[0]
    assert verify_folder(tmp_path / "run" / "mask")["settings"]["ratio"] == 0.5
    assert verify_folder(tmp_path / "run" / "replaced" / "mask-1")["settings"]["ratio"] == 0.75


def test_what_was_made_of_a_stage_goes_with_it(tmp_path: Path) -> None:
    """A training of fewer steps has no evaluation of step 75, and reports would read the old."""
    run, stages = tmp_path / "run", chain()
    inputs = {"model": {"source": stages[2]}, "mask": {"source": stages[1]}}
    of_model = Stage("eval/step-75", run=write_result, inputs=inputs["model"])
    of_mask = Stage("eval/mask", run=write_result, inputs=inputs["mask"])
    of_step = Stage("eval/further", run=write_result, inputs={"source": of_model})
    window = Stage("eval/window/64", run=write_result)  # of the run's model, by its path
    complete(run, [*stages, of_model, of_mask, of_step, window])
    with RunFolder(run) as folder:
        folder.set_aside([stages[2]], with_products=True)
    left = {path.parent.relative_to(run).as_posix() for path in run.rglob("started.json")}
    kept = {name for name in left if not name.startswith("replaced/")}
    assert kept == {"mask", "tokens", "eval/mask"}
    verify_folder(run / "replaced" / "eval-step-75-1")


def test_from_makes_later_stages_again_but_not_shared_ones_that_do_not_depend_on_it() -> None:
    *first, tokens = chain()
    redone = stages_to_redo([*first, tokens], None, "model")
    assert [stage.name for stage in redone] == ["model", "tokens"]
    redone = stages_to_redo([*first, replace(tokens, shared=True)], None, "mask")
    assert [stage.name for stage in redone] == ["mask", "model"]


def test_runs_can_be_moved_and_added_to_and_run_at_another_speed(tmp_path: Path) -> None:
    complete(tmp_path / "runs" / "one", chain())
    (tmp_path / "runs").rename(tmp_path / "moved")
    (tmp_path / "moved" / "one" / "mask" / "notes.txt").write_text("looks good")
    planned = actions(tmp_path / "moved" / "one", chain(Settings(num_workers=16)))
    assert set(planned.values()) == {"reuse"}


def test_loaded_artifacts_are_verified_or_known_by_their_content(tmp_path: Path) -> None:
    stages = chain()
    complete(tmp_path / "run", stages)
    tokens = tmp_path / "run" / "tokens"
    assert Artifact.load(tokens).fingerprint == stages[3].fingerprint
    (tokens / "result.txt").write_text("nothing befort")
    again = rf"tokens/result\.txt .*checksum\. Restore {tokens}, or make it again in another folder"
    with pytest.raises(DamagedArtifactError, match=again):
        Artifact.load(tokens)
    fingerprints = []
    for name, text in (("one", "same"), ("two", "same"), ("three", "sane")):
        (tmp_path / name).mkdir()
        write_atomically(tmp_path / name / "text.txt", text)
        fingerprints.append(Artifact.load(tmp_path / name).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
    with pytest.raises(MissingFileError, match=str(tmp_path / "four")):
        Artifact.load(tmp_path / "four")


def test_ranks_share_the_checksums(tmp_path: Path) -> None:
    names = [f"{number}.bin" for number in range(5)]
    for name in names:
        (tmp_path / name).write_bytes(b"0123")
    seal_folder(tmp_path, {"stage": "train"})
    for name in names:
        (tmp_path / name).write_bytes(b"0124")
        refused = []
        for rank in range(3):
            try:
                verify_folder(tmp_path, rank, 3)
            except DamagedArtifactError as error:
                refused.append(str(error))
        assert len(refused) == 1  # by the one rank that reads it
        assert name in refused[0]
        (tmp_path / name).write_bytes(b"0123")


def test_inner_folder_is_checked_by_its_own_manifest(tmp_path: Path) -> None:
    inner = tmp_path / "train" / "checkpoints" / "step-10"
    inner.mkdir(parents=True)
    (inner / "weights.bin").write_bytes(b"0123")
    seal_folder(inner, {"step": 10})
    seal_folder(tmp_path / "train", {"stage": "train"})
    assert set(verify_folder(tmp_path / "train")["files"]) == {"checkpoints/step-10/manifest.json"}
    (inner / "weights.bin").write_bytes(b"0124")
    with pytest.raises(DamagedArtifactError, match=r"step-10/weights\.bin"):
        verify_folder(tmp_path / "train")


def test_changed_files_of_the_model_are_named_and_earlier_folders_reused(tmp_path: Path) -> None:
    work = [Stage("work", run=write_result)]
    complete(tmp_path, work)
    hashed = [replace(work[0], model_files={"generation_config.json": "a"})]
    assert hashed[0].fingerprint == work[0].fingerprint
    assert actions(tmp_path, hashed) == {"work": "reuse"}  # an earlier version recorded none
    complete(tmp_path, hashed, fresh="work")
    assert actions(tmp_path, hashed) == {"work": "reuse"}
    changed = [replace(work[0], model_files={"generation_config.json": "b"})]
    with pytest.raises(UserError, match=r"generation_config\.json: a -> b.*--fresh work"):
        complete(tmp_path, changed)
