"""The stage `train` as a recipe: its command line, what it leaves, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from bosch.assets import asset_folder
from bosch.recipes import prepare_lessons, prepare_tokens, presets, train_model
from bosch.run import progress
from bosch.run.errors import UserError
from bosch.run.files import verify_folder
from tests.odd_tokenizers import with_another_tokenizer

SMALL = "--batch-sequences 2 --precision fp32 --kernels torch --max-steps 2".split()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "tokens"
    options = f"--model {presets.SMOKE_MODEL} --tokens 4k --sequence-length 128 --workers 1"
    prepare_tokens.main([*options.split(), "--held-out-sequences", "2", "--out", str(folder)])
    progress.close()
    return folder


def train(tokens: Path, out: Path, *more: str, model: str = presets.SMOKE_MODEL) -> None:
    arguments = ["--model", model, "--tokens-from", str(tokens), "--out", str(out)]
    train_model.main([*arguments, *SMALL, *more])


def test_command_trains_says_what_it_does_and_is_reused(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "train"
    with pytest.raises(UserError, match="128"):  # and can be corrected
        train(tokens, out, "--tokens", "128")
    train(tokens, out)
    assert f"trained model in {out / 'step-000002'}" in capsys.readouterr().out
    verify_folder(out)
    assert list(tmp_path.iterdir()) == [out]  # its curves too are in its own folder
    assert list((out / "tb").glob("events*"))
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    assert (out / "step-000002" / "tokenizer.json").is_file()

    train(tokens, out)
    assert "train: complete, reused" in capsys.readouterr().out
    for option in ("--weight-decay", "--train.weight_decay"):  # as recover.py and run.json have it
        with pytest.raises(UserError, match=r"weight_decay: 0\.1 -> 0\.2"):
            train(tokens, out, option, "0.2")
    # It is no dense model any more, which could teach.
    trained, learns = str(out / "step-000002"), ("--objective", "distill")
    with pytest.raises(UserError, match=r"was trained.*bosch train --teacher"):
        train(tokens, tmp_path / "more", *learns, model=trained)
    given = ["--model", trained, "--tokens-from", str(tokens), "--shares", "8"]
    with pytest.raises(UserError, match="was trained"):
        prepare_lessons.main([*given, "--out", str(tmp_path / "lessons")])
    train(tokens, tmp_path / "more", *learns, "--teacher", presets.SMOKE_MODEL, model=trained)


def test_command_trains_on_lessons_of_its_tokens_alone(tokens: Path, tmp_path: Path) -> None:
    lessons, out = tmp_path / "lessons", tmp_path / "train"
    given = ["--model", presets.SMOKE_MODEL, "--tokens-from", str(tokens)]
    prepare_lessons.main([*given, "--shares", "8", "--out", str(lessons)])
    learned = ["--lessons-from", str(lessons), "--objective", "distill"]
    train(tokens, out, *learned)
    assert (out / "step-000002" / "config.json").is_file()
    with pytest.raises(UserError, match="pass --objective distill"):
        train(tokens, tmp_path / "other", *learned[:2], "--objective", "next-token")
    with pytest.raises(UserError, match=r"are for temperature 1, not 2\.0"):
        train(tokens, tmp_path / "other", *learned, "--temperature", "2")
    with pytest.raises(UserError, match=r"are for shares 8, not 9"):
        train(tokens, tmp_path / "other", *learned, "--stored-shares", "9")
    another = tmp_path / "another"  # of the same tokens
    shutil.copytree(asset_folder(presets.SMOKE_MODEL), another)
    config = json.loads((another / "config.json").read_text())
    (another / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(UserError, match=f"are not of train.teacher {another}"):
        train(tokens, tmp_path / "other", *learned, "--teacher", str(another))
    (another / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    with pytest.raises(UserError, match=r"sequences of \d+: .*another has 64 positions"):
        prepare_lessons.main(["--model", str(another), *given[2:], "--out", str(tmp_path / "no")])
    # As models of a family that differ in the room for further tokens.
    (another / "config.json").write_text(json.dumps(config))
    wider = AutoModelForCausalLM.from_pretrained(another, dtype="float32")
    wider.resize_token_embeddings(2112)
    wider.save_pretrained(another)
    with pytest.raises(UserError, match=r"are for vocabulary 2048, not 2112"):
        train(tokens, tmp_path / "other", *learned, model=str(another))
    with pytest.raises(UserError, match=f"{tokens} holds no lessons"):
        train(tokens, tmp_path / "other", "--lessons-from", str(tokens), *learned[2:])


def test_tokens_of_another_tokenizer_are_refused(tokens: Path, tmp_path: Path) -> None:
    model = with_another_tokenizer(asset_folder(presets.SMOKE_MODEL), tmp_path / "model")
    with pytest.raises(UserError, match="another tokenizer"):
        train(tokens, tmp_path / "train", model=str(model))
