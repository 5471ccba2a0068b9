"""recipes/calibrate.py: the command, what it compares the set with, and the stage of recover.py."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bosch.calibration import Haystack, read_calibration
from bosch.data.tokenizer_files import describe_tokenizer
from bosch.eval.judging import check_calibration, judging_of
from bosch.eval.runner import describe_examples, load_examples, write_examples
from bosch.eval.suites._interface import Example
from bosch.model import load_tokenizer
from bosch.recipes.calibrate import build, main
from bosch.recipes.presets import smoke
from bosch.recipes.recover import main as recover
from bosch.run import progress
from bosch.run.errors import UserError
from bosch.run.files import read_sealed_json, verify_folder
from bosch.run.folder import RunFolder
from bosch.run.stage import follow_reference


def command(*more: str, out: Path) -> None:
    options = f"--model {smoke().model} --examples 6 --length 384 --questions-per-context 1"
    main([*options.split(), "--out", str(out), *more])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("set") / "calibration"
    command(out=out)
    progress.close()
    return out


def test_command_writes_a_sealed_set_that_reads_back(written: Path) -> None:
    verify_folder(written)
    calibration = read_calibration(written)
    assert (calibration.num_questions, calibration.longest <= 384) == (6, True)


@pytest.mark.parametrize("field", ["input", "prompt"])
def test_a_set_with_a_tests_needle_is_refused(field: str, written: Path, tmp_path: Path) -> None:
    text = json.loads((written / "examples.jsonl").read_text().splitlines()[0])["text"]
    test = tmp_path / "test.jsonl"
    # A line separator inside a text must not count as the end of a row.
    rows = [{field: "Nothing.\N{LINE SEPARATOR}Nothing at all."}, {field: f"Leaked. {text}"}]
    test.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    with pytest.raises(UserError, match="test example 2"):
        command("--against", str(test), out=tmp_path / "calibration")
    assert not (tmp_path / "calibration" / "manifest.json").exists()
    test.write_text('{"question": "Where?"}\n')
    with pytest.raises(UserError, match=r"row 1 .*`input` or `prompt`"):
        command("--against", str(test), out=tmp_path / "none")
    test.write_text(json.dumps(rows[0]) + "\n")
    command("--against", str(test), out=tmp_path / "other")
    assert read_sealed_json(tmp_path / "other" / "calibration.json")["test_examples_compared"] == 1


def test_set_is_compared_with_the_examples_of_the_runs_evaluation(tmp_path: Path) -> None:
    few = replace(smoke().eval, niah_tasks=("niah_single_1",), niah_samples=3)
    config, run_path, shared = replace(smoke(), eval=few), tmp_path / "run", tmp_path / "shared"
    with RunFolder(run_path, say=lambda line: None) as run:
        run.complete(build(config))
    assert check_calibration(config, run_path) == 0  # no evaluation has run yet
    (needles, *_) = judging_of(config).suites
    (task,) = needles.suite.list_tasks(needles.settings)
    tokenizer = load_tokenizer(config.model)
    tokenizer_hash = describe_tokenizer(tokenizer).hash
    load_examples(needles, task, tokenizer, tokenizer_hash, shared)
    assert check_calibration(config, run_path) == 3
    # A test example that holds a needle of the set, where the evaluation looks for its examples.
    (folder,) = shared.glob("examples-*")
    texts = follow_reference(run_path / "calibration") / "examples.jsonl"
    own = json.loads(texts.read_text().splitlines()[0])
    leaked = Example(0, own["text"], ("1",), 4)
    write_examples(folder, [leaked], 3, describe_examples(needles, task, tokenizer_hash))
    with pytest.raises(UserError, match="test example 1"):
        check_calibration(config, run_path)


TEXT = "The key is under the mat. " * 30
OWN = {"text": TEXT, "question": "Where is the key?", "answer": "under the mat"}


def write_questions(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def read_own(path: Path) -> tuple[Any, Sequence[Haystack]]:
    """What the command makes of these questions, and the tokenizer."""
    out = path.parent / "calibration"
    main(["--model", smoke().model, "--questions", str(path), "--out", str(out)])
    return load_tokenizer(smoke().model), read_calibration(out).haystacks


def test_own_questions_make_the_set_and_their_content_decides_it(tmp_path: Path) -> None:
    """The search scores exactly the tokens of each answer, after the text and the question."""
    other = {"text": "", "question": "Two and two are", "answer": "four"}
    path = write_questions(tmp_path / "own.jsonl", OWN, "", other)
    tokenizer, haystacks = read_own(path)
    texts = [tokenizer.decode(haystack.ids_T) for haystack in haystacks]
    assert texts == [f"{TEXT.strip()}\nWhere is the key? under the mat", "Two and two are four"]
    answers = [tokenizer.decode(h.ids_T[list(h.questions[0].answer)]) for h in haystacks]
    assert answers == [" under the mat", " four"]

    config = replace(smoke(), calibration=replace(smoke().calibration, questions=str(path)))
    before = build(config).fingerprint
    write_questions(path, OWN)
    assert build(config).fingerprint != before


def test_a_text_alone_is_judged_by_its_last_quarter(tmp_path: Path) -> None:
    words, no_blanks = "The key is under the mat, as always.", "abcdefgh"
    path = write_questions(tmp_path / "own.jsonl", {"text": words, "by": "me"}, {"text": no_blanks})
    tokenizer, haystacks = read_own(path)
    parts = []
    for haystack in haystacks:
        answer = haystack.questions[0].answer
        pair = (range(answer.start), answer)
        parts.append([tokenizer.decode(haystack.ids_T[list(part)]) for part in pair])
    assert parts == [["The key is under the mat, as", " always."], ["abcdef", "gh"]]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "own.jsonl holds no questions"),
        ([OWN, "", {"text": TEXT, "question": "Where?"}], "line 3 has no field 'answer'"),
        ([OWN, OWN | {"answer": None}], "line 2: 'answer' is null"),
        ([OWN, "Where is the key?"], "line 2 is not JSON"),
        ([OWN, OWN | {"text": TEXT * 20}], r"line 2 takes \d,\d+ tokens, .* 2,048 positions"),
    ],
)
def test_unusable_questions_name_their_line(rows: list[object], named: str, tmp_path: Path) -> None:
    path = write_questions(tmp_path / "own.jsonl", *rows)
    with pytest.raises(UserError, match=named):
        read_own(path)
    with pytest.raises(UserError, match=named):
        recover(["--preset", "smoke", "--calibration.questions", str(path)])
    assert list(tmp_path.iterdir()) == [path]
