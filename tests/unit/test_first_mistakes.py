"""What a new user gets wrong in the first hour: the sentence names what was meant."""

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import bosch
from bosch.assets import asset_folder
from bosch.config import Config, describe_config
from bosch.data.calibration import read_questions
from bosch.eval.settings import configure_suites
from bosch.eval.suites._interface import Request
from bosch.hybrid.materialize import materialize
from bosch.hybrid.models import family_of
from bosch.masks.mask import read_mask
from bosch.model import load_model, load_tokenizer, read_model_config
from bosch.recipes.command import parse_command
from bosch.recipes.evaluate_model import main as evaluate_model
from bosch.recipes.generate_text import main as generate_text
from bosch.recipes.python_calls import _settings
from bosch.recipes.recover import main as recover
from bosch.run.errors import MissingFileError, UserError, as_sentence, exit_on_user_error
from bosch.run.folder import RunFolder
from bosch.run.stage import Stage
from tests.hybrid_folders import plain_folder, record_for

SMALL = asset_folder("tiny-qwen3-2layer")


# ------------------------------------------------------------------------------ files and folders


def test_the_folder_of_a_mask_names_the_file_in_it(tmp_path: Path) -> None:
    for inside, parent in (("mask.json", tmp_path / "mask"), ("mask/mask.json", tmp_path / "run")):
        (file := parent / inside).parent.mkdir(parents=True)
        file.write_text("{}")
        with pytest.raises(UserError, match="is a folder; pass") as refused:
            read_mask(parent)
        assert str(file) in str(refused.value)
    with pytest.raises(UserError, match=r"is a folder; it holds no mask\.json"):
        read_mask(SMALL)


def test_the_folder_of_a_run_offers_its_trained_model(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"no config\.json; pass a Hugging Face"):
        read_model_config(tmp_path)
    shutil.copytree(SMALL, tmp_path / "model")
    with pytest.raises(MissingFileError, match=r"pass a model in it, as .*/model"):
        read_model_config(tmp_path)
    for step in (20, 100):
        shutil.copytree(SMALL, tmp_path / "train" / f"step-{step:06d}")
    with pytest.raises(MissingFileError, match=r"folder of a run; .*/train/step-000100"):
        read_model_config(tmp_path)
    (tmp_path / "tokens").mkdir()
    with pytest.raises(MissingFileError, match=r"folder of a run; .*/train/step-000100"):
        generate_text(["--model", str(tmp_path), "--prompt", "Once"])


def test_a_model_without_a_tokenizer_is_told_that(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(SMALL / name, tmp_path)
    with pytest.raises(MissingFileError, match=r"has no tokenizer: neither tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.fixture
def locked() -> Iterator[Path]:
    """A folder that this process may not write, with a file that it may not read. Root may do
    everything, so it acts as another user here."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    (folder := place / "locked").mkdir()
    (folder / "config.json").write_text("{}")
    is_root = os.geteuid() == 0
    (folder / "config.json").chmod(0o000)
    folder.chmod(0o555)
    if is_root:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)
        shutil.rmtree(place)


def test_a_folder_without_permission_is_named_before_work_begins(locked: Path) -> None:
    stage = Stage("one", run=lambda out: None)
    with pytest.raises(UserError, match="may not write in") as refused:
        RunFolder(locked / "runs" / "mine").check([stage])
    assert str(locked) in str(refused.value)
    with pytest.raises(PermissionError) as error:
        (locked / "new").mkdir()
    assert as_sentence(error.value) == (
        f"{locked / 'new'}: permission denied. Name another place, or change its permissions."
    )
    with pytest.raises(PermissionError) as error:
        read_model_config(locked)
    assert "Errno" not in as_sentence(error.value)


def test_a_dry_run_refuses_a_folder_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    may = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *a, **k: Path(path) != tmp_path and may(path, *a, **k)
    )
    words = ["--preset", "smoke", "--dry-run", "--run-dir", str(tmp_path / "runs" / "a")]
    with pytest.raises(SystemExit) as stop:
        exit_on_user_error(lambda: recover(words), debug=False)
    assert stop.value.code == 2
    assert f"may not write in {tmp_path}" in capsys.readouterr().err


# ------------------------------------------------------------------------------- names and values


def test_a_misspelled_field_of_a_question_is_told_the_right_one(tmp_path: Path) -> None:
    for row, wrong, right in (
        ({"text": "a", "question": "b", "anwser": "c"}, "anwser", "answer"),
        ({"text": "a", "qestion": "b", "answer": "c"}, "qestion", "question"),
        ({"text": "a", "Question": "b", "Answer": "c"}, "Question", "question"),
    ):
        path = tmp_path / "own.jsonl"
        path.write_text(json.dumps(row) + "\n")
        with pytest.raises(UserError, match=f"no field '{wrong}'; did you mean '{right}'"):
            read_questions(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NIAH", "did you mean 'niah'"),
        ("LongBenchv2", "did you mean 'longbench_v2'"),
        ("mmlu", "--suite lm-eval:mmlu"),
    ],
)
def test_an_unknown_suite_is_told_what_was_meant(name: str, words: str) -> None:
    request = Request(Config().eval, 1_024, "toy", None)
    with pytest.raises(UserError, match=words) as refused:
        configure_suites([name], request)
    assert repr(name) in str(refused.value)
    with pytest.raises(UserError, match=words):
        evaluate_model(["--suite", name])


@pytest.mark.parametrize("between", [" ", ","])
def test_lists_are_separated_by_blanks_or_commas(between: str, tmp_path: Path) -> None:
    def given(option: str, *words: str) -> Config:
        return parse_command([f"--{option}", *between.join(words).split()]).config

    assert given("eval.suites", "niah", "ruler").eval.suites == ("niah", "ruler")
    assert given("eval.niah-lengths", "1k", "2048").eval.niah_lengths == (1000, 2048)
    assert given("train.betas", ".9", ".99").train.betas == (0.9, 0.99)
    with pytest.raises(UserError, match="betas: expected 2 arguments"):
        given("train.betas", ".9", ".99", ".999")


def test_a_word_with_commas_that_is_no_list_stays_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a,b.txt").touch()
    monkeypatch.chdir(tmp_path)
    for words in (["a,b.txt"], ["name=a,b"], ["lm-eval:piqa,mmlu"], ["owner/a,owner/b"]):
        assert parse_command(["--data.source", *words]).config.data.source == tuple(words)


def test_the_settings_of_a_run_are_printed_as_they_are_typed() -> None:
    words = ["--ratio", ".5", "--train.compile", "False", "--eval.checkpoints", "0", "0.1234567891"]
    config = parse_command([*words, "--data.source", "my texts/", "toy"]).config
    lines = describe_config(config)
    assert "--data.source 'my texts/' toy" in " ".join(lines)
    assert parse_command(shlex.split(" ".join(lines))).config == config


def test_what_differs_from_the_preset_is_printed_as_it_is_typed() -> None:
    preset = ["--preset", "small", "--model", "tiny-qwen3"]
    words = ["--data.no-document-mask", "--train.peak-learning-rate", "0.0001234567"]
    words += ["--mask.starts", "--train.compile", "None", "--eval.checkpoints", "0", "0.1234567891"]
    command = parse_command([*preset, *words, "--data.source", "my texts/"])
    text = " ".join(command.describe_changes())
    typed = text.removeprefix("unlike the preset: ").removesuffix("(--show-settings lists all)")
    assert parse_command([*preset, *shlex.split(typed)]).config == command.config
    for words in ("--data.no-document-mask", "--mask.starts --", "0.0001234567 ", "'my texts/'"):
        assert words in typed


def test_one_word_where_several_are_taken_is_not_read_letter_by_letter() -> None:
    chosen = _settings(dict, type(Config().eval), {"niah_tasks": "niah_single_1", "samples": 2})
    assert chosen == {"niah_tasks": ("niah_single_1",), "samples": 2}
    model = load_model(SMALL, "auto", "cpu", attn_implementation="bosch")
    settings = {"niah_essays": "toy", "samples": 1, "niah_tasks": "niah_single_1"}
    rows = bosch.evaluate(model, suites="niah", lengths=[256], **settings)
    assert {row["suite"] for row in rows} == {"niah"}
    with pytest.raises(UserError, match="did you mean 'niah'"):
        bosch.evaluate(model, suites="NIAH")


def test_a_path_in_the_place_of_a_model_names_the_call_that_loads_it() -> None:
    mask = bosch.load_mask  # not called
    for call in (
        lambda: bosch.materialize(str(SMALL), mask),
        lambda: bosch.search_mask(SMALL, ratio=0.5, window=8),
        lambda: bosch.evaluate(SMALL),
        lambda: bosch.masked(SMALL, mask).__enter__(),
    ):
        with pytest.raises(UserError, match=r"is a path, .* AutoModelForCausalLM\.from_pretrained"):
            call()


def test_an_unknown_family_names_the_page_that_adds_one(tmp_path: Path) -> None:
    config = load_model(plain_folder(tmp_path / "m"), "auto", "cpu").config
    config.model_type = "qwen9"
    with pytest.raises(UserError, match=r"'qwen9' .* docs/extending\.md"):
        family_of(config)


def test_a_hybrid_in_the_place_of_a_dense_model_names_the_way_back(tmp_path: Path) -> None:
    dense, hybrid = plain_folder(tmp_path / "dense"), tmp_path / "hybrid"
    materialize(dense, record_for(dense), hybrid)
    with pytest.raises(UserError, match="`bosch materialize --reverse --model") as refused:
        recover(["--model", str(hybrid), "--dry-run"])
    assert f"--model {hybrid} --out" in str(refused.value)
